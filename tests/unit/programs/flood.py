"""Attacks a TCP port of this machine in all the ways at once, for a bounded time and with bounded numbers.

`flood.py PORT SECONDS IDLE`: says "on" when all of it is under way, and prints what it did as JSON at the end.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import ssl
import struct
import sys
import time
from collections.abc import Awaitable, Callable

HOST = "127.0.0.1"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
PAUSE = 0.002  # seconds between two attacks of one kind: the machine is shared with what is attacked

port, seconds, idle = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
end = time.monotonic() + seconds
did: collections.Counter[str] = collections.Counter()
held: list[asyncio.StreamWriter] = []


def frame(kind: int, flags: int, stream: int, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return struct.pack("!I", size)[1:] + bytes((kind, flags)) + struct.pack("!I", stream) + body


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):  # that is as far as it goes
        context.wrap_bio(incoming, outgoing, server_hostname="hosta").do_handshake()
    return outgoing.read()


async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.wait_for(asyncio.open_connection(HOST, port), 5)


async def again(name: str, attack: Callable[[], Awaitable[None]]) -> None:
    while time.monotonic() < end:
        try:
            await attack()
            did[name] += 1
        except (OSError, asyncio.TimeoutError) as error:
            did[f"{name}: {type(error).__name__}"] += 1
        await asyncio.sleep(PAUSE)


async def garbage() -> None:
    _, writer = await connect()
    writer.write(os.urandom(2000))
    await writer.drain()
    writer.transport.abort()


async def half_a_handshake() -> None:
    _, writer = await connect()
    writer.write(hello)
    await writer.drain()
    held.append(writer)
    if len(held) > idle:
        held.pop(0).transport.abort()


async def nothing_at_all() -> None:
    _, writer = await connect()
    held.append(writer)
    if len(held) > idle:
        held.pop(0).transport.abort()


async def slowly() -> None:
    """HTTP/2 byte by byte, or the TLS record that never ends."""
    _, writer = await connect()
    for byte in (PREFACE + SETTINGS)[:40]:
        writer.write(bytes((byte,)))
        await writer.drain()
        await asyncio.sleep(0.1)
        if time.monotonic() > end:
            break
    writer.transport.abort()


async def huge_frame() -> None:
    """A frame that announces 16 MiB, headers that never end, a stream for each of them."""
    _, writer = await connect()
    writer.write(PREFACE + SETTINGS)
    for stream in range(1, 200, 2):
        writer.write(frame(1, 0, stream, b"\x82" * 100))
    writer.write(frame(0, 0, 1, b"x" * 65536, length=(1 << 24) - 1))
    await writer.drain()
    writer.transport.abort()


async def pings() -> None:
    _, writer = await connect()
    writer.write(PREFACE + SETTINGS + frame(6, 0, 0, b"12345678") * 500 + SETTINGS * 500)
    await writer.drain()
    writer.transport.abort()


async def main() -> None:
    for _ in range(idle):
        try:
            await nothing_at_all()
            did["held"] += 1
        except (OSError, asyncio.TimeoutError) as error:
            did[f"held: {type(error).__name__}"] += 1
            break
    tasks = [asyncio.ensure_future(again("slowly", slowly)) for _ in range(50)]
    for attack in (garbage, half_a_handshake, nothing_at_all, huge_frame, pings):
        tasks.append(asyncio.ensure_future(again(attack.__name__, attack)))
    print("on", flush=True)
    await asyncio.gather(*tasks)
    print(json.dumps(did), flush=True)


logging.disable()  # asyncio says of each connection that is cut that it cannot be written to
hello = client_hello()
asyncio.run(main())
