"""Ending asyncio tasks for sure. Before Python 3.12 `wait_for` may swallow a cancellation that comes as it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


async def end(tasks: Iterable[asyncio.Future[None]], timeout: float = 2.0) -> None:
    """Cancels until they are done or `timeout` seconds passed. Their errors are for whoever awaited them before."""
    left = {task for task in tasks if not task.done()}
    limit = asyncio.get_running_loop().time() + timeout
    while left and asyncio.get_running_loop().time() < limit:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.05)
