"""Unbroken runs, kept so that many drills share one.

An entry is found only by everything that may change a byte of it: layout, flags, the program and the sources of
Megatron that run it, versions, and the machine's vector instructions. Its files are hashed when it is stored and
checked again whenever it is used: a damaged or outdated entry is never taken, it is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_ENTRY = "entry.json"


class SourcesChanged(RuntimeError):
    """What was just made cannot be said to belong to its key."""


class ReferenceCache:
    """Directories by key, each of them complete or absent."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: Callable[[], Mapping[str, Any]], make: Callable[[Path], None]) -> tuple[Path, bool]:
        """The entry of this key and whether it was there already; `make` fills a new one.

        Whatever `make` raises passes through, and nothing is kept then.

        Raises:
            SourcesChanged: the key is not the same any more after `make`.
        """
        wanted = json.loads(json.dumps(key()))
        entry = self._directory / digest_of(wanted)
        if self._holds(entry, wanted):
            return entry, True
        self._directory.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="making-", dir=self._directory))
        try:
            make(fresh)
            if json.loads(json.dumps(key())) != wanted:
                raise SourcesChanged("Megatron or the program was edited while the unbroken run was made; run it again")
            (fresh / _ENTRY).write_text(json.dumps({"key": wanted, "files": _hashes(fresh)}, indent=1))
            _replace(fresh, entry)
        except BaseException:
            shutil.rmtree(fresh)
            raise
        return entry, False

    def _holds(self, entry: Path, key: Mapping[str, Any]) -> bool:
        if not (entry / _ENTRY).is_file():
            return False
        try:
            stored = json.loads((entry / _ENTRY).read_text())
        except ValueError:
            return False  # damaged: make it anew
        return bool(stored.get("key") == key and stored.get("files") == _hashes(entry))


def digest_of(key: Mapping[str, Any]) -> str:
    """A short name for a key; the entry itself holds the whole key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]


def sources_digest(*roots: Path) -> str:
    """A hash over all Python files below these directories, or of these files."""
    digest = hashlib.sha256()
    for root in roots:
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        for file in files:
            name = file.name if file == root else str(file.relative_to(root))
            digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def environment_facts() -> dict[str, str]:
    """What of this machine may change the bytes of a run."""
    import numpy
    import torch

    return {
        "python": sys.version,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
    }


def _hashes(entry: Path) -> dict[str, str]:
    files = sorted(path for path in entry.rglob("*") if path.is_file() and path.name != _ENTRY)
    return {str(path.relative_to(entry)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _replace(fresh: Path, entry: Path) -> None:
    """Put a new entry in place; of two drills that made the same one, the later wins."""
    if entry.exists():
        outdated = Path(tempfile.mkdtemp(prefix="outdated-", dir=entry.parent))
        os.rename(entry, outdated / entry.name)
        os.rename(fresh, entry)
        shutil.rmtree(outdated)
    else:
        os.rename(fresh, entry)
