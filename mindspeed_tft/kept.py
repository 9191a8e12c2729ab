"""Directories below /tmp that a running job needs for weeks, though nobody reads or writes them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_held: dict[Path, int] = {}


def keep(directory: Path) -> None:
    """Hold a shared lock (flock(2)) on a directory until this process ends: what removes files by their age, such as
    systemd-tmpfiles(8), passes over what is locked."""
    if directory in _held:
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # who needs it will say so
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # a file system without locks, or somebody who removes it right now
        os.close(descriptor)
    else:
        _held[directory] = descriptor


def let_go(directory: Path) -> None:
    """It is not needed any more."""
    descriptor = _held.pop(directory, None)
    if descriptor is not None:
        os.close(descriptor)
