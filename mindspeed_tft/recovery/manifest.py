"""Before a dump is loaded: are its files what they were when they were written?

Every rank reads a share of the files, so that each is read once. Who has no manifest is no dump of ours, and is not
looked at. What the files mean is nobody's business here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.files import MANIFEST, DumpError

_INDEX = ".metadata"  # of torch's distributed checkpoints


@dataclass(frozen=True)
class Stated:
    """What the manifest states of a file."""

    sha256: str
    size: int  # bytes


def read(checkpoint: Path) -> dict[str, Stated]:
    """The files of a checkpoint by their names, in order; empty where it has no manifest.

    Raises:
        DumpError: there is a manifest that says nothing.
    """
    try:
        stated = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {name: Stated(str(entry["sha256"]), int(entry["bytes"])) for name, entry in sorted(stated.items())}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DumpError(f"{checkpoint / MANIFEST} cannot be read ({type(exc).__name__}: {exc})") from exc


def written_over(checkpoint: Path, stated: Mapping[str, Stated]) -> bool:
    """Whether the framework, without us, has saved that step once more: then all files are younger than the manifest,
    which came last, or the index is (a save in format `torch_dist` has other files)."""
    try:
        last = (checkpoint / MANIFEST).stat().st_mtime
        judged = [name for name in stated if name == _INDEX] or list(stated)
        return bool(judged) and all((checkpoint / name).stat().st_mtime > last + 1 for name in judged)
    except OSError:
        return False


def share(stated: Mapping[str, Stated], rank: int, ranks: int) -> list[str]:
    """The names of the files that this rank reads: about the same number of bytes for each, every file once."""
    loads = [0] * ranks
    mine = []
    for name in sorted(stated, key=lambda name: (-stated[name].size, name)):
        least = loads.index(min(loads))
        loads[least] += stated[name].size + 1
        if least == rank:
            mine.append(name)
    return sorted(mine)


def why_wrong(checkpoint: Path, name: str, stated: Stated) -> str:
    """What is wrong with a file; "" when it is as stated."""
    path = checkpoint / name
    try:
        size = path.stat().st_size
        if size != stated.size:
            return f"it has {size} bytes, and was written with {stated.size}"
        found = files.sha256_of(path)
    except OSError as exc:
        return f"it cannot be read ({exc.strerror or exc})"
    return "" if found == stated.sha256 else f"it has sha256 {found[:12]}, and was written with {stated.sha256[:12]}"


def first_wrong(checkpoint: Path, stated: Mapping[str, Stated], rank: int, ranks: int) -> int | None:
    """The position in `stated` of the first file in this rank's share that is not as stated; None: all are."""
    mine = set(share(stated, rank, ranks))
    for index, (name, entry) in enumerate(stated.items()):
        if name in mine and why_wrong(checkpoint, name, entry):
            return index
    return None


def refusal(checkpoint: Path, name: str, stated: Stated) -> str:
    """The words for a file that is not as stated: which, what is wrong, and what to do."""
    why = why_wrong(checkpoint, name, stated) or "another rank reads something else there than this one"
    return (
        f"{checkpoint / name} is not what the dump wrote: {why}. Remedy: load an older checkpoint (--ckpt-step), or "
        f"copy the file again; remove {MANIFEST} beside it only if it was changed on purpose"
    )
