"""The control of the oracle: damage a copy of a checkpoint by one byte, to show that the comparison sees it."""

from __future__ import annotations

import io
import shutil
import struct
import zipfile
from pathlib import Path

from mindspeed_tft.faults import compare, torch_dist

_LOCAL_HEADER = 30  # bytes of a zip entry's own header before its name
_LENGTHS = 26  # where in it the lengths of name and extra field stand


def damaged_copy(checkpoint: Path, target: Path) -> str:
    """Copy a checkpoint and flip one byte in the middle of a tensor; says where."""
    shutil.copytree(checkpoint, target)
    if torch_dist.is_checkpoint(target):
        return _flip_in_a_piece(target)
    file = max(target.rglob("distrib_optim.pt"), default=None, key=lambda path: path.stat().st_size)
    if file is None:
        raise FileNotFoundError(f"{checkpoint}: holds no distrib_optim.pt")
    return f"{file.relative_to(target)}: {flip_byte(file)}"


def _flip_in_a_piece(checkpoint: Path) -> str:
    """As `flip_byte`, in the largest piece of a moment that the data files of format `torch_dist` hold."""
    pieces = compare.open_sharded(checkpoint).pieces()
    moments = [(stored.length, name, stored) for name, stored in pieces if "exp_avg" in name]
    if not moments:
        raise FileNotFoundError(f"{checkpoint}: holds no state of an optimizer")
    _, name, stored = max(moments, key=lambda moment: moment[:2])
    return f"{name} in {stored.file}: {flip_byte(checkpoint / stored.file, stored.offset, stored.length)}"


def flip_byte(file: Path, start: int = 0, length: int | None = None) -> str:
    """Flip all bits of the byte in the middle of the largest tensor that `torch.save` wrote to a file, or to `length`
    bytes of it from `start` on, in place; says where."""
    with file.open("rb") as raw:
        raw.seek(start)
        saved = raw.read(-1 if length is None else length)
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        tensors = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    largest = max(tensors, key=lambda entry: entry.file_size)
    with file.open("r+b") as raw:
        raw.seek(start + largest.header_offset + _LENGTHS)
        name, extra = struct.unpack("<HH", raw.read(4))
        position = start + largest.header_offset + _LOCAL_HEADER + name + extra + largest.file_size // 2
        raw.seek(position)
        byte = raw.read(1)[0]
        raw.seek(position)
        raw.write(bytes([byte ^ 0xFF]))
    return f"byte {position} {byte:02x} -> {byte ^ 0xFF:02x}"
