"""A directory that is kept is passed over by who removes old files, as long as its process lives."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from mindspeed_tft import kept


def locked(directory: Path) -> bool:
    """As systemd-tmpfiles finds out."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def test_it_is_locked_until_it_is_let_go(tmp_path: Path) -> None:
    assert not locked(tmp_path)
    kept.keep(tmp_path)
    kept.keep(tmp_path)
    assert locked(tmp_path)
    kept.let_go(tmp_path)
    kept.let_go(tmp_path)
    assert not locked(tmp_path)
