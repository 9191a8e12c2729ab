"""Between the training thread, which updates its optimizer, and the thread that hears of a stop.

A stop callback aborts what the device does. An update in the middle of that would be lost, and with it perhaps the only
state of a completed step. So a stop waits for the end of an update, and a moment longer for one that is about to begin:
who comes out of the barrier before an update after others were stopped has every right to it.
"""

from __future__ import annotations

import threading
import time

GRACE = 0.25  # seconds from one rank's way out of the barrier to the last one's, and some more


class Gate:
    """Updates pass while it is open. Two threads use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._updating = False
        self._entered = 0  # updates so far
        self._arrived = False  # the training thread waits for orders: it begins no update
        self._closed = 0  # epoch of the last stop whose callback has begun
        self._done = 0  # and has ended

    @property
    def updating(self) -> bool:
        return self._updating

    def enter(self, open_since: int) -> bool:
        """An update begins. False: not any more, for a stop of a later epoch than `open_since`."""
        with self._changed:
            if self._closed > open_since:
                return False
            self._updating, self._entered = True, self._entered + 1
            self._changed.notify_all()
            return True

    def leave(self) -> None:
        """The update has ended."""
        with self._changed:
            self._updating = False
            self._changed.notify_all()

    def arrive(self) -> bool:
        """The training thread left training. True: in the middle of an update."""
        with self._changed:
            torn, self._updating, self._arrived = self._updating, False, True
            self._changed.notify_all()
            return torn

    def depart(self) -> None:
        """The training thread trains again."""
        with self._changed:
            self._arrived = False

    def closing(self, open_since: int) -> bool:
        """Whether a stop of a later epoch has closed it: training has to stop."""
        with self._changed:
            return self._closed > open_since

    def close(self, epoch: int, within: float) -> bool:
        """Before the callback of a stop, by the other thread: no update begins from here on. False: one did not end
        `within` seconds."""
        end = time.monotonic() + within
        with self._changed:
            before = self._entered
            whole = self._changed.wait_for(lambda: not self._updating, within)
            if whole and not self._arrived and self._entered == before:
                self._changed.wait_for(lambda: self._arrived or self._entered > before, GRACE)
                whole = self._changed.wait_for(lambda: not self._updating, max(0.0, end - time.monotonic()))
            self._closed = max(self._closed, epoch)
            return whole

    def stopped(self, epoch: int) -> None:
        """The callback of that stop has ended."""
        with self._changed:
            self._done = max(self._done, epoch)
            self._changed.notify_all()

    def wait_stopped(self, epoch: int, within: float) -> bool:
        """Wait until the callback of this stop has ended; False: not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= epoch, within)
