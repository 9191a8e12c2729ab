"""What a rank can learn about the launcher above it: its command line, and how long it lets survivors live."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

import psutil

_NAMES = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "tftrun")
_OPTIONS = ("--shutdown-timeout", "--shutdown_timeout")
ENV_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
TORCHRUN_DEFAULT = 30.0
_LOGS = ("--logs-specs", "--logs_specs")
OURS = "mindspeed_tft"  # of them
_ENVIRONMENT = ("HIGH_AVAILABILITY", "TTP_ADDR", "TTP_OT")
# Options of Megatron that make it load another step, or not all of a checkpoint; True: followed by a value.
_LOADS_ELSE = {"--load": True, "--ckpt-step": True, "--pretrained-checkpoint": True, "--finetune": False,
               "--no-load-optim": False, "--no-load-rng": False}  # fmt: skip


def words() -> list[str]:
    """The launcher's command line; empty when this process was not started by one that we know."""
    try:
        found = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []  # gone or not ours to look at
    return found if any(name in word for word in found[:4] for name in _NAMES) else []


def patience(found: list[str]) -> float | None:
    """Seconds between the launcher's SIGTERM and SIGKILL to the survivors of a fault; None: not torchrun, or as long as
    the job's own deadline asks for.

    torch's --shutdown-timeout counts for signals to the launcher alone: after a failed worker the others have 30 s,
    unless the launcher is taught better (`--logs-specs mindspeed_tft`).
    """
    if not found or any("tftrun" in word for word in found[:4]):
        return None
    taught = _option(found, _LOGS) == OURS
    return _asked_for(found) if taught else min(TORCHRUN_DEFAULT, _asked_for(found))


def _asked_for(found: list[str]) -> float:
    return float(_option(found, _OPTIONS) or os.environ.get(ENV_SHUTDOWN, TORCHRUN_DEFAULT))


def _option(found: list[str], names: Sequence[str]) -> str:
    """The value of an option that has several spellings; "" when it was not given."""
    for position, word in enumerate(found):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else "".join(found[position + 1 : position + 2])
    return ""


def resume_command(save: str) -> str:
    """The job's own command line with `--load SAVE` in it, ready to paste in the same directory: also what protected it
    through the environment."""
    kept = [f"{name}={shlex.quote(os.environ[name])}" for name in _ENVIRONMENT if os.environ.get(name)]
    return " ".join([*kept, *map(shlex.quote, with_load(words() or [sys.executable, *sys.argv], save))])


def with_load(found: list[str], save: str) -> list[str]:
    """The option --load set to `save`; options that would load something else, or less, are left out."""
    kept: list[str] = []
    skip = False
    for word in found:
        name = word.split("=", 1)[0]
        if skip:
            skip = False
        elif name in _LOADS_ELSE:
            skip = _LOADS_ELSE[name] and "=" not in word
        else:
            kept.append(word)
    return [*kept, "--load", save]
