"""The negotiation with ClusterD, pure: signals, answers and what the engine says go in; reports to send, events for the
engine and words for people come out. No clock, no socket, no thread.

    AWAY -> IDLE -> REPORTED -> STOPPING -> STOPPED -> OFFERED -> EXECUTING -> IDLE
             |  a fault of ours   ^  stopTrain          ^ |changeStrategy |
             +--------------------+                     | +---------------+ it did not lead on: 405, 406

All of one event carries one uuid. What comes twice, late or at the wrong place is said and changes nothing. Where
ClusterD is lost or late, the engine decides alone (ALONE, AWAY); it is asked again from the next fault on, because a
new subscription makes it forget the event that was under way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from mindspeed_tft.clusterd import words as w
from mindspeed_tft.clusterd.words import Report, Signal
from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.hold import AGAIN

WHO = "ClusterD"
PAUSE_LIMIT = 600.0  # seconds that a pause may take to come true, where ClusterD gives none


@dataclass(frozen=True)
class Say:
    """A line for the log."""

    text: str


@dataclass(frozen=True)
class Reconnect:
    """Subscribe anew: what ClusterD believes of this job is not so any more."""

    why: str


Output = Report | t.Event | Say | Reconnect
Nodes = Mapping[int, Collection[int]]  # node rank -> ranks


class Place(str, Enum):
    """Where the negotiation stands."""

    AWAY = "away"  # not subscribed
    IDLE = "idle"
    REPORTED = "reported"  # a fault of ours; stopTrain is to come
    STOPPING = "stopping"  # stopTrain came; ranks are being stopped
    STOPPED = "stopped"  # and that was reported; globalFault is to come
    OFFERED = "offered"  # strategies were reported; changeStrategy is to come
    EXECUTING = "executing"
    ALONE = "alone"  # subscribed, but this fault is answered by our own rules
    OVER = "over"  # the job is


class Negotiation:
    """The client's side, for one job."""

    def __init__(self, world_size: int) -> None:
        self.place = Place.AWAY
        self.uuid = ""  # of the event that is under way
        self._unregistered = set(range(world_size))
        self._incident = False  # ranks are stopped
        self._known: set[int] = set()  # ranks whose faults ClusterD knows
        self._settled: set[int] = set()  # of these, who is well again: ClusterD tells of all faults of an event, always
        self._done: set[str] = set()  # events that are over
        self._heard: set[str] = set()  # preExitProcess has a uuid of its own
        self._offering = False  # strategies are to be reported with the next word of the engine
        self._saving = False  # saveAndExit: it has decided before anybody asked
        self._strategy = ""  # that is carried out, by its name on the wire
        self._next = ""  # decided for while another one is carried out
        self._tried: set[tuple[str, str]] = set()  # strategies of this event, with their extra words: none comes twice
        self._resumed: int | None = None  # the step S after which ranks train on; one more has to be completed
        self._pause = ""  # uuid of a pause

    @property
    def may_connect(self) -> bool:
        """A subscription makes ClusterD forget what is under way: not in the middle of an incident."""
        return self.place is Place.AWAY and not self._incident

    # ------------------------------------------------------------------------------------------------ the connection

    def connected(self) -> Iterator[Output]:
        """Subscribed: from now on it decides."""
        self.place, self.uuid = Place.IDLE, ""
        self._forget()
        yield from self._end_pause()  # one that it forgot: nobody else would
        yield t.Steered(0.0, True, WHO)

    def lost(self, why: str) -> Iterator[Output]:
        """Nothing can be heard of it any more."""
        if self.place in (Place.AWAY, Place.OVER):
            return
        self.place, self._resumed = Place.AWAY, None
        yield from self._end_pause()
        yield t.Steered(0.0, False, WHO, why)

    def answered(self, report: Report, code: int, info: str) -> Iterator[Output]:
        """Its answer to a report. One that it does not take is an event that it does not know."""
        if not w.succeeded(code):
            why = f"it answers {report.method} with {w.code_words(code)}{f': {info}' if info else ''}"
            yield Reconnect(why)
            yield from self.lost(why)

    # ------------------------------------------------------------------------------------------------ signals

    def signal(self, signal: Signal, nodes: Nodes) -> Iterator[Output]:
        """What ClusterD wants. `nodes`: the ranks of each node, as they are connected."""
        if signal.kind == w.KEEP_ALIVE or self.place in (Place.AWAY, Place.OVER):
            return
        if signal.kind in w.REFUSED:
            yield Say(f"{WHO} asks for {signal.kind}, which is refused: {w.REFUSED[signal.kind]}")
        elif signal.kind == w.KILL_MASTER:
            yield from self._end_the_job()
        elif signal.kind == w.PRE_EXIT:
            if signal.uuid not in self._heard and not self._unregistered:
                self._heard.add(signal.uuid)
                yield self._tell(signal.faults)
        elif signal.uuid in self._done:
            yield self._late(signal, "that event is over")
        elif signal.kind == w.STOP and w.PAUSE_TRAIN in signal.actions:
            yield from self._be_paused(signal)
        elif signal.kind in (w.STOP, w.SAVE_AND_EXIT):
            yield from self._be_stopped(signal)
        elif signal.kind == w.CHANGE and signal.strategy == w.CONTINUE:
            yield from self._go_on(signal)
        elif signal.kind not in (w.GLOBAL, w.CHANGE):
            yield Say(f"{WHO} asks for {signal.kind!r}, which nobody here knows; it is ignored")
        elif signal.uuid != self.uuid:
            yield self._late(signal, "it belongs to another event")
        elif signal.kind == w.GLOBAL:
            yield from self._hear_of_all(signal, nodes)
        else:
            yield from self._be_decided(signal, nodes)

    def _late(self, signal: Signal, why: str) -> Say:
        what = f"{signal.kind} {signal.strategy}".strip()
        return Say(f"{WHO}'s {what} of event {signal.uuid or '(none)'} is ignored: {why}")

    def _tell(self, faults: tuple[tuple[int, str], ...], leaving: Collection[int] = ()) -> t.Told:
        """Faults that it names, and ranks whose nodes are to go."""
        faults = tuple((rank, kind) for rank, kind in faults if rank not in self._settled)
        self._known |= {rank for rank, _ in faults} | {*leaving}
        kinds = {**{rank: w.fault_kind(kind) for rank, kind in faults}, **dict.fromkeys(leaving, "process")}
        return t.Told(0.0, tuple(sorted(kinds.items())), WHO)

    def _be_stopped(self, signal: Signal) -> Iterator[Output]:
        if self.place is Place.ALONE:
            yield self._late(signal, "ranks are stopped, and our own rules decide this time")
        elif signal.uuid == self.uuid and self.place not in (Place.IDLE, Place.REPORTED):
            yield self._late(signal, "it came before")
        elif self._unregistered:
            why = f"{len(self._unregistered)} ranks have not registered yet"
            yield Report("ReportStopComplete", w.NOT_READY, why)
        else:
            known = set(self._known) if self.place is Place.REPORTED else set()  # else it has begun anew
            self._forget()
            yield from self._end_pause()
            self.uuid, self.place, self._known = signal.uuid, Place.STOPPING, known
            self._saving = signal.kind == w.SAVE_AND_EXIT
            yield self._tell(signal.faults)

    def _hear_of_all(self, signal: Signal, nodes: Nodes) -> Iterator[Output]:
        if self.place is not Place.STOPPED or self._offering:
            yield self._late(signal, f"nobody waits for it ({self.place.value})")
            return
        self._offering = True
        leaving = _ranks(signal, nodes) if w.FAULT_NODES_EXIT in signal.actions else ()
        yield self._tell(signal.faults, leaving)

    def _be_decided(self, signal: Signal, nodes: Nodes) -> Iterator[Output]:
        known = {name for name, _ in self._tried}
        if self.place is Place.EXECUTING and signal.strategy not in known:
            self._tried.add((signal.strategy, signal.extra))
            self._next = signal.strategy  # it does not wait for ours any more, but ours cannot be broken off
            yield Say(f"{WHO} decides for {signal.strategy} while {self._strategy} is carried out: if that fails, then")
        elif self.place is not Place.OFFERED:
            yield self._late(signal, f"nobody waits for it ({self.place.value})")
        elif (signal.strategy, signal.extra) in self._tried:
            yield self._late(signal, "it came before")
        else:
            self._tried.add((signal.strategy, signal.extra))
            self._strategy, self._next, self.place = signal.strategy, "", Place.EXECUTING
            in_place = signal.strategy == w.IN_PLACE or w.IN_PLACE in signal.extra
            stays = in_place or w.FAULT_NODES_RESTART in signal.actions
            leaving = () if stays else _ranks(signal, nodes)
            self._known |= {*leaving}
            yield t.Advised(0.0, w.RECOVER if in_place else signal.strategy, leaving)

    def _end_the_job(self) -> Iterator[Output]:
        """killMaster: nothing is left that ClusterD could do. What can be saved is saved."""
        self.place = Place.ALONE
        yield t.FaultSeen(0.0, 0, "terminated", f"{WHO} ends this job (killMaster)", own=True)
        yield t.Steered(0.0, False, WHO, "it ends this job")

    # ------------------------------------------------------------------------------------------------ pauses

    def _be_paused(self, signal: Signal) -> Iterator[Output]:
        if self.place is not Place.IDLE or self._pause:
            yield self._late(signal, f"nothing can be paused now ({self.place.value})")
            return
        self._pause = signal.uuid
        patience = float(signal.timeout) if signal.timeout > 0 else PAUSE_LIMIT
        yield t.Asked(0.0, f"clusterd-pause-{signal.uuid}", "pause", {}, patience, WHO)

    def _go_on(self, signal: Signal) -> Iterator[Output]:
        if not self._pause or signal.uuid != self._pause:
            yield self._late(signal, "there is no pause of it")
            return
        yield self._resume("resume")

    def _resume(self, name: str) -> t.Asked:
        """Also where ranks train again already, because the pause was over by itself."""
        return t.Asked(0.0, f"clusterd-{name}-{self._pause}", "resume", {AGAIN: "1"}, PAUSE_LIMIT, WHO)

    def _end_pause(self) -> Iterator[Output]:
        """Something else than its `continue` ends it: no rank is to be held any more, now or after a recovery."""
        if self._pause:
            yield self._resume("end")
            self._done.add(self._pause)
            self._pause = ""

    def _answered_by_engine(self, answer: t.Answer) -> Iterator[Output]:
        code = w.OK if answer.ok else w.CLIENT_FAILED
        if answer.id == f"clusterd-pause-{self._pause}":
            self._pause = self._pause if answer.ok else ""
            yield Report("ReportStopComplete", code, answer.text)
        elif answer.id == f"clusterd-resume-{self._pause}":
            self._done.add(self._pause)
            self._pause = ""
            yield Report("ReportRecoverStatus", code, answer.text, strategy=w.CONTINUE)

    # ------------------------------------------------------------------------------------------------ the engine

    def event(self, event: t.Event) -> Iterator[Output]:
        """Something that the engine hears, too."""
        if isinstance(event, t.Registered):
            self._unregistered.discard(event.info.rank)
        elif self._resumed is not None:
            step = event.step if isinstance(event, t.Heartbeat) else 0
            if step > self._resumed + 1 or isinstance(event, t.RankFinished):
                yield from self._succeeded()

    def action(self, action: t.Action) -> Iterator[Output]:
        """Something that the engine wants."""
        if isinstance(action, t.Stop):
            self._incident = True
        elif isinstance(action, t.Consult):
            yield from self._asked(action)
        elif isinstance(action, t.Unadvised):
            self.place = Place.ALONE
        elif isinstance(action, t.Answer):
            yield from self._answered_by_engine(action)
        elif isinstance(action, t.Recovered):
            yield from self._recovered(action)
        elif isinstance(action, t.Closed):
            yield from self._closed(action)

    def _asked(self, consult: t.Consult) -> Iterator[Output]:
        if self._resumed is not None and consult.step > self._resumed:
            yield from self._succeeded()  # a step was completed since: this is another event
        if self._saving:
            self._saving, self._strategy, self.place = False, w.DUMP, Place.EXECUTING
            yield t.Advised(0.0, w.DUMP)
        elif self.place in (Place.IDLE, Place.REPORTED):
            if self._pause:
                yield Report("ReportRecoverStatus", w.UNRECOVERABLE, "a fault ended the pause", strategy=w.CONTINUE)
                yield from self._end_pause()
            self.place = Place.REPORTED
            yield from self._report_faults(consult)
        elif self.place is Place.STOPPING:
            self.place = Place.STOPPED
            yield Report("ReportStopComplete", w.OK, "all ranks are stopped", _on_the_wire(consult.faults))
            yield from self._report_faults(consult)
        elif self.place is Place.STOPPED and self._offering:
            self._offering, self.place = False, Place.OFFERED
            yield from self._report_faults(consult)
            yield Report("ReportRecoverStrategy", faults=_on_the_wire(consult.faults), strategies=consult.strategies)
        elif self.place in (Place.STOPPED, Place.OFFERED):
            yield from self._report_faults(consult)
        elif self.place is Place.EXECUTING:
            yield from self._failed(consult)

    def _report_faults(self, consult: t.Consult) -> Iterator[Output]:
        """Those that ClusterD does not know."""
        if news := tuple((rank, kind) for rank, kind in consult.faults if rank not in self._known):
            self._known |= {rank for rank, _ in news}
            yield Report("ReportProcessFault", faults=_on_the_wire(news))

    def _failed(self, consult: t.Consult) -> Iterator[Output]:
        """What it decided for did not lead on, or a fault came before the first step was done."""
        self._resumed = None
        if self._next:  # it has decided again already, and waits for no word of the one before
            self._strategy, self._next = self._next, ""
            yield t.Advised(0.0, w.RECOVER if self._strategy == w.IN_PLACE else self._strategy)
            return
        again = self._strategy == w.RETRY
        code = w.RETRY_FAILED if again else w.DUMP_FAILED if self._strategy == w.DUMP else w.UNRECOVERABLE
        strategy, self._strategy = self._strategy, ""
        # After 405 it tells of all faults again, after any other it decides among those that are left.
        self.place = Place.STOPPED if again else Place.OFFERED
        yield Report("ReportRecoverStatus", code, consult.why, strategy=strategy)
        yield from self._report_faults(consult)

    def _recovered(self, action: t.Recovered) -> Iterator[Output]:
        self._incident = False
        if self.place is Place.EXECUTING:
            self._resumed = action.step
            self._settled |= self._known
            self._known.clear()
        elif self.place is Place.ALONE:
            self.place = Place.AWAY
            yield t.Steered(0.0, False, WHO, "it waits for something that is over")
            yield Reconnect("training goes on without its decision")
        elif self.place is Place.STOPPING:  # it wanted a stop in the middle of a repair that went well
            yield self._tell(())

    def _succeeded(self) -> Iterator[Output]:
        """One more step is completed."""
        self._resumed = None
        strategy = w.RECOVER if self._strategy == w.IN_PLACE else self._strategy
        yield Report("ReportRecoverStatus", w.OK, "training goes on", strategy=strategy)
        self._done.add(self.uuid)
        self.uuid, self.place = "", Place.IDLE
        self._forget()

    def _closed(self, closed: t.Closed) -> Iterator[Output]:
        saved = closed.outcome in ("dumped", "exists")
        if self._resumed is not None:
            yield from self._succeeded()
        elif self.place is Place.EXECUTING and self._strategy == w.DUMP:
            code = w.OK if saved else w.DUMP_FAILED
            yield Report("ReportRecoverStatus", code, closed.summary, strategy=w.DUMP)
        self.place = Place.OVER

    def _forget(self) -> None:
        """The event is over."""
        self._known.clear()
        self._settled.clear()
        self._tried.clear()
        self._offering = self._saving = False
        self._strategy = self._next = ""
        self._resumed = None


def _on_the_wire(faults: tuple[tuple[int, str], ...]) -> tuple[tuple[int, str], ...]:
    return tuple((rank, w.fault_type(kind)) for rank, kind in faults)


def _ranks(signal: Signal, nodes: Nodes) -> tuple[int, ...]:
    """All ranks of the nodes that a signal names."""
    return tuple(sorted(rank for node in signal.nodes for rank in nodes.get(node, ())))
