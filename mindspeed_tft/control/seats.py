"""Who has the place of a rank: the process whose words count, those that knock in vain, and those that lost it.

A rank has one seat. Its holder is the process that registered for it first; another one gets it only when the holder is
gone. Until then it is *parked*: kept aside, in order of arrival, told why, and not listened to. It is a spare
that takes over when the holder is lost. A holder that was out of reach while its place was given away is sent off.

Nothing here decides about the job: what happens to a place is told to the engine as an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from mindspeed_tft.control import codec
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.framing import MAX_FRAME
from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.incident import EXIT_REBORN

NOT_NEEDED = 0  # exit status of a process that has no place


@dataclass(eq=False)
class HostLink:
    """The stream of one relay."""

    hello: wire.HostHello
    out: asyncio.Queue[wire.HostOrders] = field(default_factory=asyncio.Queue)
    ranks: set[int] = field(default_factory=set)  # that were seated or parked through it
    bye: bool = False
    ended: bool = False  # and the job has ended on its host


def gather(first: wire.HostOrders, queue: asyncio.Queue[wire.HostOrders]) -> wire.HostOrders:
    """One message with the first and those that wait behind it: a message costs far more than what is in it."""
    together = wire.HostOrders(more=[first])
    size = first.ByteSize()
    while not queue.empty() and size < MAX_FRAME // 4:
        together.more.append(queue.get_nowait())
        size += together.more[-1].ByteSize()
    return together


@dataclass(frozen=True)
class Departed:
    """A process whose place another one has."""

    info: t.RankInfo
    why: str


@dataclass(frozen=True)
class SeatState:
    """What another controller has to know of a seat to take over."""

    rank: int
    session: str
    info: t.RankInfo
    lost: str = ""  # why the process counts as gone; "" while it does not
    finished: bool = False  # it ended training in the ordinary way
    earlier: tuple[str, ...] = ()  # sessions of processes that had this seat before
    before: Departed | None = None  # in an incident: who had it when that began, and is not replaced for good yet
    version: int = 0  # of its last change; grows with every change of any seat
    bare: bool = False  # it was started in the place of another process, and has none of its state yet


@dataclass
class _Seat:
    session: str
    info: t.RankInfo
    host: HostLink | None
    seq: int = 0  # of the last word that was heard
    lost: str = ""
    finished: bool = False
    earlier: tuple[str, ...] = ()
    before: Departed | None = None
    bare: bool = False
    version: int = 0

    @property
    def gone(self) -> bool:
        return self.finished or bool(self.lost)


@dataclass
class _Parked:
    session: str
    event: t.Registered
    host: HostLink | None
    since: float
    fresh: bool  # it has just been started; else it was parked before, by another controller


class Seats:
    """The seats of one job. Times are seconds on one monotonic clock."""

    def __init__(
        self, lost_after: float, reboot: bool, feed: Callable[[t.Event], None], warn: Callable[[str], None]
    ) -> None:
        """
        Args:
            lost_after: seconds without its host's stream after which a process may count as gone.
            reboot: processes that are lost can be started again.
            feed: takes events for the engine, in order.
            warn: takes a line for the user.
        """
        self._lost_after, self._reboot, self._feed, self._warn = lost_after, reboot, feed, warn
        self._seats: dict[int, _Seat] = {}
        self._parked: dict[int, list[_Parked]] = {}
        self._unheard: dict[int, float] = {}  # ranks that live, as far as is known, without a stream; since when
        self._named: set[str] = set()  # sessions of which the user was told already
        self._closed = ""
        self.version = 0  # grows with every change of `snapshot`

    @property
    def parked(self) -> int:
        """Processes that wait for a place. May be asked from any thread."""
        return sum(map(len, list(self._parked.values())))

    def waiting(self) -> list[dict[str, object]]:
        """The processes that wait for a place, as plain values."""
        found = [(rank, parked) for rank, queue in sorted(self._parked.items()) for parked in queue]
        return [{"rank": rank, "host": one.event.info.host, "pid": one.event.info.pid} for rank, one in found]

    # ---------------------------------------------------------------------------------- another controller

    def snapshot(self, after: int = 0) -> list[SeatState]:
        """All seats that changed after version `after`, in the order of their changes, for `restore` in another
        controller. Who is parked knocks there by himself."""
        changed = sorted((seat.version, rank) for rank, seat in self._seats.items() if seat.version > after)
        return [self._state(rank, self._seats[rank]) for _, rank in changed]

    @staticmethod
    def _state(rank: int, seat: _Seat) -> SeatState:
        return SeatState(
            rank,
            seat.session,
            seat.info,
            seat.lost,
            seat.finished,
            seat.earlier,
            seat.before,
            seat.version,
            seat.bare,
        )

    def restore(self, states: Iterable[SeatState], now: float) -> None:
        """Takes over from another controller, before anybody was heard here: tells the engine who is there, then who
        is lost, has finished, or stands for a lost one. All count as out of reach until their relays come."""
        kept = sorted(states, key=lambda state: state.rank)
        for state in kept:
            seat = self._seats[state.rank] = _Seat(
                state.session, state.info, None, 0, state.lost, state.finished, state.earlier, state.before, state.bare
            )
            self._change(seat)
            if not (state.lost or state.finished):
                self._unheard[state.rank] = now
            first, bare = (state.before.info, False) if state.before is not None else (state.info, state.bare)
            self._feed(t.Registered(now, first, bare=bare))
        for state in kept:
            if state.before is not None:
                self._feed(t.RankLost(now, state.rank, state.before.why, state.before.info.pid))
                self._feed(t.Registered(now, state.info, bare=state.bare))
            if state.lost:
                self._feed(t.RankLost(now, state.rank, state.lost, state.info.pid))
            elif state.finished:
                self._feed(t.RankFinished(now, state.rank))

    # ---------------------------------------------------------------------------------- what is heard

    def hear(self, link: HostLink, word: wire.FromRank, now: float) -> None:
        """One word of, or about, a rank.

        Raises:
            WireError: it makes no sense.
        """
        kind = word.WhichOneof("body")
        if why := self._foreign(link, word):
            self._name(
                f"{link.hello.host} {word.rank} {word.session}", f"refused a word of host {link.hello.host}: {why}"
            )
        elif kind == "says":
            self._hear_rank(link, word, now)
        elif kind == "lost":
            self._hear_lost(link, word, now)
        elif kind in ("quiet", "examined"):
            if self._speaks(word):
                self._feed(codec.witness_from_wire(word, now))
        else:
            raise codec.WireError("a relay passed on nothing")

    def left(self, link: HostLink, since: float) -> None:
        """The stream of a relay is over; `since` then nothing was heard of it."""
        for rank in link.ranks:
            seat = self._seats.get(rank)
            if seat is not None and seat.host is link:
                seat.host = None
                if not seat.gone:
                    self._unheard[rank] = since
            for parked in self._parked.get(rank, ()):
                if parked.host is link:
                    parked.host = None

    def look(self, now: float, incident: bool) -> None:
        """Processes whose stream has been missing for too long are lost, if anything but that speaks for it: an
        `incident` is open, or another process came since and wants a place on the same host. Else it may be the network
        of the control plane alone, while training goes on."""
        late = [rank for rank, since in self._unheard.items() if now - since >= self._lost_after]
        if late and not incident:
            wanted = {self._seats[rank].info.host for rank in late if self._knocks(rank, self._unheard[rank])}
            late = [rank for rank in late if self._seats[rank].info.host in wanted]
        if late:
            here = {seat.info.host for seat in self._seats.values() if seat.host is not None}
            for rank in sorted(late):
                self._lose(rank, self._why_lost(self._seats[rank].info.host, here, now - self._unheard[rank]), now)
        for rank in [rank for rank, queue in self._parked.items() if queue and rank not in self._seats]:
            if now - self._parked[rank][0].since >= self._lost_after:  # nobody claims that he has this place
                self._admit(rank, now)

    def _knocks(self, rank: int, since: float) -> bool:
        """Whoever was there before that is a spare that has nothing to tell."""
        return any(parked.fresh and parked.since >= since for parked in self._parked.get(rank, ()))

    @staticmethod
    def _why_lost(host: str, here: set[str], seconds: float) -> str:
        if host in here:
            return f"it did not come back after the relay of its host {host} ended, {seconds:.1f} s ago"
        return f"its host {host} is gone, not heard for {seconds:.1f} s"

    def _foreign(self, link: HostLink, word: wire.FromRank) -> str:
        """Why a relay may not say this: it speaks for processes of its own host, which its certificate names, only."""
        here, body = link.hello.host, word.WhichOneof("body")
        named: str | None = None
        if body == "says" and word.says.WhichOneof("body") == "hello":
            named = word.says.hello.info.host
        elif body == "lost" and word.lost.HasField("info"):
            named = word.lost.info.host
        if named is not None and named != here:
            return (
                f"it says that rank {word.rank} runs on host {named or '(none)'}; the rank and the relay beside it "
                "have to call their host by one name (`uname -n`)"
            )
        seat = self._seats.get(word.rank)
        if seat is not None and seat.session == word.session and seat.info.host != here:
            return f"rank {word.rank} is process {seat.info.pid} on host {seat.info.host}"
        return ""

    def _speaks(self, word: wire.FromRank) -> bool:
        """The word is of the process that has the seat, and lives."""
        seat = self._seats.get(word.rank)
        return seat is not None and seat.session == word.session and not seat.gone

    def _hear_rank(self, link: HostLink, word: wire.FromRank, now: float) -> None:
        event = codec.event_from_wire(word.says, now)
        rank = codec.speaker(event)
        if rank != word.rank:
            raise codec.WireError(f"word of rank {rank} under the name of rank {word.rank}")
        if isinstance(event, t.Registered):
            self._register(link, word, event)
            return
        if not self._speaks(word):
            return
        seat = self._seats[rank]
        if word.says.seq:
            if word.says.seq <= seat.seq:
                return
            seat.seq = word.says.seq
        if isinstance(event, t.RankFinished):
            seat.finished = True
            self._change(seat)
        self._feed(event)

    def _hear_lost(self, link: HostLink, word: wire.FromRank, now: float) -> None:
        event = codec.lost_from_wire(word, now)
        seat = self._seats.get(word.rank)
        queue = self._parked.get(word.rank, [])
        if any(parked.session == word.session for parked in queue):
            queue[:] = [parked for parked in queue if parked.session != word.session]
            return
        if seat is None:  # it lived and died while there was no controller to hear it
            if not word.lost.HasField("info"):
                raise codec.WireError(f"loss of rank {word.rank}, of which nothing is known")
            self._take(link, word.session, t.Registered(now, codec.info_from_wire(word.lost.info)))
        if self._speaks(word):  # else heard before, or of an earlier life
            self._lose(word.rank, event.message or "its process is gone", now, event.pid)

    # ---------------------------------------------------------------------------------- coming and going

    def _register(self, link: HostLink, word: wire.FromRank, event: t.Registered) -> None:
        link.ranks.add(word.rank)
        seat = self._seats.get(word.rank)
        if seat is None and word.says.hello.parked:
            self._park(link, word, event, "it is not known yet who has its place")
        elif seat is None or (seat.session != word.session and word.session not in seat.earlier and seat.lost):
            if word.says.hello.parked:
                self._tell_admitted(link, word.rank, word.session)
            self._take(link, word.session, event)
        elif seat.session == word.session:
            if word.says.hello.parked:  # it was told when it could not hear
                self._tell_admitted(link, word.rank, word.session)
            self._come_back(seat, link, event)
        elif word.session in seat.earlier:
            why = f"process {seat.info.pid} on host {seat.info.host} took its place while it was out of reach"
            self._dismiss(link, event.info, word.session, NOT_NEEDED, why)
        elif self._closed:
            self._dismiss(link, event.info, word.session, NOT_NEEDED, self._closed)
        else:
            does = "has finished training" if seat.finished else "lives"
            why = f"process {seat.info.pid} on host {seat.info.host} has its place and {does}"
            self._park(link, word, event, why)

    def _come_back(self, seat: _Seat, link: HostLink, event: t.Registered) -> None:
        if seat.lost and self._reboot:  # what it still has is of no use: the others have been told that it is gone
            why = f"it counts as lost ({seat.lost}), and is started again"
            self._dismiss(link, event.info, seat.session, EXIT_REBORN, why)
            return
        if seat.lost or seat.bare != event.bare:
            seat.lost, seat.bare = "", event.bare
            self._change(seat)
        seat.host = link
        self._unheard.pop(event.info.rank, None)
        self._feed(event)  # the engine says again what this rank may have missed

    def _take(self, link: HostLink, session: str, event: t.Registered) -> None:
        rank, old = event.info.rank, self._seats.get(event.info.rank)
        seat = self._seats[rank] = _Seat(session, event.info, link, bare=event.bare)
        if old is not None:
            seat.earlier = (*old.earlier, old.session)
            seat.before = old.before or Departed(old.info, old.lost)
        self._change(seat)
        self._unheard.pop(rank, None)
        self._feed(event)

    def _lose(self, rank: int, why: str, now: float, pid: int = 0) -> None:
        seat = self._seats[rank]
        seat.lost = why
        self._change(seat)
        self._unheard.pop(rank, None)
        self._feed(t.RankLost(now, rank, why, pid or seat.info.pid))
        self._admit(rank, now)

    def _park(self, link: HostLink, word: wire.FromRank, event: t.Registered, why: str) -> None:
        info, session, queue = event.info, word.session, self._parked.setdefault(event.info.rank, [])
        known = next((parked for parked in queue if parked.session == session), None)
        if known is None:
            queue.append(_Parked(session, event, link, event.at, fresh=not word.says.hello.parked))
        else:
            known.host, known.event = link, event
        self._name(session, f"rank {info.rank}: process {info.pid} on host {info.host} is parked: {why}")
        body = wire.Parked(rank=info.rank, session=session, reason=codec.clean(why))
        link.out.put_nowait(wire.HostOrders(parked=body))

    def _admit(self, rank: int, now: float) -> None:
        """The place of a rank is free: for the first parked process that can be reached."""
        queue = self._parked.get(rank, [])
        for parked in queue:
            if parked.host is None:
                continue
            queue.remove(parked)
            info = parked.event.info
            self._warn(f"rank {rank}: process {info.pid} on host {info.host}, which was parked, takes the place")
            self._tell_admitted(parked.host, rank, parked.session)
            self._take(parked.host, parked.session, replace(parked.event, at=now))
            return

    @staticmethod
    def _tell_admitted(link: HostLink, rank: int, session: str) -> None:
        """First of all: what the engine says because of it is for this process, and its relay has to know."""
        link.out.put_nowait(wire.HostOrders(admitted=wire.Admitted(rank=rank, session=session)))

    def _dismiss(self, link: HostLink, info: t.RankInfo, session: str, code: int, why: str) -> None:
        self._name(f"{session} {code}", f"rank {info.rank}: process {info.pid} on host {info.host} is sent off: {why}")
        body = wire.Dismissed(rank=info.rank, session=session, code=code, reason=codec.clean(why))
        link.out.put_nowait(wire.HostOrders(dismissed=body))

    def _change(self, seat: _Seat) -> None:
        self.version += 1
        seat.version = self.version

    def _name(self, key: str, text: str) -> None:
        if key not in self._named:  # a relay that comes back says all its hellos again
            self._named.add(key)
            self._warn(text)

    # ---------------------------------------------------------------------------------- what the job does

    def recovered(self) -> None:
        """An incident is over, training goes on: newcomers are not different from others any more."""
        for seat in self._seats.values():
            if seat.before is not None or seat.bare:
                seat.before, seat.bare = None, False
                self._change(seat)

    def close(self, outcome: str) -> None:
        """The job is over: nobody who is parked is needed any more, nor who knocks later."""
        self._closed = f"it is not needed, the job has ended ({outcome})"
        for queue in self._parked.values():
            for parked in queue:
                if parked.host is not None:
                    self._dismiss(parked.host, parked.event.info, parked.session, NOT_NEEDED, self._closed)
        self._parked.clear()

    # ---------------------------------------------------------------------------------- what is told

    def tell(self, rank: int, message: wire.HostOrders) -> None:
        """Sends a message to, or about, the process that has the seat; drops it where there is no way to it."""
        seat = self._seats.get(rank)
        if seat is not None and seat.host is not None:
            seat.host.out.put_nowait(message)

    def by_host(self, ranks: Iterable[int]) -> dict[HostLink, list[int]]:
        """The streams that reach these ranks. Not by node: a relay that was started again is another one."""
        found: dict[HostLink, list[int]] = {}
        for rank in ranks:
            seat = self._seats.get(rank)
            if seat is not None and seat.host is not None:
                found.setdefault(seat.host, []).append(rank)
        return found
