"""One per host: ranks come in on a Unix socket, one stream goes to the controller, orders fan out here.

It is the witness of its ranks' death: the process descriptor of every rank is watched, so that a socket that a forked
loader worker still holds open hides nothing. It decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_tft.control import codec, pids, stacks, tasks
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.candidates import leave, of_the_living
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.framing import MAX_FRAME, FrameError, FrameReader, pack
from mindspeed_tft.control.guard import Guard
from mindspeed_tft.control.uplink import Uplink, UplinkKeeper
from mindspeed_tft.engine.types import Deadlines, Examined, Kill, RankFinished, RankLost, RankQuiet
from mindspeed_tft.kept import keep as keep_directory
from mindspeed_tft.observe import logs
from mindspeed_tft.observe.files import stacks_name

log = logging.getLogger(__name__)

_PEER = struct.Struct("3i")
LOOK = 0.1
MISSED = 3  # heartbeats, from which on a rank is reported as quiet; what that means is for the engine to say
_MAX_OUT = 4 * MAX_FRAME
_TAKEOVER = 5.0  # times `heartbeat_lost` for another controller to lead, before this host counts as unprotected


@dataclass(eq=False)
class RankLink:
    """One connection, and what is known of the process behind it."""

    sock: socket.socket
    pid: int
    pidfd: int
    frames: FrameReader = field(default_factory=FrameReader)
    out: bytearray = field(default_factory=bytearray)
    rank: int = -1  # -1 until it said hello
    session: str = ""
    hello: wire.RankSays = field(default_factory=wire.RankSays)
    goodbye: bool = False
    open: bool = True
    beat: wire.RankSays | None = None  # latest heartbeat that was not passed on
    opened: float = 0.0
    closed: float = 0.0
    blind: bool = False  # said that this rank lives without a connection
    missed: int = 0  # beats of ours since its last word; not seconds: we may be stopped ourselves
    killed: bool = False  # by us, as ordered
    parked: bool = False  # another process has its rank: nothing that is said to the rank is for this one


class Relay:
    """Owns the listening socket and all connections; lives in one event loop."""

    def __init__(
        self, listener: socket.socket, path: Path, uplink: Uplink, config: ControlConfig, starting: bool
    ) -> None:
        """`starting`: somebody else starts the first controller of the job right now."""
        self._incidents = Path(config.incident_dir)
        self._examining: set[asyncio.Future[None]] = set()
        self._listener, self._path = listener, path
        self._inode = path.stat().st_ino
        self._deadlines: Deadlines = uplink.deadlines
        self._start = config.start
        self._candidates = uplink.candidates
        self._up = UplinkKeeper(uplink, self._on_up, self._on_lost, self._on_down, self._on_message)
        self._guard = Guard(config, path.parent, uplink.candidates, starting, lambda: self._up.up, self._say_candidates)
        self._links: set[RankLink] = set()
        self._ranks: dict[int, RankLink] = {}
        self._gone: dict[int, list[wire.FromRank]] = {}  # told again to a controller that comes back
        self._ever = False
        self._warned = False
        self._down_reason = ""
        self._lost_at: float | None = None  # since when another controller has been looked for, and may yet be found
        self._ending = False  # a rank has ended that will not come back: neither will the others, nor this relay
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    # ---------------------------------------------------------------------------------- life

    async def run(self) -> None:
        """Serves until every rank that came has gone and the controller knows it."""
        self._listener.setblocking(False)
        self._listen()
        keep_directory(self._path.parent)
        running = [
            asyncio.ensure_future(self._up.run()),
            asyncio.ensure_future(self._beats()),
            asyncio.ensure_future(self._looks()),
            asyncio.ensure_future(self._guard.run()),
        ]
        try:
            await self._until_empty(running)
        finally:
            self._close_listener()
            for link in list(self._links):
                self._close(link)
            await self._farewell(running[0])
            await tasks.end([*running, *self._examining])

    async def _until_empty(self, running: Sequence[asyncio.Future[None]]) -> None:
        end = self._loop.time() + self._start
        while not (self._ever and not self._members()):
            if not self._ever and self._loop.time() > end:
                log.warning("no rank came within %.0f s, the relay ends", self._start)
                return
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):  # then look again at the clock
                await asyncio.wait_for(self._changed.wait(), self._deadlines.heartbeat)
            for task in running:
                if task.done():
                    task.result()

    async def _farewell(self, uplink: asyncio.Future[None]) -> None:
        """Gives the last words time to arrive: the controller ends the stream when it has them."""
        if not self._up.up:
            return
        self._up.put(wire.HostSays(bye=True, ended=self._ending))
        end = self._loop.time() + self._deadlines.heartbeat_lost
        while self._up.up and not uplink.done() and self._loop.time() < end:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), end - self._loop.time())

    def _close_listener(self) -> None:
        """Nobody may come any more, least of all a rank of the next job with the same name."""
        self._loop.remove_reader(self._listener)
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:  # else it is the next job's already
                self._path.unlink()
                if self._ending or not of_the_living(self._path.parent):
                    self._candidates.forget()
                leave(self._path.parent)
        self._listener.close()

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._deadlines.heartbeat)
            if (
                self._lost_at is not None
                and self._loop.time() - self._lost_at > _TAKEOVER * self._deadlines.heartbeat_lost
            ):
                self._on_down("no other controller leads yet")
            beat = wire.HostOrders(beat=wire.Beat(protected=self._covered()))
            batch = wire.HostSays()
            for link in list(self._links):
                if link.beat is not None and not link.goodbye and not link.parked:
                    batch.ranks.append(self._from(link, link.beat))
                    link.beat = None
                if quiet := self._misses(link):
                    batch.ranks.append(codec.witness_to_wire(quiet, link.session))
                if link.open and link.rank >= 0 and not link.out:  # a rank that does not read gets no pile of beats
                    self._send(link, beat)
                since = self._loop.time() - link.closed
                if not link.open and not link.goodbye and not link.blind and since > self._deadlines.heartbeat_lost:
                    link.blind = True
                    log.warning("rank %d (process %d) lives without a connection: unprotected", link.rank, link.pid)
                if link.open and link.rank < 0 and self._loop.time() - link.opened > self._deadlines.heartbeat_lost:
                    log.warning("process %d connected and never said hello", link.pid)
                    self._close(link)
            self._up.put(batch)

    def _misses(self, link: RankLink) -> RankQuiet | None:
        """Counts one more beat of ours without a word of this rank; what there is to say of it."""
        link.missed += 1
        seconds = link.missed * self._deadlines.heartbeat
        if link.rank < 0 or not link.open or link.goodbye or link.parked or link.missed < MISSED:
            return None
        return RankQuiet(0.0, link.rank, seconds, pids.state(link.pid))

    async def _looks(self) -> None:
        """Sees a rank's end while the kernel still releases its memory, long before its descriptor tells."""
        while True:
            await asyncio.sleep(LOOK)
            for link in list(self._links):
                if link.pidfd >= 0 and link.rank >= 0 and pids.is_ending(link.pid):
                    self._died(link)

    # ---------------------------------------------------------------------------------- ranks

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors left: the socket stays readable, so look away for a while
            log.warning("a rank cannot be taken in: %s", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(1.0, self._listen)
            return
        sock.setblocking(False)
        pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.geteuid():
            log.warning("refused a connection of user %d", uid)
            sock.close()
            return
        try:
            pidfd = pids.open_pidfd(pid)
        except ProcessLookupError:
            sock.close()
            return
        link = RankLink(sock, pid, pidfd, opened=self._loop.time())
        self._links.add(link)
        self._loop.add_reader(sock, self._readable, link)
        if pidfd >= 0:
            self._loop.add_reader(pidfd, self._died, link)

    def _readable(self, link: RankLink) -> None:
        """Takes what is there, down to the last byte: a rank's last word comes before its end."""
        try:
            while link.open:
                data = link.sock.recv(65536)
                if not data:
                    self._end_of_stream(link)
                    return
                for frame in link.frames.feed(data):
                    self._take(link, codec.parse(wire.RankSays, frame))
        except BlockingIOError:
            return
        except (FrameError, codec.WireError) as error:
            log.warning("process %d (rank %d) does not follow the protocol: %s", link.pid, link.rank, error)
            self._close(link)
        except OSError as error:
            log.debug("connection of rank %d: %s", link.rank, error)
            self._end_of_stream(link)
        except Exception:
            log.exception("the relay failed at a word of rank %d; its connection is closed", link.rank)
            self._close(link)

    def _end_of_stream(self, link: RankLink) -> None:
        self._close(link)
        if link.goodbye or link.pidfd < 0 or pids.is_dead(link.pidfd):
            self._remove(link, "closed its connection" if link.pidfd < 0 else "ended")
        # Else the process lives, so its training goes on: its end is what counts, and the descriptor will tell.

    def _died(self, link: RankLink) -> None:
        if link.open:
            self._readable(link)
            self._close(link)
        self._remove(link, "ended")

    def _close(self, link: RankLink) -> None:
        if link.open:
            link.open, link.closed = False, self._loop.time()
            self._loop.remove_reader(link.sock)
            self._loop.remove_writer(link.sock)
            link.sock.close()
            if link.pidfd < 0 or link.rank < 0:
                self._remove(link, "its connection was closed")

    def _remove(self, link: RankLink, why: str) -> None:
        """The process is gone, or the link was replaced (`why` is empty then)."""
        if link not in self._links:
            return
        self._links.discard(link)
        if link.pidfd >= 0:
            self._loop.remove_reader(link.pidfd)
            os.close(link.pidfd)
        if link.rank >= 0 and self._ranks.get(link.rank) is link:
            del self._ranks[link.rank]
            if link.goodbye:
                says = codec.says(RankFinished(0.0, link.rank))
                self._gone[link.rank] = [self._from(link, link.hello), self._from(link, says)]
            else:
                self._gone[link.rank] = [self._say_lost(link, why)]
        elif link.parked:
            self._say_lost(link, why)
        self._changed.set()

    def _say_lost(self, link: RankLink, why: str) -> wire.FromRank:
        message = f"process {link.pid} {'was killed because it did not move' if link.killed else why}"
        gone = codec.lost_to_wire(RankLost(0.0, link.rank, message, link.pid), link.session, link.hello.hello.info)
        self._up.put(wire.HostSays(ranks=[gone]))
        return gone

    def _take(self, link: RankLink, says: wire.RankSays) -> None:
        link.missed = 0
        kind = says.WhichOneof("body")
        if kind == "hello":
            self._hello(link, says)
            return
        if link.rank < 0:
            raise codec.WireError(f"{kind} before hello")
        if codec.speaker(codec.event_from_wire(says, 0.0)) != link.rank:
            raise codec.WireError(f"rank {link.rank} spoke for another rank")
        keep(link.hello.hello, says)
        if kind == "heartbeat":
            link.beat = says
            return
        if kind == "goodbye":
            link.goodbye = self._ending = True
            self._send(link, wire.HostOrders(goodbye_seen=wire.GoodbyeSeen()))
        self._pass_on(link, says)

    def _hello(self, link: RankLink, says: wire.RankSays) -> None:
        codec.event_from_wire(says, 0.0)
        fresh, hello = link.rank < 0, says.hello
        for old in [old for old in self._links if old is not link and old.session == hello.session]:
            self._supersede(old)  # the same process, before the end of its last connection was seen
        link.rank, link.session, link.hello = hello.info.rank, hello.session, says
        self._claim(link)
        self._ever = True
        self._pass_on(link, says)
        if fresh:
            self._send(link, wire.HostOrders(welcome=wire.Welcome(protected=self._covered())))

    def _supersede(self, old: RankLink) -> None:
        old.parked = False
        if self._ranks.get(old.rank) is old:
            del self._ranks[old.rank]
        self._close(old)
        self._remove(old, "")

    def _claim(self, link: RankLink) -> None:
        """A process wants its rank. If another one that lives has it, that one stays, as long as the controller does
        not say otherwise."""
        holder = self._ranks.get(link.rank)
        link.parked = False
        if holder is not None and holder is not link:
            if holder.pidfd < 0 or pids.is_dead(holder.pidfd):
                self._close(holder)
                self._remove(holder, "was replaced by another one")
            elif holder.hello.hello.parked and not link.hello.hello.parked:
                holder.parked = True
            else:
                link.parked = True
                return
        self._seat(link)

    def _seat(self, link: RankLink) -> None:
        self._ranks[link.rank] = link
        self._gone.pop(link.rank, None)

    def _place(self, message: wire.HostOrders) -> None:
        """The controller says whether a process has its rank."""
        kind = message.WhichOneof("body")
        named = message.admitted if kind == "admitted" else message.parked if kind == "parked" else message.dismissed
        link = next((link for link in self._members() if link.session == named.session), None)
        if link is None:
            return  # it has ended meanwhile
        link.parked = link.hello.hello.parked = kind != "admitted"
        holder = self._ranks.get(link.rank)
        if not link.parked:
            if holder is not None and holder is not link:
                holder.parked = True
            self._seat(link)
        elif holder is link:
            del self._ranks[link.rank]
        self._send(link, message)

    def _members(self) -> list[RankLink]:
        """The connections, open or not, of all processes that live and have said who they are."""
        return [link for link in self._links if link.rank >= 0]

    def _pass_on(self, link: RankLink, says: wire.RankSays) -> None:
        self._up.put(wire.HostSays(ranks=[self._from(link, says)]))

    @staticmethod
    def _from(link: RankLink, says: wire.RankSays) -> wire.FromRank:
        return wire.FromRank(rank=link.rank, session=link.session, says=says)

    def _send(self, link: RankLink, message: wire.HostOrders) -> None:
        if not link.open:
            return
        if len(link.out) > _MAX_OUT:
            log.warning("rank %d does not read, a message for it is dropped", link.rank)
            return
        link.out += pack(message)
        self._writable(link)

    def _writable(self, link: RankLink) -> None:
        try:
            while link.out:
                sent = link.sock.send(link.out)
                del link.out[:sent]
        except BlockingIOError:
            self._loop.add_writer(link.sock, self._writable, link)
            return
        except OSError as error:
            log.debug("rank %d cannot be written to: %s", link.rank, error)  # its end is seen by reading
            link.out.clear()
        self._loop.remove_writer(link.sock)

    # ---------------------------------------------------------------------------------- controller

    def _covered(self) -> bool:
        """A controller leads us, or has just been lost and another one may take over: ranks need not despair yet."""
        return self._up.up or self._lost_at is not None

    def _say_candidates(self, candidates: list[wire.Candidate]) -> None:
        self._up.put(wire.HostSays(candidates=candidates))

    def _on_up(self, welcome: wire.Welcome) -> None:
        if self._warned:
            log.warning("the controller is back, fault tolerance is on again")
        if self._warned or self._lost_at is not None:
            leader = welcome.leader
            log.warning("controller %d on host %s leads now, term %d", leader.index, leader.host, welcome.term)
        self._warned, self._lost_at = False, None
        self._down_reason = ""
        # Who is here and who was comes first: nobody may die without the controller knowing that he lived. To one that
        # knows nothing yet, all have to have come before one is gone, or the job seems not to have begun.
        words = [self._from(link, link.hello) for link in self._members()]
        words += [word for gone in self._gone.values() for word in gone]
        self._up.put(wire.HostSays(ranks=words))
        for link in self._members():
            self._send(link, wire.HostOrders(resync=wire.Resync()))
            self._send(link, wire.HostOrders(beat=wire.Beat(protected=True)))
        self._guard.say_again()

    def _on_lost(self, reason: str) -> None:
        self._changed.set()
        if self._members():
            self._lost_at = self._loop.time()
            log.warning("the controller is lost (%s); looking for another one", reason)

    def _on_down(self, reason: str) -> None:
        self._changed.set()
        self._lost_at = None
        if not self._up.ever and self._loop.time() - self._began < self._start:
            return  # the controller is starting beside us
        if reason != self._down_reason and self._members():
            self._down_reason = reason
            if not self._warned:
                self._warned = True
                log.warning("*** FAULT TOLERANCE IS OFF on this host: %s; training goes on, trying again ***", reason)
            else:
                log.info("still without a controller: %s", reason)
        for link in self._members():
            self._send(link, wire.HostOrders(beat=wire.Beat(protected=False)))

    def _on_message(self, message: wire.HostOrders) -> None:
        kind = message.WhichOneof("body")
        if kind == "stop":
            logs.bind(epoch=message.stop.epoch)
            for rank in message.stop.ranks:
                if rank in self._ranks:
                    keep_told(self._ranks[rank].hello.hello, message)
                    self._send(self._ranks[rank], message)
        elif kind == "wish":
            for rank in message.wish.ranks:
                if rank in self._ranks:
                    keep_told(self._ranks[rank].hello.hello, message)
                    self._send(self._ranks[rank], message)
        elif kind == "order":
            if message.order.rank in self._ranks:
                self._send(self._ranks[message.order.rank], message)
                self._ending = self._ending or codec.ends_the_job(message.order)
        elif kind == "examine":
            task = asyncio.ensure_future(self._examine(message.examine.rank))
            self._examining.add(task)
            task.add_done_callback(self._examining.discard)
        elif kind == "kill":
            self._kill(codec.kill_from_wire(message.kill))
        elif kind in ("parked", "admitted", "dismissed"):
            self._place(message)
        elif kind not in ("beat", "welcome"):
            raise codec.WireError(f"the controller said {kind}, which is not for a relay")

    # ---------------------------------------------------------------------------------- hangs

    async def _examine(self, rank: int) -> None:
        """Keeps the stacks of a rank that seems to hang, if it may be touched at all."""
        link = self._ranks.get(rank)
        if link is None:
            return
        file, why_none = "", ""
        spare = _protected(link)
        if not spare:
            name = stacks_name(rank, link.pid)
            try:
                file = str(await stacks.keep(link.pid, link.pidfd, self._incidents / name))
            except stacks.NoStacks as error:
                why_none = str(error)
        found = Examined(0.0, rank, link.pid, spare, file, why_none)
        self._up.put(wire.HostSays(ranks=[codec.witness_to_wire(found, link.session)]))

    def _kill(self, order: Kill) -> None:
        """Only the very process that was looked at: its descriptor cannot come to mean another one."""
        link = self._ranks.get(order.rank)
        if link is None or link.pid != order.pid:
            log.warning("rank %d: process %d is not here any more, so it is not killed", order.rank, order.pid)
        elif spare := _protected(link):
            log.warning("rank %d: process %d is not killed: %s", order.rank, order.pid, spare)
        else:
            log.warning("rank %d: process %d does not move, it is killed", order.rank, order.pid)
            link.killed = True
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                signal.pidfd_send_signal(link.pidfd, signal.SIGKILL)


def keep(hello: wire.Hello, says: wire.RankSays) -> None:
    """What its rank says later than a hello: that is said again to the next controller, and has to be true then."""
    kind = says.WhichOneof("body")
    if kind == "heartbeat":
        hello.began = hello.began or says.heartbeat.step > 0
    elif kind == "held":
        hello.held, hello.held_at, hello.held_for = says.held.hold, says.held.step, 0.0
    elif kind == "released":
        hello.held = hello.held_at = 0


def keep_told(hello: wire.Hello, message: wire.HostOrders) -> None:
    """What its rank is told, as in `keep`."""
    if message.WhichOneof("body") == "stop":
        if message.stop.epoch > hello.epoch:  # which also takes it out of a hold
            hello.epoch, hello.held, hello.held_at = message.stop.epoch, 0, 0
        hello.doubt = message.stop.doubt or hello.doubt
    elif message.wish.id > hello.wish.id:
        hello.wish.CopyFrom(message.wish)
        del hello.wish.ranks[:]


def _protected(link: RankLink) -> str:
    """Why this process must not be killed; "" where nothing speaks against it."""
    if link.pidfd < 0:
        return "this system gives no process descriptors, so another process could be hit"
    try:
        tracer = pids.tracer(link.pid)
    except OSError as error:
        return f"whether a debugger is attached cannot be known ({error})"
    return f"it is being debugged by process {tracer}" if tracer else ""
