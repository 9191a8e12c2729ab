"""Watching the end of a process that is not our child.

A pidfd becomes readable when the process is gone, which is exact and can be late: the kernel first releases its memory,
seconds for a training rank. What it cannot come back from is seen at once in /proc, and has to be looked for.
"""

from __future__ import annotations

import os
import select
import signal


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


def state(pid: int) -> str:
    """The letter in /proc for the first thread: "T" stopped, "t" held by a debugger, and others; "" where unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def tracer(pid: int) -> int:
    """The process that traces this one (a debugger, strace), 0 when there is none.

    Raises:
        OSError: that cannot be known.
    """
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("TracerPid:"))


_PF_EXITING = 0x4
_SIGKILL_PENDING = 1 << (signal.SIGKILL - 1)


def is_ending(pid: int) -> bool:
    """True when no thread of the process will ever run its own code again.

    Each is in the kernel's exit path, or has a pending SIGKILL that it will meet there. A process whose first thread
    ended while others go on is not ending.
    """
    try:
        if not _task_ends(f"/proc/{pid}/stat"):
            return False
        return all(_task_ends(f"/proc/{pid}/task/{task}/stat") for task in os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return True  # its first thread is gone, and it as a whole since
    except OSError:
        return False  # no /proc that we may read: the pidfd tells all the same, later


def _task_ends(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            # Behind the name, which may hold anything: state, ..., flags (7th), ..., pending signals (29th).
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True  # gone already
    return bool(int(fields[6]) & _PF_EXITING or int(fields[28]) & _SIGKILL_PENDING)
