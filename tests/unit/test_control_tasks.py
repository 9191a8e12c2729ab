"""Waiting with a limit, without a task for each message."""

from __future__ import annotations

import asyncio
import socket
import time

from mindspeed_tft.control.tasks import Patience


def test_a_wait_that_is_too_long_is_cancelled() -> None:
    async def run() -> bool:
        patience = Patience(0.05)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return patience.ran_out()
        return False

    async def main() -> tuple[bool, int]:
        task = asyncio.ensure_future(run())
        found = await asyncio.wait_for(task, 10)
        return found, getattr(task, "cancelling", int)()

    assert asyncio.run(main()) == (True, 0)


def test_the_cancellation_of_somebody_else_is_not_ours() -> None:
    async def run(began: asyncio.Event) -> bool:
        patience = Patience(60)
        try:
            began.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return patience.ran_out()
        finally:
            patience.end()
        return True

    async def main() -> bool:
        began = asyncio.Event()
        task = asyncio.ensure_future(run(began))
        await began.wait()
        task.cancel()
        return await asyncio.wait_for(task, 10)

    assert asyncio.run(main()) is False


def test_it_begins_anew_and_rests() -> None:
    async def run() -> float:
        begin, patience = time.monotonic(), Patience(0.1)
        for _ in range(6):
            await asyncio.sleep(0.05)
            patience.renew()
        patience.rest()
        await asyncio.sleep(0.3)
        patience.renew()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert patience.ran_out()
        return time.monotonic() - begin

    assert asyncio.run(asyncio.wait_for(run(), 20)) >= 0.7


def test_who_was_stopped_himself_finds_what_came_meanwhile() -> None:
    """A loop that stood still for longer than the limit: what waits in the pipe counts, not the clock."""

    async def run() -> str:
        patience = Patience(0.1)
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        reader, writer = await _pipe(found)
        writer.write(b"word")
        time.sleep(0.4)  # the process does not run
        try:
            return await found
        except asyncio.CancelledError:
            return "given up"
        finally:
            patience.end()
            reader.close()
            writer.close()

    assert asyncio.run(asyncio.wait_for(run(), 20)) == "word"


async def _pipe(found: asyncio.Future[str]) -> tuple[asyncio.Transport, asyncio.WriteTransport]:
    one, other = socket.socketpair()

    class Reads(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            loop = asyncio.get_running_loop()  # as gRPC does: some turns of the loop later
            loop.call_soon(loop.call_soon, loop.call_soon, found.set_result, data.decode())

    loop = asyncio.get_running_loop()
    reader, _ = await loop.create_connection(Reads, sock=one)
    writer, _ = await loop.create_connection(asyncio.Protocol, sock=other)
    return reader, writer
