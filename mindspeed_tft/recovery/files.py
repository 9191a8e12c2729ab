"""Write checkpoint files so that a half-written one can never be taken for a whole one.

A dump goes to a directory of its own beside the checkpoints. Each file is hashed while it is written, synced, read
back and compared; the manifest lists every file with size and sha256; then one rename makes the checkpoint appear, and
only then the tracker names it. Knows nothing of what the files mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

MANIFEST = "tft_manifest.json"
_CHUNK = 1 << 22


class DumpError(RuntimeError):
    """A dump that could not be written or does not verify. Older checkpoints are untouched."""


class _Hashing:
    """A binary file that hashes what passes through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest, self.size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.digest.update(view)
        self.size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()


def write_verified(path: Path, write: Callable[[Any], None]) -> str:
    """Let `write` fill the file, sync it, read it back; returns the sha256 in hex.

    Raises:
        DumpError: the disk is full or fails, or what is read back is not what was written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            hashing = _Hashing(file)
            write(hashing)
            file.flush()
            os.fsync(file.fileno())
        found = sha256_of(path)
    except OSError as exc:
        raise DumpError(f"cannot write {path}: {exc.strerror or exc}") from exc
    except RuntimeError as exc:  # torch's zip writer turns a failed write into a RuntimeError
        raise DumpError(f"cannot write {path}: {_root_cause(exc)}") from exc
    wanted = hashing.digest.hexdigest()
    if found != wanted:
        raise DumpError(f"{path} does not read back as written: sha256 {found[:12]} instead of {wanted[:12]}")
    return found


def write_stamped(path: Path, write: Callable[[Any], None]) -> str:
    """As `write_verified`, and leave the sha256 beside the file for whoever reads it: another process of the job.

    Raises:
        DumpError: as there.
    """
    found = write_verified(path, write)
    write_text(_stamp(path), found)
    return found


def read_stamped(path: Path) -> bytes:
    """The content of a file that `write_stamped` wrote.

    Raises:
        DumpError: it cannot be read, or is not what was written.
    """
    try:
        stated = _stamp(path).read_text(encoding="utf-8").strip()
        content = path.read_bytes()
    except OSError as exc:
        raise DumpError(f"cannot read {path}: {exc.strerror or exc}") from exc
    found = hashlib.sha256(content).hexdigest()
    if found != stated:
        raise DumpError(f"{path} has sha256 {found[:12]}, its writer stated {stated[:12]}")
    return content


def _stamp(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _root_cause(exc: BaseException) -> str:
    while exc.__context__ is not None and isinstance(exc.__context__, OSError):
        exc = exc.__context__
    return str(exc).splitlines()[0] if str(exc) else type(exc).__name__


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace a small text file atomically and durably."""
    temporary = path.with_name(f".{path.name}.tft-tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as exc:
        temporary.unlink(missing_ok=True)
        raise DumpError(f"cannot write {path}: {exc.strerror or exc}") from exc


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fragment(directory: Path, part: str) -> Path:
    """The part of the manifest that one writer leaves for the publisher."""
    return directory / f"manifest-{part}.json"


def write_fragment(directory: Path, part: str, checkpoint: Path, hashes: dict[Path, str]) -> None:
    entries = {
        str(path.relative_to(checkpoint)): {"sha256": sha, "bytes": path.stat().st_size} for path, sha in hashes.items()
    }
    write_text(fragment(directory, part), json.dumps(entries, indent=1))


def read_fragment(directory: Path, part: str) -> dict[str, dict[str, Any]]:
    """What the writer of a part has left for the publisher: sha256 and bytes by file name.

    Raises:
        DumpError: it cannot be read.
    """
    try:
        found: dict[str, dict[str, Any]] = json.loads(fragment(directory, part).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise DumpError(f"no usable manifest of part {part} in {directory}: {exc}") from exc
    return found


def publish(
    directory: Path, checkpoint: Path, final: Path, tracker: Path, step: int, parts: list[str], facts: dict[str, Any]
) -> None:
    """Turn the files of all writers below `directory` into the checkpoint `final` and let the tracker name it.

    Raises:
        DumpError: a part is missing, a file has another size or hash than its writer stated.
    """
    files: dict[str, Any] = {}
    for part in parts:
        files.update(read_fragment(directory, part))
    _verify(checkpoint, files)
    write_text(checkpoint / MANIFEST, json.dumps({"step": step, "files": files, **facts}, indent=1, sort_keys=True))
    try:
        _set_aside(final, step)
        os.rename(checkpoint, final)
        sync_directory(final.parent)
    except OSError as exc:
        raise DumpError(f"cannot move the checkpoint to {final}: {exc.strerror or exc}") from exc
    write_text(tracker, str(step))
    shutil.rmtree(directory, ignore_errors=True)  # only staging files are left; the checkpoint is out of it


def _verify(checkpoint: Path, files: dict[str, Any]) -> None:
    present = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    if present - {MANIFEST} != set(files):
        raise DumpError(f"{checkpoint} holds {sorted(present)}, its writers stated {sorted(files)}")
    for name, entry in files.items():
        size = (checkpoint / name).stat().st_size
        if size != entry["bytes"]:
            raise DumpError(f"{checkpoint / name} has {size} bytes, its writer stated {entry['bytes']}")


def _set_aside(final: Path, step: int) -> None:
    """A directory of that step which the tracker does not name is what an interrupted save left: keep it, renamed."""
    if not final.exists():
        return
    for number in range(1000):
        aside = final.with_name(f"{final.name}.incomplete-{number}")
        if not aside.exists():
            os.rename(final, aside)
            return
    raise OSError(f"too many incomplete checkpoints of step {step}")


def discard(directory: Path) -> None:
    """Remove what a failed attempt left behind.

    Raises:
        DumpError: it cannot be removed.
    """
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise DumpError(f"cannot remove {directory}: {exc.strerror or exc}") from exc


def verify_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Check every file of a published dump against its manifest; returns the manifest.

    Raises:
        DumpError: no manifest, or a file that differs from it.
    """
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise DumpError(f"{checkpoint} has no readable {MANIFEST}: {exc}") from exc
    _verify(checkpoint, manifest["files"])
    for name, entry in manifest["files"].items():
        if sha256_of(checkpoint / name) != entry["sha256"]:
            raise DumpError(f"{checkpoint / name} does not have the sha256 of its manifest")
    return manifest
