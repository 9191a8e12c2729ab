"""Word the command with which a user resumes, from the command line that started this job."""

from __future__ import annotations

import os
import shlex
import sys

import psutil

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "tftrun", "tft-run")


def command(save: str) -> str:
    """The job's own command line with `--load SAVE` in it."""
    words = _launcher_words() or [sys.executable, *sys.argv]
    return " ".join(shlex.quote(word) for word in with_load(words, save))


def with_load(words: list[str], save: str) -> list[str]:
    """`words` with the option --load set to `save`, replacing one that is there."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word == "--load":
            skip = True
        elif not word.startswith("--load="):
            kept.append(word)
    return [*kept, "--load", save]


def _launcher_words() -> list[str]:
    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []  # gone or not ours to look at: the rank's own command line has to do
    return words if any(name in word for word in words[:4] for name in _LAUNCHERS) else []
