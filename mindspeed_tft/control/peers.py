"""The leader's word to the other candidates: who leads, who is a candidate, and what a successor has to know."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc
import grpc.aio
from cryptography import x509

from mindspeed_tft.control import codec, tasks, tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.candidates import Route
from mindspeed_tft.control.seats import Departed, SeatState
from mindspeed_tft.control.uplink import open_channel
from mindspeed_tft.engine.types import Deadlines

log = logging.getLogger(__name__)

METHOD = "/mindspeed_tft.Control/Lead"
SEATS_AT_ONCE = 1000  # in one message, which has a limit


def seat_to_wire(state: SeatState) -> wire.Seat:
    before = state.before
    return wire.Seat(
        version=state.version,
        session=state.session,
        info=codec.info_to_wire(state.info),
        lost=state.lost,
        finished=state.finished,
        earlier=state.earlier,
        before=codec.info_to_wire(before.info) if before else None,
        why=before.why if before else "",
        bare=state.bare,
    )


def seat_from_wire(m: wire.Seat) -> SeatState:
    info = codec.info_from_wire(m.info)
    before = Departed(codec.info_from_wire(m.before), m.why) if m.HasField("before") else None
    return SeatState(info.rank, m.session, info, m.lost, m.finished, tuple(m.earlier), before, m.version, m.bare)


class Peers:
    """Speaks to each other candidate once a heartbeat period, and at once when something changed."""

    def __init__(
        self,
        deadlines: Deadlines,
        transport: tls.Transport | None,
        say: Callable[[int], wire.Lead],
        on_answer: Callable[[int, wire.LeadHeard], None],
    ) -> None:
        """`say(after)` makes the message for a candidate that has the seats up to version `after`."""
        self._deadlines, self._transport = deadlines, transport
        self._say, self._on_answer = say, on_answer
        self._running: dict[Route, tuple[int, asyncio.Future[None]]] = {}
        self._changed: dict[Route, asyncio.Event] = {}

    def know(self, routes: list[Route]) -> None:
        """Speaks to these from now on."""
        for route in [route for route in self._running if route not in routes]:
            self._running.pop(route)[1].cancel()
        for route in routes:
            if route not in self._running:
                self._changed[route] = asyncio.Event()
                self._running[route] = (route.index, asyncio.ensure_future(self._speak(route, self._changed[route])))

    def tell(self) -> None:
        """Something changed."""
        for event in self._changed.values():
            event.set()

    async def say_last(self, message: wire.Lead) -> None:
        """One last word to all, within half of `heartbeat_lost`."""
        routes = list(self._running)
        await self.end()
        await asyncio.gather(*(self._once(route, message) for route in routes))

    async def end(self) -> None:
        """Stops speaking."""
        await tasks.end([task for _, task in self._running.values()])
        self._running.clear()

    async def _once(self, route: Route, message: wire.Lead) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.TimeoutError, OSError):  # it is not there
            async with open_channel(route, self._transport, self._limit) as (channel, _):
                await self._call(channel, message)

    async def _speak(self, route: Route, changed: asyncio.Event) -> None:
        said = ""
        while True:
            version = 0
            try:
                async with open_channel(route, self._transport, self._limit) as (channel, server):
                    while not self._is_revoked(server):
                        changed.clear()
                        answer = await self._call(channel, self._say(version))
                        behind = answer.version > version  # there may be more than one message holds
                        version = answer.version
                        self._on_answer(route.index, answer)
                        if not behind:
                            with contextlib.suppress(asyncio.TimeoutError):
                                await asyncio.wait_for(changed.wait(), self._deadlines.heartbeat)
            except tls.Untrusted as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("candidate %d at %s gets no word of ours: %s", route.index, route.address, error)
            except (grpc.aio.AioRpcError, asyncio.TimeoutError, OSError) as error:
                log.debug("candidate %d at %s is not heard: %r", route.index, route.address, error)
            except Exception:
                log.exception("candidate %d at %s cannot be told; it is tried again", route.index, route.address)
            await asyncio.sleep(self._deadlines.heartbeat)

    def _is_revoked(self, server: x509.Certificate | None) -> bool:
        """Then the channel is opened anew, which says why it cannot be."""
        return server is not None and self._transport is not None and self._transport.is_revoked(server)

    @property
    def _limit(self) -> float:
        """Seconds for one answer."""
        return self._deadlines.heartbeat_lost / 2

    async def _call(self, channel: grpc.aio.Channel, message: wire.Lead) -> wire.LeadHeard:
        limit = self._limit
        call = channel.unary_unary(
            METHOD,
            request_serializer=wire.Lead.SerializeToString,
            response_deserializer=wire.LeadHeard.FromString,
        )
        return await asyncio.wait_for(call(message, timeout=limit), limit + self._deadlines.heartbeat)
