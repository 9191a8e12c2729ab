"""Wait for a communication so that another thread can always end the wait.

Two measured facts shape this file. Most gloo *collectives* may be waited for in slices: a slice that times out changes
nothing. A *send or receive* may not (its timed wait closes the connection), nor a *reduce-scatter* (its handle waits
for the operations that it is made of, however long). So the former are waited for in slices on the calling thread (no
hand-over, no cost), the latter on a helper thread while the caller sleeps on a condition that an abort sets too.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

SLICE = timedelta(milliseconds=50)  # longest time an abort can stay unseen by a rank blocked in a collective


TIMED_OUT = "Operation timed out"  # how torch's wait begins to say that a slice is over


class Abort:
    """A flag that ends every wait of this process, set by the control plane's worker thread."""

    def __init__(self) -> None:
        self.reason = ""
        self.epoch = 0  # of the latest abort
        self._flag = False
        self._lock = threading.Lock()
        self._sleepers: set[threading.Event] = set()

    @property
    def is_set(self) -> bool:
        return self._flag

    def set(self, reason: str, epoch: int) -> None:
        with self._lock:
            if epoch >= self.epoch or not self.reason:  # else a later stop has come already, and is why nothing works
                self.reason = reason
            self._flag, self.epoch = True, max(self.epoch, epoch)
            sleepers = list(self._sleepers)
        for sleeper in sleepers:
            sleeper.set()

    def clear(self, epoch: int) -> bool:
        """Communication is possible again, unless there was an abort after `epoch`: then False, and it stays set."""
        with self._lock:
            if self.epoch > epoch:
                return False
            self._flag, self.reason = False, ""
            return True

    def add(self, sleeper: threading.Event) -> None:
        with self._lock:
            self._sleepers.add(sleeper)
            if self._flag:
                sleeper.set()

    def remove(self, sleeper: threading.Event) -> None:
        with self._lock:
            self._sleepers.discard(sleeper)


_threads: dict[int, None] = {}  # that wait for peers; one step each to enter and to leave, so that no lock is needed


def for_peers() -> bool:
    """Whether a thread of this process waits for an operation that it does together with other ranks."""
    return bool(_threads)


class Interrupted(Exception):
    """The wait ended because of an abort; the operation below may still be under way."""


def wait_in_slices(work: Any, abort: Abort, until: float = math.inf) -> None:
    """Wait for a collective; raises what the operation raised, or `Interrupted` after an abort.

    `until`: the end of the wait, on the monotonic clock. Then what torch raised at the end of the last slice is raised,
    and the operation may still be under way.
    """
    me = threading.get_ident()
    _threads[me] = None
    try:
        _wait_in_slices(work, abort, until)
    finally:
        _threads.pop(me, None)


def _wait_in_slices(work: Any, abort: Abort, until: float) -> None:
    while True:
        try:
            work.wait(SLICE)
            return
        except RuntimeError as exc:
            if not str(exc).startswith(TIMED_OUT):
                raise
            if work.is_completed():
                work.wait()  # the slice ended just before the operation did: its own end is what counts
                return
            if time.monotonic() >= until:
                raise
        if abort.is_set:
            raise Interrupted(abort.reason)


def wait_on_device(work: Any, _abort: Abort) -> None:
    """Wait as the device does it, which is told to stop where this has to end (`Platform.stop_device`).

    For most devices that is no wait at all: later work of the stream waits there, and an error of this communication
    surfaces wherever the thread looks at a result.
    """
    work.wait()


_Jobs: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


def _run(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the operation, and that its buffers, until the next one otherwise


class Waiter:
    """A helper thread that waits for sends and receives in the place of one calling thread, and ends with it."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._jobs,), name="tft-p2p-wait", daemon=True).start()
        # The thread does not refer to this object, which goes when the calling thread (its thread-local data) does.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def wait(self, work: Any, abort: Abort) -> None:
        """Like `wait_in_slices`. After `Interrupted` this waiter may be stuck in the old operation: abandon it."""
        done = threading.Event()
        outcome: list[BaseException | None] = []

        def job() -> None:
            try:
                work.wait()
                outcome.append(None)
            except BaseException as exc:  # handed to the caller, which raises it
                outcome.append(exc)
            done.set()

        me = threading.get_ident()
        abort.add(done)
        _threads[me] = None
        try:
            if abort.is_set:
                raise Interrupted(abort.reason)
            self._jobs.put(job)
            done.wait()
        finally:
            _threads.pop(me, None)
            abort.remove(done)
        if not outcome:
            raise Interrupted(abort.reason)
        if outcome[0] is not None:
            raise outcome[0]

    def close(self) -> None:
        self._jobs.put(None)


_local = threading.local()


def wait_on_helper(work: Any, abort: Abort) -> None:
    """Wait for a send or receive on this thread's helper; a helper stuck in an aborted operation is replaced."""
    waiter: Waiter | None = getattr(_local, "waiter", None)
    if waiter is None:
        waiter = _local.waiter = Waiter()
    try:
        waiter.wait(work, abort)
    except Interrupted:
        waiter.close()
        _local.waiter = None
        raise
