"""Ending asyncio tasks for sure, and waiting with a limit where messages come by the thousand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable


async def end(tasks: Iterable[asyncio.Future[None]], timeout: float = 2.0) -> None:
    """Cancels until they are done or `timeout` seconds passed. Their errors are for whoever awaited them before.

    More than once: before Python 3.12 `wait_for` may swallow a cancellation that comes as it returns.
    """
    left = {task for task in tasks if not task.done()}
    limit = asyncio.get_running_loop().time() + timeout
    while left and asyncio.get_running_loop().time() < limit:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.05)


class Patience:
    """Cancels the task that made it when one wait of it takes longer than `limit` seconds.

    `asyncio.wait_for` around each read makes a task a message, which was an eighth of what a controller of thousands of
    hosts computes; this is a look at the clock. Before it gives up it looks twice: a process that was stopped itself
    finds what came in the meantime.
    """

    def __init__(self, limit: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.over = False  # the task was cancelled for that reason
        self._task, self._limit = task, limit
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._doubted = -math.inf  # `_since` of the wait that was found too long
        self._timer = self._loop.call_later(limit, self._look)

    def renew(self) -> None:
        """A wait begins now."""
        self._since = self._loop.time()

    def rest(self) -> None:
        """What is waited for from now on may take for ever."""
        self._since = math.inf

    def end(self) -> None:
        """Never cancels any more."""
        self._timer.cancel()

    def ran_out(self) -> bool:
        """Whether the `CancelledError` that was just caught is ours, and then takes the cancellation back."""
        if self.over and hasattr(self._task, "uncancel"):  # Python 3.11 and later count cancellations
            self._task.uncancel()
        return self.over

    def _look(self) -> None:
        left = min(self._since + self._limit - self._loop.time(), self._limit)
        if left <= 0 and self._doubted == self._since:
            self.over = True
            self._task.cancel()
            return
        if left <= 0:
            self._doubted, left = self._since, min(0.05, self._limit)
        self._timer = self._loop.call_later(left, self._look)
