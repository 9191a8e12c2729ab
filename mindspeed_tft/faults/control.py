"""The control of the oracle: damage a copy of a checkpoint by one byte, to show that the comparison sees it."""

from __future__ import annotations

import shutil
import struct
import zipfile
from pathlib import Path

_LOCAL_HEADER = 30  # bytes of a zip entry's own header before its name
_LENGTHS = 26  # where in it the lengths of name and extra field stand


def damaged_copy(checkpoint: Path, target: Path) -> str:
    """Copy a checkpoint and flip one byte in the middle of a tensor; says where."""
    shutil.copytree(checkpoint, target)
    file = max(target.rglob("distrib_optim.pt"), default=None, key=lambda path: path.stat().st_size)
    if file is None:
        raise FileNotFoundError(f"{checkpoint}: holds no distrib_optim.pt")
    return f"{file.relative_to(target)}: {flip_byte(file)}"


def flip_byte(file: Path) -> str:
    """Flip all bits of the byte in the middle of the largest tensor of a `.pt` file, in place; says where."""
    with zipfile.ZipFile(file) as archive:
        tensors = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    largest = max(tensors, key=lambda entry: entry.file_size)
    with file.open("r+b") as raw:
        raw.seek(largest.header_offset + _LENGTHS)
        name, extra = struct.unpack("<HH", raw.read(4))
        position = largest.header_offset + _LOCAL_HEADER + name + extra + largest.file_size // 2
        raw.seek(position)
        byte = raw.read(1)[0]
        raw.seek(position)
        raw.write(bytes([byte ^ 0xFF]))
    return f"byte {position} {byte:02x} -> {byte ^ 0xFF:02x}"
