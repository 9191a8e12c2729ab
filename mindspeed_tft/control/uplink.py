"""The relay's stream to the controller: opens it, keeps it, opens it again. gRPC's client side is only here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from mindspeed_tft.control import codec, tasks, tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.framing import MAX_FRAME
from mindspeed_tft.engine.types import Deadlines

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[wire.HostSays, wire.HostOrders]

log = logging.getLogger(__name__)

METHOD = "/mindspeed_tft.Control/Relay"
OPTIONS = [
    ("grpc.max_send_message_length", MAX_FRAME),
    ("grpc.max_receive_message_length", MAX_FRAME),
    ("grpc.enable_http_proxy", 0),  # cluster nodes often carry proxy variables that must not be used here
]
_BACK_OFF = (0.05, 5.0)
_SLOWER = 1.5


def _to_bytes(message: wire.HostSays) -> bytes:
    return message.SerializeToString()


@dataclass(frozen=True)
class Uplink:
    """Where the controller listens and how to greet it."""

    address: str  # "unix:/path" or "host:port"
    hello: wire.HostHello
    deadlines: Deadlines
    credentials: grpc.ChannelCredentials | None = None

    def channel(self) -> grpc.aio.Channel:
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.address, options=OPTIONS)
        return grpc.aio.secure_channel(self.address, self.credentials, options=OPTIONS)


class UplinkKeeper:
    """Holds the stream for as long as `run` runs. Messages put while it is down are lost: the ranks resync instead."""

    def __init__(
        self,
        uplink: Uplink,
        on_up: Callable[[], None],
        on_down: Callable[[str], None],
        on_message: Callable[[wire.HostOrders], None],
    ) -> None:
        self._uplink = uplink
        self._on_up, self._on_down, self._on_message = on_up, on_down, on_message
        self._queue: asyncio.Queue[wire.HostSays] = asyncio.Queue()
        self.up = False
        self.ever = False

    def put(self, message: wire.HostSays) -> None:
        """Sends the message soon; drops it when there is no controller."""
        if self.up:
            self._queue.put_nowait(message)

    async def run(self) -> None:
        """Keeps the stream until cancelled."""
        pause = _BACK_OFF[0]
        while True:
            reason = "the controller ended the stream"
            try:
                async with self._uplink.channel() as channel:
                    await self._hold(channel)
            except grpc.aio.AioRpcError as error:
                reason = tls.explain(self._uplink.address, error.code(), error.details())
            except (codec.WireError, OSError, asyncio.TimeoutError) as error:
                reason = str(error) or f"no answer from the controller at {self._uplink.address}"
            except Exception as error:
                log.exception("the stream to the controller failed; it is opened again")
                reason = f"{type(error).__name__}: {error}"
            if self.up:
                pause = _BACK_OFF[0]
            self.up = False
            self._on_down(reason)
            await asyncio.sleep(pause)
            pause = min(_SLOWER * pause, _BACK_OFF[1])

    async def _hold(self, channel: grpc.aio.Channel) -> None:
        deadlines = self._uplink.deadlines
        call: Call = channel.stream_stream(
            METHOD,
            request_serializer=_to_bytes,
            response_deserializer=wire.HostOrders.FromString,
        )()
        await asyncio.wait_for(call.write(wire.HostSays(hello=self._uplink.hello)), deadlines.heartbeat_lost)
        await self._read(call)  # a welcome, or a refusal
        while not self._queue.empty():
            self._queue.get_nowait()
        self.up = self.ever = True
        self._on_up()
        writer = asyncio.ensure_future(self._write(call))
        try:
            while await self._read(call):
                if writer.done():
                    writer.result()
        finally:
            await tasks.end([writer])
            call.cancel()

    async def _read(self, call: Call) -> bool:
        try:
            message = await asyncio.wait_for(call.read(), self._uplink.deadlines.heartbeat_lost)
        except asyncio.TimeoutError:
            raise OSError(f"the controller has been silent for {self._uplink.deadlines.heartbeat_lost:.1f} s") from None
        if not isinstance(message, wire.HostOrders):  # the end
            # The code of a stream that ended without an error message says why.
            if await asyncio.wait_for(call.code(), self._uplink.deadlines.heartbeat_lost) != grpc.StatusCode.OK:
                raise OSError(tls.explain(self._uplink.address, await call.code(), await call.details()))
            return False
        if message.WhichOneof("body") == "refused":
            raise OSError(f"the controller refuses this host: {message.refused.reason}")
        self._on_message(message)
        return True

    async def _write(self, call: Call) -> None:
        message = wire.HostSays()
        while not message.bye:  # nothing may follow the last word
            message = await self._queue.get()
            await asyncio.wait_for(call.write(message), self._uplink.deadlines.heartbeat_lost)
        await asyncio.wait_for(call.done_writing(), self._uplink.deadlines.heartbeat_lost)
