"""Watching the end of a process that is not our child, by pidfd: the descriptor becomes readable when it dies."""

from __future__ import annotations

import os
import select


def open_pidfd(pid: int) -> int:
    """A descriptor for the process, or -1 where the kernel, Python or a process namespace does not give one.

    Raises:
        ProcessLookupError: there is no such process any more.
    """
    if pid <= 0 or not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1


def is_dead(pidfd: int) -> bool:
    """True when the process behind the descriptor has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
