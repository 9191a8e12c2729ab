"""Where a job of MindSpore keeps its checkpoints, and how they are found again. Knows no MindSpore.

    SAVE/step_0000007/<part>.ckpt   MindSpore's own format: `mindspore.load_checkpoint` reads it without this plugin
    SAVE/step_0000007/tft_manifest.json
    SAVE/latest_step.txt

Ranks with the same parameters are a part, and one of them writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_tft.recovery import files

PREFIX = ".tft-dump-"  # of the engine's names for attempts, hidden beside the checkpoints
TRACKER = "latest_step.txt"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def checkpoint(base: Path, step: int) -> Path:
    """The directory of the checkpoint of `step` below `base`."""
    return base / f"step_{step:07d}"


def part_file(directory: Path, part: str) -> Path:
    return directory / f"{part}.ckpt"


def tracker(base: Path) -> Path:
    return base / TRACKER


def valid_part(part: str) -> bool:
    """Whether a part can be the name of a file."""
    return _PART.fullmatch(part) is not None


def attempt(base: Path, name: str) -> Path:
    """The directory of an attempt to save. Orders come over a socket: they may only name one of ours inside `base`.

    Raises:
        DumpError: another name.
    """
    if Path(name).name != name or not name.startswith(PREFIX):
        raise files.DumpError(f"{name!r} is not the name of a dump directory ({PREFIX}...)")
    return base / name


def latest(base: Path) -> int | None:
    """The step of the newest checkpoint; None when there is none.

    Raises:
        DumpError: the tracker cannot be read, or names what is not there.
    """
    path = tracker(base)
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise files.DumpError(f"cannot read {path}: {exc.strerror or exc}") from exc
    if not text.isdigit():
        raise files.DumpError(f"{path} holds {text!r}, and not the number of a step")
    return int(text)
