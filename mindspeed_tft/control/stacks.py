"""The stacks of a process that does not answer, written by that process itself.

A rank registers a handler for a free signal at the level of C, which writes the Python stacks of all threads also while
a native call holds the interpreter's lock. It writes into memory without a name in any file system, and the relay
finds it among the descriptors of the process: its label tells the signal. So the signal, which would end an unprepared
process, is never sent to one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import re
import signal
import threading
import time
from pathlib import Path

from mindspeed_tft.control import pids
from mindspeed_tft.observe.files import write_atomic

log = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds for the stacks, and once more for the file
_LABEL = "tft-stacks-"
_LINK = re.compile(rf"/memfd:{_LABEL}(\d+)")
_STEP = 0.02
_LARGEST = 16 << 20

_offered = -1


class NoStacks(Exception):
    """There is no file with stacks. The message says why."""


def offer() -> bool:
    """Make this process able to show its stacks; False where the system does not allow it, which costs only them."""
    global _offered
    if _offered >= 0:
        return True
    # From the end: programs that use such signals count from the beginning.
    free = (number for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if _is_free(number))
    try:
        number = next(free)
        fd = os.memfd_create(f"{_LABEL}{number}", os.MFD_CLOEXEC)
    except (StopIteration, AttributeError, OSError) as error:
        log.info("no stacks of this process are kept if it hangs: %r", error)
        return False
    faulthandler.register(number, file=fd, all_threads=True, chain=False)
    _offered = fd
    return True


def _is_free(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_DFL


async def keep(pid: int, pidfd: int, file: Path) -> Path:
    """Let the process write its stacks, and copy them into the file.

    Raises:
        NoStacks: it did not, or the file was not written, within `PATIENCE` seconds each.
    """
    if pids.state(pid) in ("T", "t"):
        raise NoStacks("its process is stopped")
    text = await _collect(pid, pidfd)
    return await _write(file, text)


async def _collect(pid: int, pidfd: int) -> bytes:
    try:
        path, number = _find(pid)
        with open(path, "rb") as memory:
            before = memory.seek(0, os.SEEK_END)
            signal.pidfd_send_signal(pidfd, number)
            size = await _settled(memory.fileno(), before)
            return os.pread(memory.fileno(), min(size - before, _LARGEST), before)
    except OSError as error:
        raise NoStacks(f"its process cannot be asked: {error}") from error


def _find(pid: int) -> tuple[str, int]:
    """The memory that the process writes its stacks into, and the signal that makes it do so."""
    directory = f"/proc/{pid}/fd"
    for name in os.listdir(directory):
        try:
            found = _LINK.match(os.readlink(f"{directory}/{name}"))
        except FileNotFoundError:
            continue  # closed since
        if found is not None:
            return f"{directory}/{name}", int(found[1])
    raise NoStacks("its process offers none")


async def _settled(fd: int, before: int) -> int:
    """The size of the memory, once it has grown and grows no more."""
    end, size = time.monotonic() + PATIENCE, before
    while time.monotonic() < end:
        await asyncio.sleep(_STEP)
        now = os.fstat(fd).st_size
        if now == size > before:
            return size
        size = now
    if size == before:
        raise NoStacks(f"its process wrote none within {PATIENCE:g} s")
    return size


async def _write(file: Path, text: bytes) -> Path:
    """In a thread of its own, that nobody waits for at the end: a shared file system may hang."""
    failed: list[str] = []
    done = threading.Event()

    def write() -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, text.decode("utf-8", "backslashreplace"))
        except OSError as error:
            failed.append(str(error))
        done.set()

    threading.Thread(target=write, name="tft-stacks", daemon=True).start()
    end = time.monotonic() + PATIENCE
    while not done.is_set() and time.monotonic() < end:
        await asyncio.sleep(_STEP)
    if failed:
        raise NoStacks(f"{file} cannot be written: {failed[0]}")
    if not done.is_set():
        raise NoStacks(f"{file} was not written within {PATIENCE:g} s")
    return file
