"""Drives the engine: words of the relays in, its orders out. One event loop owns everything, so nothing is locked.

The engine decides, this loop delivers: it stamps events with its clock, drops what a rank says a second time, says
stops and orders again to a rank that comes back, and ends when the job has ended.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio

from mindspeed_tft.control import codec, pids, tasks, tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.config import ControlConfig, ControlRefused
from mindspeed_tft.control.uplink import METHOD, OPTIONS
from mindspeed_tft.engine import types as t
from mindspeed_tft.observe.incident import Recorder

log = logging.getLogger(__name__)

TICK = 0.2
_SERVER_OPTIONS = [*OPTIONS, ("grpc.so_reuseport", 0)]


class EngineLike(Protocol):
    """What we need of the engine."""

    def handle(self, event: t.Event) -> list[t.Action]: ...

    def incident(self) -> dict[str, object]: ...


@dataclass(eq=False)
class HostLink:
    """The stream of one relay."""

    hello: wire.HostHello
    out: asyncio.Queue[wire.HostOrders] = field(default_factory=asyncio.Queue)
    ranks: set[int] = field(default_factory=set)
    bye: bool = False


@dataclass
class Seat:
    """What is known of a rank beyond the engine's knowledge."""

    session: str
    host: HostLink | None
    seq: int = 0
    gone: bool = False
    earlier: set[str] = field(default_factory=set)  # sessions of processes whose place this one took


