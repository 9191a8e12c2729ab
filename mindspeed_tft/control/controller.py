"""Drives the engine of a leader: words of the relays in, its orders out. One event loop owns everything, so nothing is
locked.

The engine decides, this loop delivers: it stamps events with its clock, drops what a rank says a second time, says
stops and orders again to a rank that comes back, and ends when the job has ended. Who leads is `candidate`'s affair.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mindspeed_tft.control import codec, tasks
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.operator import Operators
from mindspeed_tft.control.seats import HostLink, Seats, SeatState
from mindspeed_tft.control.watchers import Watchers
from mindspeed_tft.engine import types as t
from mindspeed_tft.observe import logs
from mindspeed_tft.observe.files import where
from mindspeed_tft.observe.incident import Recorder

log = logging.getLogger(__name__)

TICK = 0.2


class EngineLike(Protocol):
    """What we need of the engine."""

    def handle(self, event: t.Event) -> list[t.Action]: ...

    def incident(self) -> dict[str, object]: ...

    def status(self) -> dict[str, object]: ...


class Manager(Protocol):
    """A cluster manager's client: hears all that passes, and says what it decides by events."""

    def event(self, event: t.Event) -> None: ...

    def action(self, action: t.Action) -> None: ...

    def status(self) -> dict[str, str]: ...

    async def run(self) -> None: ...

    async def drain(self) -> None: ...


