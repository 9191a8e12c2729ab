"""The device stops with every stop of training, and goes on before anything is asked of it.

The control plane's worker thread stops it, for each stop anew; the main thread, once it has come out, has it go on. A
stop becomes known to the main thread before the device is stopped for it, so the main thread waits for the other one:
a device that was restarted too early would be stopped for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Halt:
    """Of one device. `stop` and `restart` are those of its `Platform`."""

    def __init__(self, stop: Callable[[], None], restart: Callable[[], None]) -> None:
        self._stop, self._restart = stop, restart
        self._epoch = 0  # of the last stop that was dealt with
        self._error = ""
        self._stopped = False  # and not restarted since
        self._condition = threading.Condition()

    def stop(self, epoch: int) -> None:
        """Stop the device for the stop of this epoch. For the worker thread.

        Raises:
            Exception: what the device said; it is told again by `restart`.
        """
        try:
            self._stop()
        except Exception as exc:
            self._dealt_with(epoch, True, f"{type(exc).__name__}: {exc}")
            raise
        self._dealt_with(epoch, True)

    def passed(self, epoch: int) -> None:
        """Nothing is stopped for the stop of this epoch."""
        self._dealt_with(epoch, False)

    def _dealt_with(self, epoch: int, stopped: bool, error: str = "") -> None:
        with self._condition:
            self._epoch, self._error = max(self._epoch, epoch), error
            self._stopped = self._stopped or stopped
            self._condition.notify_all()

    def restart(self, epoch: int, timeout: float) -> None:
        """Have the device go on after the stop of this epoch, which is answered with it. For the main thread.

        Raises:
            RuntimeError: it was not stopped within `timeout` seconds, or could not be stopped.
            Exception: what the device said.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._epoch >= epoch, timeout):
                raise RuntimeError(f"it was not stopped within {timeout:g} s")
            if self._error:
                raise RuntimeError(f"it could not be stopped: {self._error}")
            stopped, self._stopped = self._stopped, False
        if stopped:
            self._restart()
