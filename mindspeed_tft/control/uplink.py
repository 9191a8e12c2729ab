"""The relay's stream to the controller that leads: finds it, keeps it, finds the next one.

A relay holds one stream at a time and never accepts a lower term than it did before: so it obeys one leader only.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from cryptography import x509

from mindspeed_tft.control import codec, tasks, tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.candidates import Candidates, Route
from mindspeed_tft.control.framing import MAX_FRAME
from mindspeed_tft.control.leadership import STALE
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
_GATHER = 0.002  # seconds after a message in which more are gathered: the ranks of a host answer at the same time


def _to_bytes(message: wire.HostSays) -> bytes:
    return message.SerializeToString()


class Ended(Exception):
    """A stream is over, or came to nothing; the text says why."""


@dataclass(frozen=True)
class Uplink:
    """How to greet a controller, and where controllers are."""

    hello: wire.HostHello
    deadlines: Deadlines
    candidates: Candidates
    transport: tls.Transport | None = None


@contextlib.asynccontextmanager
async def open_channel(
    route: Route, transport: tls.Transport | None, limit: float
) -> AsyncIterator[tuple[grpc.aio.Channel, x509.Certificate | None]]:
    """A channel to a candidate, and the certificate of the candidate: TLS where it is configured, but for sockets of
    this host.

    Args:
        limit: seconds in which it has to show its certificate.

    Raises:
        tls.Untrusted, OSError, asyncio.TimeoutError: as `tls.Transport.look_at`.
    """
    if transport is None or route.address.startswith("unix:"):
        async with grpc.aio.insecure_channel(route.address, options=OPTIONS) as channel:
            yield channel, None
        return
    transport.watch()
    server = await transport.look_at(route.address, route.name, limit)
    options = [*OPTIONS, ("grpc.ssl_target_name_override", route.name)] if route.name else OPTIONS
    async with grpc.aio.secure_channel(
        route.address, transport.channel_credentials(server), options=options
    ) as channel:
        yield channel, server


class UplinkKeeper:
    """Holds the stream for as long as `run` runs. Messages put while it is down are lost: the ranks resync instead."""

    def __init__(
        self,
        uplink: Uplink,
        on_up: Callable[[wire.Welcome], None],
        on_lost: Callable[[str], None],
        on_down: Callable[[str], None],
        on_message: Callable[[wire.HostOrders], None],
    ) -> None:
        """
        Args:
            on_up: a controller leads us.
            on_lost: it does no more; others are tried.
            on_down: all were tried in vain; they are tried again.
            on_message: takes what the controller says.
        """
        self._uplink = uplink
        self._known = uplink.candidates
        self._on_up, self._on_lost, self._on_down, self._on_message = on_up, on_lost, on_down, on_message
        self._queue: asyncio.Queue[wire.HostSays] = asyncio.Queue()
        self._last = -1  # index of the controller that we lost
        self._sent_to = -1  # index of the one that we were told to go to
        self._ahead: collections.deque[wire.HostOrders] = collections.deque()  # came with the message before them
        self._patient = True  # no candidate of this round was waited for in vain
        self._began = 0.0  # this round
        self._tried_lower = False  # in this round, before the one that is visited
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
            reason, sent = "no controller is known yet", self._sent_to >= 0
            self._patient = True
            self._began = asyncio.get_running_loop().time()
            tried: list[int] = []
            for route in self._round():
                self._tried_lower = any(index < route.index for index in tried)
                tried.append(route.index)
                was_up, reason = await self._visit(route)
                if was_up:
                    self._last, pause = route.index, _BACK_OFF[0]
                    self._on_lost(reason)
                    break
                if self._sent_to >= 0 and not sent:
                    break
            else:
                if not self._patient:
                    pause = _BACK_OFF[0]  # some are there: the others' relays have to be met
                self._on_down(reason)
                await asyncio.sleep(pause)
                pause = min(_SLOWER * pause, _BACK_OFF[1])

    def _round(self) -> list[Route]:
        """All candidates, the lowest first, so that all relays meet; one that was just lost is the last, once."""
        routes = self._known.routes()
        first, self._sent_to = self._sent_to, -1
        last, self._last = self._last, -1
        return sorted(
            routes, key=lambda route: (route.index != first if first >= 0 else route.index == last, route.index)
        )

    async def _visit(self, route: Route) -> tuple[bool, str]:
        """Whether this controller led us until now, and why it does not."""
        reason = "it ended the stream"
        try:
            limit = self._patience()
            async with open_channel(route, self._uplink.transport, limit) as (channel, server):
                await self._hold(channel, route, server)
        except grpc.aio.AioRpcError as error:
            reason = tls.explain(error.code(), error.details())
        except asyncio.TimeoutError:
            reason = "it did not answer in time"
        except (Ended, codec.WireError, OSError) as error:
            reason = str(error)
        except Exception as error:
            log.exception("the stream to the controller failed; it is opened again")
            reason = f"{type(error).__name__}: {error}"
        was_up, self.up = self.up, False
        return was_up, f"controller {route.index} at {route.address}: {reason}"

    def _patience(self) -> float:
        """Seconds for the first word of one candidate: a whole round costs about `heartbeat_lost`."""
        return self._uplink.deadlines.heartbeat_lost / max(1, len(self._known.routes()))

    async def _hold(self, channel: grpc.aio.Channel, route: Route, server: x509.Certificate | None) -> None:
        deadlines, known, transport = self._uplink.deadlines, self._known, self._uplink.transport
        patience = self._patience()
        call: Call = channel.stream_stream(
            METHOD,
            request_serializer=_to_bytes,
            response_deserializer=wire.HostOrders.FromString,
        )()
        self._ahead.clear()
        hello = wire.HostHello()
        hello.CopyFrom(self._uplink.hello)
        hello.term, hello.lease = known.term, known.lease
        await asyncio.wait_for(call.write(wire.HostSays(hello=hello)), patience)
        welcome = await self._wait_for_welcome(call, patience, self._longest_wait(route.index))
        self._accept(welcome)
        writer = asyncio.ensure_future(self._write(call))
        silence = tasks.Patience(deadlines.heartbeat_lost)
        try:
            while (message := await self._next(call)) is not None:
                silence.renew()
                if server is not None and transport is not None:
                    transport.watch()
                    if transport.is_revoked(server):
                        raise Ended(transport.barred_certificate(server))
                if message.WhichOneof("body") == "table":
                    if known.learn(list(message.table.candidates)):
                        known.save()
                else:
                    self._on_message(message)
                if writer.done():
                    writer.result()
        except asyncio.CancelledError:
            if silence.ran_out():
                raise Ended(f"it has been silent for {deadlines.heartbeat_lost:.1f} s") from None
            raise
        finally:
            silence.end()
            await tasks.end([writer])
            if writer.done() and not writer.cancelled():
                writer.exception()  # of a write to a stream that is over, which reading has told
            call.cancel()

    async def _wait_for_welcome(self, call: Call, patience: float, longest: float) -> wire.Welcome:
        """Our vote: being here. The controller leads when enough relays are, or sends us on to one that does."""
        deadlines = self._uplink.deadlines
        loop = asyncio.get_running_loop()
        end = loop.time() + longest
        limit = patience
        while (message := await self._soon(call, limit)) is not None:
            limit = deadlines.heartbeat_lost
            kind = message.WhichOneof("body")
            if kind == "welcome":
                return message.welcome
            if kind == "redirect":
                self._known.learn(list(message.redirect.table.candidates))
                self._sent_to = message.redirect.leader
                raise Ended(f"it sends us to controller {message.redirect.leader}")
            if kind != "beat":
                raise codec.WireError(f"the controller said {kind} before it led us")
            if loop.time() > end:
                self._patient = False
                raise Ended("it is not leading")
            await asyncio.wait_for(call.write(wire.HostSays()), deadlines.heartbeat_lost)  # we are still here
        raise Ended("it ended the stream")

    def _longest_wait(self, index: int) -> float:
        """Seconds at a candidate that does not lead. Long at the first of a round, where a lease may have to run out:
        so all relays are at the lowest that they reach for most of the time, and meet. Short, where the host of a lower
        one has just answered that it is not there: it is being started. Never the same for two relays.
        """
        deadlines = self._uplink.deadlines
        spent = asyncio.get_running_loop().time() - self._began
        starting = self._tried_lower and spent < 2 * deadlines.heartbeat
        if (not self._known.term and index > 0) or starting:  # nobody has led yet: all wait for the first controller
            return 2 * deadlines.heartbeat * random.uniform(0.9, 1.1)
        return deadlines.heartbeat_lost * (STALE + 1 if self._patient else 1) * random.uniform(0.9, 1.1)

    def _accept(self, welcome: wire.Welcome) -> None:
        if welcome.term < self._known.term:
            raise Ended(f"it leads term {welcome.term}, but term {self._known.term} has begun")
        while not self._queue.empty():
            self._queue.get_nowait()
        self._known.learn([welcome.leader])
        self._known.term, self._known.lease = welcome.term, welcome.lease
        self._known.save()
        self.up = self.ever = True
        self._on_up(welcome)

    async def _soon(self, call: Call, limit: float) -> wire.HostOrders | None:
        try:
            return await asyncio.wait_for(self._next(call), limit)
        except asyncio.TimeoutError:
            raise Ended(f"it has been silent for {limit:.1f} s") from None

    async def _next(self, call: Call) -> wire.HostOrders | None:
        """The next message; None at the end of the stream."""
        if self._ahead:
            return self._ahead.popleft()
        message = await call.read()
        if not isinstance(message, wire.HostOrders):  # the end
            # The code of a stream that ended without an error message says why.
            if await call.code() != grpc.StatusCode.OK:
                raise Ended(tls.explain(await call.code(), await call.details()))
            return None
        if message.WhichOneof("body") == "refused":
            raise Ended(f"it refuses this host: {message.refused.reason}")
        if message.more:
            self._ahead.extend(message.more)
            return self._ahead.popleft()
        return message

    async def _write(self, call: Call) -> None:
        message, sent = wire.HostSays(), 0.0
        loop = asyncio.get_running_loop()
        patience = tasks.Patience(self._uplink.deadlines.heartbeat_lost)
        try:
            while not message.bye:  # nothing may follow the last word
                patience.rest()
                message = await self._queue.get()
                if (early := sent + _GATHER - loop.time()) > 0:
                    await asyncio.sleep(early)
                while not self._queue.empty() and not message.bye and message.ByteSize() < MAX_FRAME // 4:
                    message.MergeFrom(self._queue.get_nowait())
                sent = loop.time()
                patience.renew()
                await call.write(message)
            patience.renew()
            await call.done_writing()
        except asyncio.CancelledError:
            if patience.ran_out():
                raise Ended(f"it takes nothing for {self._uplink.deadlines.heartbeat_lost:.1f} s") from None
            raise
        finally:
            patience.end()