class Controller:
    """The controller of a job, for as long as it leads."""

    def __init__(
        self,
        config: ControlConfig,
        engine: EngineLike,
        recorder: Recorder,
        may_act: Callable[[], bool] = lambda: True,
        watchers: Watchers | None = None,
    ) -> None:
        """`may_act`: whether decisions may be made at this moment; until then events wait. `watchers` are told what the
        recorder is told, and heartbeats."""
        self._config = config
        self._deadlines = config.deadlines
        self._engine = engine
        self._recorder = recorder
        self._may_act = may_act
        self._watchers = watchers or Watchers(config, 0, 0)
        self._watchers.watch(lambda: (len(self._links), self._seats.parked))
        self._manager = self._make_manager()
        # Relays want to know that we live, and doubt it after `heartbeat_lost`; a beat to thousands of them costs.
        self._beat_period = max(self._deadlines.heartbeat, self._deadlines.heartbeat_lost / 4)
        self._next_beat = 0.0  # monotonic
        self._links: set[HostLink] = set()  # not by node rank: a spare host has that of another one
        self._seats = Seats(
            self._deadlines.heartbeat_lost, "recover" in config.strategies, self._feed, self._warn_of_place
        )
        self.operators = Operators(self._feed)
        self._events: collections.deque[t.Event] = collections.deque()
        self._feeding = False
        self._stage = "start"  # of the engine
        self._closed: t.Closed | None = None
        self._last_words: list[str] = []
        self._empty_since = time.monotonic()
        self._said_bye = False
        self._changed = asyncio.Event()
        self.epoch = 0  # of the last stop that was given here
        self.broken: Exception | None = None  # of the engine, after which nothing is decided any more

    # ---------------------------------------------------------------------------------- life

    async def run(self) -> None:
        """Leads until the job is over: closed, or abandoned by all hosts."""
        speaking = [asyncio.ensure_future(self._manager.run())] if self._manager is not None else []
        try:
            await self._drive()
            if self._closed is not None:
                await self._until_hosts_left()
            if self._manager is not None:
                await self._manager.drain()
        finally:
            await tasks.end(speaking)

    def _make_manager(self) -> Manager | None:
        if not self._config.clusterd:
            return None
        from mindspeed_tft.clusterd.client import Client  # an optional part: imported by who asks for it

        return Client(self._config, self._feed, self._nodes)

    def _nodes(self) -> dict[int, set[int]]:
        """The ranks of each node, as they are connected."""
        found: dict[int, set[int]] = {}
        for link in self._links:
            found.setdefault(link.hello.node_rank, set()).update(link.ranks)
        return found

    def status(self) -> dict[str, object]:
        """What an operator wants to know: plain values."""
        hosts = [
            {"host": link.hello.host, "node_rank": link.hello.node_rank, "ranks": sorted(link.ranks)}
            for link in sorted(self._links, key=lambda link: link.hello.node_rank)
        ]
        steered = {"manager": self._manager.status()} if self._manager is not None else {}
        return {**self._engine.status(), "hosts": hosts, "parked": self._seats.waiting(), **steered}

    async def finish(self, launcher: int) -> None:
        """Leaves all on disk, and says the last words when the launcher is gone (`launcher`: its descriptor, or -1)."""
        self._recorder.flush()  # the writer ends with this process
        await self._say_last_words(launcher)

    def inherit(self, states: Iterable[SeatState], epoch: int) -> None:
        """Takes over what an earlier leader knew, before any relay is heard."""
        self.epoch = epoch
        self._seats.restore(states, time.monotonic())

    @property
    def version(self) -> int:
        """Grows with every change of what a later leader has to know."""
        return self._seats.version

    def snapshot(self, after: int) -> list[SeatState]:
        """What a later leader has to know, as far as it changed after a version."""
        return self._seats.snapshot(after)

    async def _drive(self) -> None:
        """Ticks until the engine closed the job, or nobody is there any more."""
        while self._closed is None and self.broken is None:
            now = await self._turn()
            if not self._links and self._abandoned(now):
                return

    async def _turn(self) -> float:
        """Waits until something changed, a tick at most; the time after it."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), TICK)
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_period
            self._beat()
        self._tick(now)
        return now

    def _abandoned(self, now: float) -> bool:
        """True when no relay is left, and none is to be expected."""
        alone = now - self._empty_since
        if self._recorder.open:
            # The engine ends an incident by its own deadlines; this bound only guards against its mistakes.
            d = self._deadlines
            if alone <= d.stop + d.order + d.dump + d.exit + d.heartbeat_lost:
                return False
            self._close(t.Closed("failed", -1, "every host is gone and the incident did not end"))
            return True
        return alone > (0.5 if self._said_bye else 3 * self._deadlines.heartbeat_lost)

    async def _until_hosts_left(self) -> None:
        end = time.monotonic() + self._deadlines.exit + self._config.shutdown
        while self._links and time.monotonic() < end:
            await self._turn()

    async def _say_last_words(self, launcher: int) -> None:
        """torchrun prints a long report of its own when workers fail: what matters is said once more after it."""
        if launcher >= 0:
            try:
                if self._last_words:
                    gone = asyncio.Event()
                    asyncio.get_running_loop().add_reader(launcher, gone.set)
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(gone.wait(), self._deadlines.exit + self._config.shutdown)
                    asyncio.get_running_loop().remove_reader(launcher)
            finally:
                os.close(launcher)
            self._print(self._last_words)

    def _print(self, lines: list[str]) -> None:
        with contextlib.suppress(OSError):  # nobody reads our stderr any more; the incident file has the words too
            for line in lines:
                logs.say(line, sys.stderr, "controller")

    # ---------------------------------------------------------------------------------- relays

    def enter(self, link: HostLink) -> None:
        """A relay was told that we lead."""
        self._links.add(link)  # beside an older stream of the same host, which is dead or about to be
        self._said_bye = False

    def left(self, link: HostLink, silent: bool) -> None:
        """The stream of a relay is over; `silent`: nothing was heard of it for `heartbeat_lost`."""
        now = time.monotonic()
        self._links.discard(link)
        if not self._links:
            self._empty_since = now
            self._said_bye = link.bye
        self._seats.left(link, now - self._deadlines.heartbeat_lost if silent else now)
        self._changed.set()

    def hear(self, link: HostLink, message: wire.HostSays) -> None:
        """One message of a relay.

        Raises:
            WireError: it makes no sense.
        """
        for word in message.ranks:
            if not 0 <= word.rank < self._config.world_size:
                raise codec.WireError(f"rank {word.rank} in a job of {self._config.world_size}")
            self._seats.hear(link, word, time.monotonic())
        link.bye, link.ended = message.bye, message.ended

    def _warn_of_place(self, text: str) -> None:
        log.warning("%s", text)
        self._recorder.action(t.Note(self._stage, text, warn=True), time.monotonic())

    def _tick(self, now: float) -> None:
        if not self._may_act():
            return
        self._seats.look(now, self._recorder.open)
        self._feed(t.Tick(now))

    def _beat(self) -> None:
        for link in self._links:
            link.out.put_nowait(wire.HostOrders(beat=wire.Beat(protected=True)))

    # ---------------------------------------------------------------------------------- engine

    def _feed(self, event: t.Event) -> None:
        """Gives the engine an event, and does what it answers. Events that arise from that wait for their turn, and
        all wait while another leader might still decide."""
        self._events.append(event)
        if self._feeding or not self._may_act():
            return
        self._feeding = True
        try:
            while self._events and self.broken is None:
                event = self._events.popleft()
                if not isinstance(event, t.RankQuiet):  # one a second, of ranks that may stay quiet for hours
                    self._recorder.event(event)
                self._watchers.event(event)
                if self._manager is not None:
                    self._manager.event(event)
                for action in self._engine.handle(event):
                    self._recorder.action(action, event.at)
                    self._watchers.action(action, event.at)
                    self._do(action, event.at)
                    if self._manager is not None:
                        self._manager.action(action)
        except Exception as error:
            log.exception("the engine failed; training goes on, unprotected")
            self.broken = error
            self._changed.set()
            if self._recorder.open:
                reason = f"the engine failed: {type(error).__name__}: {error}"
                self._recorder.close(t.Closed("failed", -1, reason), event.at, {})
        finally:
            self._feeding = False

    def _do(self, action: t.Action, at: float) -> None:
        if isinstance(action, t.Stop):
            self.epoch = max(self.epoch, action.epoch)
            for link, ranks in self._seats.by_host(action.ranks).items():
                part = replace(action, ranks=tuple(ranks))
                link.out.put_nowait(wire.HostOrders(stop=codec.stop_to_wire(part)))
        elif isinstance(action, t.Tell):
            for link, ranks in self._seats.by_host(action.ranks).items():
                link.out.put_nowait(wire.HostOrders(wish=codec.wish_to_wire(action.wish, ranks)))
        elif isinstance(action, (t.Progress, t.Answer)):
            self.operators.hear(action)
        elif isinstance(action, t.Order):
            try:
                message = codec.order_to_wire(action)
            except codec.WireError as error:
                self._events.append(t.OrderDone(at, action.rank, action.id, False, f"cannot be sent: {error}"))
                return
            self._seats.tell(action.rank, wire.HostOrders(order=message))
        elif isinstance(action, t.Examine):
            self._seats.tell(action.rank, wire.HostOrders(examine=codec.examine_to_wire(action)))
        elif isinstance(action, t.Kill):
            self._seats.tell(action.rank, wire.HostOrders(kill=codec.kill_to_wire(action)))
        elif isinstance(action, (t.Consult, t.Unadvised)):
            pass  # the manager's client hears of it
        elif isinstance(action, t.Note):
            self._stage = action.stage
            if action.warn:
                log.warning("%s: %s", action.stage, action.text)
        elif isinstance(action, t.Recovered):
            self._seats.recovered()
            path = self._recorder.recovered(action, at, self._engine.incident())
            self._print([action.summary, where(path)])
        elif isinstance(action, t.Closed):
            self._close(action)
        else:
            raise TypeError(f"the engine asked for {type(action).__name__}, which nobody here knows")

    def _close(self, closed: t.Closed) -> None:
        path: Path | None = self._recorder.close(closed, time.monotonic(), self._engine.incident())
        if self._closed is None:
            self._closed = closed
            self._seats.close(closed.outcome)
            if closed.outcome != "finished":
                self._last_words = [closed.summary]
                if path is not None:
                    self._last_words.append(where(path))
                self._print(self._last_words)
        self._changed.set()