class Controller:
    """One job's controller. `run` returns when the job is over."""

    def __init__(self, config: ControlConfig, engine: EngineLike, recorder: Recorder) -> None:
        self._config = config
        self._deadlines = config.deadlines
        self._engine = engine
        self._recorder = recorder
        self._hosts: dict[int, HostLink] = {}
        self._seats: dict[int, Seat] = {}
        self._events: collections.deque[t.Event] = collections.deque()
        self._feeding = False
        self._closed: t.Closed | None = None
        self._last_words: list[str] = []
        self._broken: Exception | None = None
        self._ever = False
        self._empty_since = time.monotonic()
        self._said_bye = True
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------------------------- life

    async def run(self, unix_path: str, ready: Callable[[], None]) -> None:
        """Serves until the job is over, and says the last words when its launcher is gone."""
        launcher = self._watch_launcher()
        server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=100_000)
        handler = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=wire.HostSays.FromString,
            response_serializer=wire.HostOrders.SerializeToString,
        )
        _, service, method = METHOD.split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self._bind(server, unix_path)
        await server.start()
        try:
            ready()
            await self._drive()
            if self._closed is not None:
                await self._until_hosts_left()
        finally:
            # First of all the port: a restart of the job by its launcher wants it at once.
            await server.stop(grace=0.2)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unix_path)
            with contextlib.suppress(OSError):  # not empty: the relay is still there, and will do it
                os.rmdir(os.path.dirname(unix_path))
        self._recorder.flush()  # the writer ends with this process
        if self._broken is not None:
            raise self._broken
        await self._say_last_words(launcher)

    def _watch_launcher(self) -> int:
        if self._config.launcher_pid <= 0:
            return -1
        try:
            return pids.open_pidfd(self._config.launcher_pid)
        except ProcessLookupError:
            return -1

    def _bind(self, server: grpc.aio.Server, unix_path: str) -> None:
        before = os.umask(0o177)
        try:
            server.add_insecure_port(f"unix:{unix_path}")
        finally:
            os.umask(before)
        mode = tls.mode(self._config)
        if mode == "unix":
            return
        host, port = self._config.tcp_host(), self._config.tcp_port()
        address = self._try_port(host, port)
        credentials = tls.server_credentials(self._config)
        try:
            if credentials is not None:
                server.add_secure_port(address, credentials)
            else:
                if not tls.is_loopback(host):
                    log.warning("--tft-insecure: anybody who reaches %s may command this job", address)
                server.add_insecure_port(address)
        except RuntimeError as error:
            raise ControlRefused(self._port_message(host, port, str(error))) from error

    def _try_port(self, host: str, port: int) -> str:
        """The address to bind; binds it once ourselves, because gRPC does not say what is wrong with it."""
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
        except socket.gaierror as error:
            raise ControlRefused(f"TTP_ADDR: {host} has no address ({error}); name the host of node 0") from error
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.EADDRNOTAVAIL:
                raise ControlRefused(
                    f"TTP_ADDR: {host} is no address of this host ({reason}); name the host on which rank 0 runs"
                ) from error
            raise ControlRefused(self._port_message(host, port, reason)) from error
        return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"

    @staticmethod
    def _port_message(host: str, port: int, reason: str) -> str:
        return (
            f"--tft-controller-port: port {port} on {host} cannot be used ({reason}); stop what listens there or "
            "choose another port"
        )

    async def _drive(self) -> None:
        """Ticks until the engine closed the job, or nobody is there any more."""
        end_of_start = time.monotonic() + self._config.start + self._deadlines.heartbeat_lost
        beat = 0.0
        while self._closed is None and self._broken is None:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TICK)
            now = time.monotonic()
            if now >= beat:
                beat = now + self._deadlines.heartbeat
                self._beat()
            self._feed(t.Tick(now))
            if not self._ever and now > end_of_start:
                log.warning("no host came within %.0f s, the controller ends", end_of_start - self._empty_since)
                return
            if self._ever and not self._hosts and self._abandoned(now):
                return

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
        beat = 0.0
        while self._hosts and time.monotonic() < end:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TICK)
            now = time.monotonic()
            if now >= beat:
                beat = now + self._deadlines.heartbeat
                self._beat()
            self._feed(t.Tick(now))

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
                print(f"[mindspeed_tft] {line}", file=sys.stderr, flush=True)

    # ---------------------------------------------------------------------------------- relays

    async def _stream(self, _: object, context: grpc.aio.ServicerContext[wire.HostSays, wire.HostOrders]) -> None:
        """One relay, for as long as it is connected."""
        limit = self._deadlines.heartbeat_lost
        first = await asyncio.wait_for(context.read(), limit)
        refusal = self._refusal(first, context)
        if refusal:
            log.warning("refused a host: %s", refusal)
            await context.write(wire.HostOrders(refused=wire.Refused(reason=refusal)))
            return
        link = HostLink(first.hello)
        self._hosts[first.hello.node_rank] = link  # an older stream of the same host is dead or about to be
        self._ever, self._said_bye = True, False
        link.out.put_nowait(wire.HostOrders(welcome=wire.Welcome(protected=True)))
        writer = asyncio.ensure_future(self._write(link, context))
        silent = False
        try:
            while not link.bye:
                message = await asyncio.wait_for(context.read(), limit)
                if not isinstance(message, wire.HostSays):  # the end
                    break
                self._hear(link, message)
        except asyncio.TimeoutError:
            silent = True
            log.warning("host %s has been silent for %.1f s", link.hello.host, limit)
        except codec.WireError as error:
            log.warning("host %s does not follow the protocol: %s", link.hello.host, error)
            raise
        finally:
            self._left(link, silent)
            await tasks.end([writer])

    def _refusal(self, first: object, context: grpc.aio.ServicerContext[wire.HostSays, wire.HostOrders]) -> str:
        """Why this peer may not come in, or nothing."""
        if not isinstance(first, wire.HostSays) or not first.HasField("hello"):
            return "the first message is no hello"
        hello = first.hello
        if hello.protocol != codec.PROTOCOL:
            return f"it speaks protocol {hello.protocol}, this controller speaks {codec.PROTOCOL}; install one version"
        if hello.run != self._config.run_name:
            return f"it belongs to job {hello.run!r}, this is the controller of {self._config.run_name!r}"
        if not 0 <= hello.node_rank < self._config.nnodes:
            return f"node rank {hello.node_rank} is not one of {self._config.nnodes}"
        identities = context.peer_identities()
        if self._config.tls_dir and identities is not None:
            names = [bytes(name).decode("utf-8", "replace") for name in identities]
            if hello.host not in names:
                return f"its certificate is for {', '.join(names)}, not for host {hello.host}"
        return ""

    async def _write(self, link: HostLink, context: grpc.aio.ServicerContext[wire.HostSays, wire.HostOrders]) -> None:
        while True:
            message = await link.out.get()
            await asyncio.wait_for(context.write(message), self._deadlines.heartbeat_lost)

    def _left(self, link: HostLink, silent: bool) -> None:
        now = time.monotonic()
        if self._hosts.get(link.hello.node_rank) is link:
            del self._hosts[link.hello.node_rank]
            if not self._hosts:
                self._empty_since = now
                self._said_bye = link.bye
        for rank in link.ranks:
            seat = self._seats[rank]
            if seat.host is link:
                seat.host = None
        self._changed.set()

    def _hear(self, link: HostLink, message: wire.HostSays) -> None:
        for word in message.ranks:
            kind = word.WhichOneof("body")
            if not 0 <= word.rank < self._config.world_size:
                raise codec.WireError(f"rank {word.rank} in a job of {self._config.world_size}")
            if kind == "lost":
                self._hear_lost(link, word)
            elif kind == "says":
                self._hear_rank(link, word)
            elif kind in ("quiet", "examined"):
                self._hear_of(word)
            else:
                raise codec.WireError("a relay passed on nothing")
        link.bye = message.bye

    def _hear_lost(self, link: HostLink, word: wire.FromRank) -> None:
        seat = self._seats.get(word.rank)
        if seat is None:  # it lived and died while there was no controller to hear it
            info = codec.info_from_wire(word.lost.info)
            seat = self._seat(link, word, t.Registered(time.monotonic(), info))
        if seat.session != word.session or seat.gone:
            return  # heard before, or of an earlier life
        seat.gone = True
        self._feed(codec.lost_from_wire(word, time.monotonic()))

    def _hear_of(self, word: wire.FromRank) -> None:
        """A relay is witness of a rank that does not speak."""
        seat = self._seats.get(word.rank)
        if seat is not None and seat.session == word.session and not seat.gone:
            self._feed(codec.witness_from_wire(word, time.monotonic()))

    def _hear_rank(self, link: HostLink, word: wire.FromRank) -> None:
        event = codec.event_from_wire(word.says, time.monotonic())
        if codec.speaker(event) != word.rank:
            raise codec.WireError(f"word of rank {codec.speaker(event)} under the name of rank {word.rank}")
        seat = self._seats.get(word.rank)
        if isinstance(event, t.Registered):
            self._seat(link, word, event)
            return
        if seat is None or seat.session != word.session or seat.gone:
            return  # of an earlier life
        if word.says.seq:
            if word.says.seq <= seat.seq:
                return
            seat.seq = word.says.seq
        if isinstance(event, t.RankFinished):
            seat.gone = True
        self._feed(event)

    def _seat(self, link: HostLink, word: wire.FromRank, event: t.Registered) -> Seat:
        seat = self._seats.get(word.rank)
        if seat is not None and word.session in seat.earlier:
            # Its host was out of reach while another process took over. Nothing of it counts any more.
            log.warning("rank %d: process %d came back after it was replaced", word.rank, event.info.pid)
            return seat
        if seat is None or seat.session != word.session:
            earlier = {*seat.earlier, seat.session} if seat is not None else set()
            seat = self._seats[word.rank] = Seat(word.session, link, earlier=earlier)
        seat.host, seat.gone = link, False
        link.ranks.add(word.rank)
        self._feed(event)  # the engine says again what this rank may have missed
        return seat

    def _tell(self, rank: int, message: wire.HostOrders) -> None:
        seat = self._seats.get(rank)
        if seat is not None and seat.host is not None:
            seat.host.out.put_nowait(message)

    def _beat(self) -> None:
        for link in self._hosts.values():
            link.out.put_nowait(wire.HostOrders(beat=wire.Beat(protected=True)))

    # ---------------------------------------------------------------------------------- engine

    def _feed(self, event: t.Event) -> None:
        """Gives the engine an event, and does what it answers. Events that arise from that wait for their turn."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events and self._broken is None:
                event = self._events.popleft()
                if not isinstance(event, t.RankQuiet):  # one a second, of ranks that may stay quiet for hours
                    self._recorder.event(event)
                for action in self._engine.handle(event):
                    self._recorder.action(action, event.at)
                    self._do(action, event.at)
        except Exception as error:
            log.exception("the engine failed; training goes on, unprotected")
            self._broken = error
            self._changed.set()
            if self._recorder.open:
                reason = f"the engine failed: {type(error).__name__}: {error}"
                self._recorder.close(t.Closed("failed", -1, reason), event.at, {})
        finally:
            self._feeding = False

    def _do(self, action: t.Action, at: float) -> None:
        if isinstance(action, t.Stop):
            by_host: dict[HostLink, list[int]] = {}  # not by node: a relay that was started again is another one
            for rank in action.ranks:
                seat = self._seats.get(rank)
                if seat is not None and seat.host is not None:
                    by_host.setdefault(seat.host, []).append(rank)
            for link, ranks in by_host.items():
                part = t.Stop(action.epoch, tuple(ranks), action.reason)
                link.out.put_nowait(wire.HostOrders(stop=codec.stop_to_wire(part)))
        elif isinstance(action, t.Order):
            try:
                message = codec.order_to_wire(action)
            except codec.WireError as error:
                self._events.append(t.OrderDone(at, action.rank, action.id, False, f"cannot be sent: {error}"))
                return
            self._tell(action.rank, wire.HostOrders(order=message))
        elif isinstance(action, t.Examine):
            self._tell(action.rank, wire.HostOrders(examine=codec.examine_to_wire(action)))
        elif isinstance(action, t.Kill):
            self._tell(action.rank, wire.HostOrders(kill=codec.kill_to_wire(action)))
        elif isinstance(action, t.Note):
            if action.warn:
                log.warning("%s: %s", action.stage, action.text)
        elif isinstance(action, t.Recovered):
            path = self._recorder.recovered(action, at, self._engine.incident())
            self._print([action.summary, f"incident: {path}"])
        elif isinstance(action, t.Closed):
            self._close(action)
        else:
            raise TypeError(f"the engine asked for {type(action).__name__}, which nobody here knows")

    def _close(self, closed: t.Closed) -> None:
        path: Path | None = self._recorder.close(closed, time.monotonic(), self._engine.incident())
        if self._closed is None:
            self._closed = closed
            if closed.outcome != "finished":
                self._last_words = [closed.summary]
                if path is not None:
                    self._last_words.append(f"incident: {path}")
                self._print(self._last_words)
        self._changed.set()
