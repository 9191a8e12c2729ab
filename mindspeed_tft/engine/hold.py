"""What operators want of a job in training: that it waits between two steps, that it saves now.

    asked --Tell: a wish--> ranks agree in the commit of a step --> all are held, or have saved --> Answer

The engine says from which step on, the ranks agree at which (`docs/design.md`, "Operators"): so nobody has to be told
in time, and no two ranks stop at different places. What can only be done while all are held is a `Work`: it gives its
orders when the last rank has come. Requests end by themselves, and what was not done by then is withdrawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from mindspeed_tft.engine.desk import Desk
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.states import State
from mindspeed_tft.engine.types import (
    Answer,
    Asked,
    Deadlines,
    Held,
    Order,
    OrderDone,
    OrderKind,
    Progress,
    Registered,
    Released,
    SavedStep,
    Tell,
    Wish,
    Withdrawn,
)
from mindspeed_tft.engine.words import count, ranks, some

AGAIN = "again"  # among the arguments: an engine before this one was asked already, and its answer may be lost
LIMIT = 3600.0  # seconds that a job is held for, where nobody says it
MOST = 2.0**53  # of any number that is asked for: up to it floating-point numbers count in ones
OF_HELD = frozenset({OrderKind.SAVE, OrderKind.LINK})  # orders that ranks carry out while they are held
Data = dict[str, str | int | float]


class Refusal(ValueError):
    """A request that cannot be served; the text says why, and what to do instead."""


@dataclass(frozen=True)
class Outcome:
    """What came of a work."""

    ok: bool
    text: str
    data: Data = field(default_factory=dict)


class Work(Protocol):
    """What all ranks do while they are held, by orders. If one cannot, it says so by a fault, which ends the hold."""

    def begin(self, members: tuple[int, ...], step: int) -> None:
        """All ranks are held after `step`: give the first orders."""

    def done(self, order: Order, event: OrderDone) -> None:
        """A rank carried out an order, or could not."""

    def repeat(self, rank: int) -> None:
        """A rank was out of reach: give it its open order again."""

    def tick(self) -> None:
        """Judge deadlines."""

    @property
    def outcome(self) -> Outcome | None:
        """None while it goes on."""

    @property
    def doing(self) -> str:
        """What is done now, for the operator."""

    @property
    def broken(self) -> str:
        """Why nothing helps but to stop everybody; "" otherwise."""


class HeldSave:
    """The framework's own checkpoint of the step after which all are held."""

    broken = ""  # a rank that cannot save says so by a fault
    doing = "saving"

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._orders: dict[int, Order] = {}
        self._open: set[int] = set()
        self._step = 0
        self._path = self._failure = ""
        self._begun = 0.0

    def begin(self, members: tuple[int, ...], step: int) -> None:
        self._step, self._begun = step, self._desk.now
        self._orders = {rank: self._desk.issue(rank, OrderKind.SAVE, {"step": step}) for rank in members}
        self._open = set(members)

    def done(self, order: Order, event: OrderDone) -> None:
        self._open.discard(event.rank)
        self._path = event.result.get("path", self._path)
        if not event.ok:
            self._failure = f"rank {event.rank} could not save step {self._step}: {event.message}"

    def repeat(self, rank: int) -> None:
        if rank in self._open:
            self._desk.put(self._orders[rank])

    def tick(self) -> None:
        return None  # a save takes as long as it takes; who asked for it has a patience of his own

    @property
    def outcome(self) -> Outcome | None:
        if self._failure:
            return Outcome(False, self._failure)
        if not self._orders or self._open:
            return None
        return saved(self._step, self._path, self._desk.now - self._begun)


def saved(step: int, path: str, seconds: float) -> Outcome:
    """The words of a dump that was asked for, and is complete."""
    return Outcome(True, f"step {step} is saved: {path}", {"step": step, "path": path, "seconds": round(seconds, 3)})


@dataclass
class _Request:
    """Somebody waits for an answer."""

    asked: Asked
    until: float
    since: float
    work: Work | None = None
    limit: float = LIMIT  # seconds that the work takes at most
    paused: bool = False  # the job was held already when it came, and stays so
    step: int = 0  # after which some ranks were held when it came; 0: none was
    said: tuple[int, str] = (-1, "")  # ranks that were counted, and what was done, when it was told last


class Holds:
    """The requests of operators, and where the ranks stand with respect to them."""

    def __init__(self, desk: Desk, roster: Roster, deadlines: Deadlines, issued: int) -> None:
        """`issued`: no smaller than any id that was used before this engine."""
        self._desk, self._roster, self._deadlines = desk, roster, deadlines
        self._number = issued
        self.wish = Wish()
        self._in: set[int] = set()  # held, as it is wished
        self._early: dict[int, Held] = {}  # held, under a hold of which this engine has not heard
        self._leaving: set[int] = set()  # held under a hold that is over
        self._saved: dict[int, SavedStep] = {}  # the last one of each rank, for whichever wish
        self._step = 0  # after which ranks are held
        self._since: float | None = None  # all of them are
        self._inherited = 0.0  # when a wish of an engine before this one was heard
        self._requests: dict[str, _Request] = {}
        self._work: Work | None = None  # goes on
        self._worker: _Request | None = None  # it is done for
        self._lengthened = 0.0  # seconds by which the pause below it was made longer
        self._deserted = False  # a rank went on while it went on
        self._kinds: dict[str, Callable[[Asked, int], None]] = {
            "pause": self._pause,
            "resume": self._resume,
            "dump": self._dump,
        }

    def offer(self, kind: str, make: Callable[[Asked], Work], limit: float) -> None:
        """A further kind of request: `make` gives the work for one, or raises a `Refusal`; within `limit` seconds it is
        done."""
        self._kinds[kind] = lambda event, _computing: self.hold_for(event, make(event), limit)

    # ------------------------------------------------------------------------------------------- what is known

    @property
    def paused(self) -> bool:
        """All ranks are held."""
        alive = len(self._roster.alive)
        return bool(self.wish.hold) and self._roster.complete and len(self._in) == alive > 0

    @property
    def held_after(self) -> dict[int, int]:
        """Rank -> the step after which it is held."""
        return dict.fromkeys(self._in, self._step)

    @property
    def _hold_left(self) -> float:
        """Seconds until the ranks go on by themselves."""
        passed = self._desk.now - self._since if self._since is not None else 0.0
        return self.wish.limit - self._lengthened - passed

    @property
    def working(self) -> bool:
        """A work goes on."""
        return self._work is not None

    @property
    def broken(self) -> str:
        """Why everybody has to be stopped; "" otherwise."""
        return self._work.broken if self._work is not None else ""

    def as_dict(self) -> dict[str, object]:
        """For `tftctl status`: plain values."""
        return {
            "wished": bool(self.wish.hold),
            "paused": self.paused,
            "step": self._step if self.wish.hold and self._in else 0,
            "from_step": self.wish.hold_from,
            "held": len(self._in),
            "seconds": round(self._desk.now - self._since, 1) if self._since is not None else 0.0,
            "seconds_left": round(self._hold_left, 1) if self.wish.hold else 0.0,
            "requests": [
                {"kind": each.asked.kind, "who": each.asked.who, "seconds": round(self._desk.now - each.since, 1)}
                for each in self._requests.values()
            ],
        }

    # ------------------------------------------------------------------------------------------- requests

    def asked(self, event: Asked, state: State, computing: int) -> None:
        """`computing`: the step that the furthest rank is known to compute."""
        if event.id in self._requests:
            return
        self._desk.note(f"{event.who or 'an operator'} asks: {event.kind}{_words(event.args)}")
        try:
            kind = self._kinds.get(event.kind)
            if kind is None:
                raise Refusal(f"nobody knows the request {event.kind!r}; known: {', '.join(sorted(self._kinds))}")
            self._check(event, state)
            kind(event, computing)
        except (ValueError, OverflowError) as refusal:  # whatever is asked for, it must not end the engine
            self._answer(event.id, Outcome(False, str(refusal)))
        self._settle()

    def _check(self, event: Asked, state: State) -> None:
        roster = self._roster
        if state is State.STARTING:
            known = roster.world_size - len(roster.missing())
            raise Refusal(f"training has not begun: {known} of {roster.world_size} ranks have registered; ask again")
        if state in (State.EXITING, State.CLOSED):
            raise Refusal("the job is ending")
        if roster.finished:
            raise Refusal(f"training has ended on {ranks(roster.finished)}")
        if state is not State.TRAINING and event.kind != "resume":
            raise Refusal(f"an incident is being handled ({state.value}); ask again when training goes on")

    def _open(self, event: Asked, work: Work | None = None, limit: float = LIMIT) -> None:
        now = self._desk.now
        paused = self.paused and not self.wish.working
        step = self._step if self._in or self._leaving else 0
        self._requests[event.id] = _Request(event, now + event.patience, now, work, limit, paused, step)

    def _pause(self, event: Asked, computing: int) -> None:
        step, limit = int(_number(event, "step", 0, "--at-step")), _number(event, "limit", LIMIT, "--for")
        if limit <= 0:
            raise Refusal(f"--for {limit:g} s is no time; give at least a second")
        if self.paused and not self.wish.working and not event.args.get(AGAIN):
            raise Refusal(
                f"the job is paused already, after step {self._step}, for {self._hold_left:.0f} s more; resume it first"
            )
        if self._busy("pause"):
            raise Refusal("another request holds the job already; wait for it, or withdraw it with `tftctl resume`")
        if step and step < computing and not (self.wish.hold and event.args.get(AGAIN)):
            raise Refusal(f"--at-step {step}: that step is over, the job computes step {computing}; name a later one")
        self._open(event)
        if not self.wish.hold:
            self._hold(step, limit, pending=True)
            return
        # Of somebody whose controller is gone. It is his own wish as a rule, and then nothing new is told.
        joined = replace(self.wish, hold_from=step, limit=limit, working=False, pending=not self.paused)
        if joined != self.wish:
            self._tell(hold_from=step, limit=limit, working=False, pending=not self.paused)

    def _resume(self, event: Asked, _computing: int) -> None:
        if self._work is not None:
            doing = self._worker.asked.kind if self._worker is not None else "something"
            raise Refusal(f"{doing} is under way on the held ranks; wait for it")
        if not self.wish.hold and not self._leaving and not event.args.get(AGAIN):
            raise Refusal("the job is not paused")
        if not self.paused:
            for name, each in list(self._requests.items()):
                if each.asked.kind == "pause" or each.work is not None:
                    self._answer(name, Outcome(False, "withdrawn by a resume"))
        self._open(event)
        self._release()

    def _dump(self, event: Asked, _computing: int) -> None:
        if other := self._busy("dump"):
            raise Refusal(f"{'another dump' if other == 'dump' else f'a {other}'} is under way; wait for it")
        if self.paused and not self.wish.save:
            self.hold_for(event, HeldSave(self._desk))
            return
        self._open(event)
        if self.wish.save:  # of somebody whose controller is gone: this is the same wish
            return
        self._number += 1
        self._tell(save=self._number, save_from=0)

    def hold_for(self, event: Asked, work: Work, limit: float = LIMIT) -> None:
        """Have a work done for a request while all ranks are held, and released afterwards if they trained before.

        Raises:
            Refusal: another one is under way.
        """
        if self._work is not None or self._busy("pause"):
            raise Refusal("another request holds the job already; wait for it")
        self._open(event, work, limit)
        if not self.wish.hold:
            self._hold(0, limit, working=True)

    def _busy(self, kind: str) -> str:
        """What is asked for already, and does not go together with this; "": nothing."""
        found = (each for each in self._requests.values() if each.asked.kind == kind or each.work is not None)
        return next((each.asked.kind for each in found), "")

    def withdrawn(self, event: Withdrawn) -> None:
        request = self._requests.get(event.id)
        if request is not None:
            self._desk.note(f"{request.asked.kind}: {request.asked.who or 'the operator'} does not wait any more")
            self._undo(request)
            del self._requests[event.id]
            self._settle()

    def _undo(self, request: _Request) -> str:
        """What was not done yet is not to be done; how it ended, in words."""
        kind = request.asked.kind
        if self._worker is request:
            return "it is under way and goes on"
        if kind == "dump" and request.work is None and self.wish.save:
            self._tell(save=0)
            return "the wish is withdrawn"
        holds = kind == "pause" or (request.work is not None and not request.paused)
        if holds and self.wish.hold and not self.paused:
            self._release()
            return "the wish is withdrawn"
        return ""

    # ------------------------------------------------------------------------------------------- wishes

    def _tell(self, **changes: int | float) -> None:
        """A later wish, for everybody."""
        self._number += 1
        self.wish = replace(self.wish, id=self._number, **changes)  # type: ignore[arg-type]
        self._desk.put(Tell(self.wish, self._roster.told))

    def _hold(self, step: int, limit: float, working: bool = False, pending: bool = False) -> None:
        self._number += 1
        self._since = None
        self._tell(hold=self._number, hold_from=step, limit=limit, working=working, pending=pending)

    def _release(self) -> None:
        self._leaving |= self._in
        self._in, self._since, self._deserted = set(), None, False
        self._tell(hold=0, hold_from=0, limit=0.0, working=False, pending=False)

    def registered(self, event: Registered) -> None:
        """A rank may know of a wish that this engine does not, or the other way round."""
        rank, known = event.info.rank, event.wish
        if known.id > self.wish.id:
            before, self.wish, self._number = self.wish, known, max(self._number, known.id)
            self._inherited = self._desk.now
            if before.hold != known.hold:
                self._leaving |= self._in
                self._in, self._since = set(), None
            others = tuple(other for other in self._roster.told if other != rank)
            if others and (known.hold or known.save or before.hold or before.save):
                self._desk.put(Tell(known, others))
            early, self._early = self._early, {}
            for held in early.values():
                self.held(held)
        elif known.id < self.wish.id and (self.wish.hold or self.wish.save or known.hold or known.save):
            self._desk.put(Tell(self.wish, (rank,)))
        if event.held:
            self.held(Held(event.at, rank, event.held, event.held_at))
            if self._since is not None and rank in self._in:  # its time was counted before this engine was here
                self._since = min(self._since, self._desk.now - event.held_for)
        if self._work is not None:
            self._work.repeat(rank)

    # ------------------------------------------------------------------------------------------- what ranks say

    def held(self, event: Held) -> None:
        if event.rank not in self._roster.alive:
            return
        if self.wish.hold and event.hold == self.wish.hold:
            self._in.add(event.rank)
            self._leaving.discard(event.rank)
            self._step = event.step
        elif event.hold < self.wish.id:
            self._leaving.add(event.rank)
            self._desk.put(Tell(self.wish, (event.rank,)))
        else:  # agreed by ranks of which none has come to this engine yet
            self._early[event.rank] = event
        self._settle()

    def released(self, event: Released) -> None:
        self._leaving.discard(event.rank)
        self._early.pop(event.rank, None)
        if self.wish.hold and event.hold == self.wish.hold and event.rank in self._in:
            self._in.discard(event.rank)
            self._desk.note(f"rank {event.rank} was not to be held any longer: all go on", warn=True)
            self._deserted = True  # a work is not left alone by those who can end it
        self._settle()

    def saved(self, event: SavedStep) -> None:
        if event.rank in self._roster.alive:
            self._saved[event.rank] = event
        self._settle()

    @property
    def _savers(self) -> list[SavedStep]:
        """Who has saved as it is wished."""
        return [event for event in self._saved.values() if event.save == self.wish.save > 0]

    def done(self, order: Order, event: OrderDone) -> None:
        """An order to a held rank was carried out, or could not be."""
        if self._work is not None:
            self._work.done(order, event)
            self._settle()

    def left(self, rank: int) -> None:
        """It reports where it stands, so it is held no more: its word that it was may have come after the stop."""
        self._in.discard(rank)
        self._leaving.discard(rank)
        self._early.pop(rank, None)

    def gone(self, rank: int) -> None:
        """It does not take part any more."""
        self.left(rank)
        self._saved.pop(rank, None)

    # ------------------------------------------------------------------------------------------- the job goes on

    def tick(self, computing: int) -> None:
        now = self._desk.now
        if self._work is not None:
            self._work.tick()
        elif self._orphaned:
            self._desk.note("whoever wanted the job held does not ask for it again: all go on", warn=True)
            self._release()
        elif self.paused and self._hold_left <= 0:
            self._desk.note(f"paused for {self.wish.limit:g} s, as long as was asked for: all go on", warn=True)
            self._release()
        for name, request in list(self._requests.items()):
            if now >= request.until:
                self._late(name, request)
            else:
                self._tell_progress(request, computing)
        self._settle()

    @property
    def _orphaned(self) -> bool:
        """The hold is for a work that an engine before this one did, or for a pause that has not come true, and nobody
        has asked this one for it."""
        waited = self._desk.now - self._inherited >= self._deadlines.stop
        unwanted = self.wish.working or (self.wish.pending and not self._busy("pause"))
        return bool(self.wish.hold) and unwanted and waited and not (self.wish.working and self._requests)

    def _late(self, name: str, request: _Request) -> None:
        left = self._undo(request)
        text = f"not done within {request.asked.patience:g} s: {self._where(request)}{'; ' + left if left else ''}"
        self._desk.note(f"{request.asked.kind}: {text}", warn=True)
        self._answer(name, Outcome(False, text), late=True)

    def _tell_progress(self, request: _Request, computing: int) -> None:
        done = self._counted(request)
        doing = self._work.doing if self._work is not None and self._worker is request else ""
        if (done, doing) != request.said:
            request.said = (done, doing)
            where = doing or (self._where(request) if done else f"waiting for the end of step {computing}")
            self._desk.put(Progress(request.asked.id, where, done, len(self._roster.alive)))

    def _counted(self, request: _Request) -> int:
        kind = request.asked.kind
        return len(self._savers if kind == "dump" else self._leaving if kind == "resume" else self._in)

    def _where(self, request: _Request) -> str:
        alive, kind = self._roster.alive, request.asked.kind
        if kind == "dump":
            return f"{len(self._savers)} of {count(len(alive), 'rank')} have saved"
        if kind == "resume":
            return f"{count(len(self._leaving), 'rank')} held still"
        missing = alive - self._in
        late = f", {ranks(missing)} not yet" if self._in and missing else ""
        return f"{len(self._in)} of {count(len(alive), 'rank')} held{late}"

    def _settle(self) -> None:
        """Answer whatever has come true."""
        if self.paused and self._since is None:
            self._since = self._desk.now
            self._desk.note(f"all {len(self._in)} ranks are held after step {self._step}")
        if self._work is not None and (outcome := self._work.outcome) is not None:
            self._end_work(outcome)
        if self._deserted and self._work is None:
            self._release()
        for name, request in list(self._requests.items()):
            if self._is_stuck(request):
                request.work, request.paused = HeldSave(self._desk), True
                self._tell(save=0)
            if request.work is not None and self._work is None and self.paused:
                self._begin_work(request, request.work)
            elif request.work is None and (found := self._come_true(request)) is not None:
                self._answer(name, found)
        if self.wish.save and self._everybody_saved:
            self._tell(save=0)

    def _is_stuck(self, request: _Request) -> bool:
        """A dump that would be agreed in the commit of a step, and there is none while the job is paused."""
        waits = request.asked.kind == "dump" and request.work is None
        return waits and self.paused and not self.wish.working and not self._everybody_saved

    def _begin_work(self, request: _Request, work: Work) -> None:
        self._work, self._worker = work, request
        if request.paused:  # its time may end before the work does, and ranks would leave it one by one
            self._lengthened = request.limit
            self._tell(limit=self.wish.limit + request.limit)
        work.begin(tuple(sorted(self._in)), self._step)

    @property
    def _everybody_saved(self) -> bool:
        """The same step. After a fault in the middle of it, those who had saved may save another one once more."""
        savers = self._savers
        return 0 < len(savers) == len(self._roster.alive) and len({event.step for event in savers}) == 1

    def _come_true(self, request: _Request) -> Outcome | None:
        kind, now = request.asked.kind, self._desk.now
        if kind == "pause" and self.paused:
            if self.wish.pending:  # from now on it is wanted, whether or not somebody waits for anything
                self._tell(pending=False)
            text = f"paused after step {self._step} on {count(len(self._in), 'rank')}, for {self._hold_left:.0f} s"
            return Outcome(True, text, {"step": self._step, "seconds_left": round(self._hold_left, 1)})
        if kind == "resume" and not self._leaving:
            if not request.step:
                return Outcome(True, "the pause is withdrawn, before any rank was held")
            return Outcome(True, f"training goes on after step {request.step}", {"step": request.step})
        if kind == "dump" and self._everybody_saved:
            first = min(self._savers, key=lambda event: event.rank)
            if given_up := sorted({event.why for event in self._savers if event.why}):
                return Outcome(False, f"step {first.step} was not saved: {some(given_up, separator='; ')}")
            return saved(first.step, first.path, now - request.since)
        return None

    def _end_work(self, outcome: Outcome) -> None:
        request, self._work, self._worker = self._worker, None, None
        assert request is not None
        self._answer(request.asked.id, outcome)
        longer, self._lengthened = self._lengthened, 0.0
        if self.wish.hold and not request.paused:
            self._release()
        elif longer:
            self.wish = replace(self.wish, limit=self.wish.limit - longer)
            if self._hold_left > 0:
                self._tell()
            else:
                self._release()

    def _answer(self, name: str, outcome: Outcome, late: bool = False) -> None:
        self._requests.pop(name, None)
        self._desk.put(Answer(name, outcome.ok, outcome.text, outcome.data, late))

    # ------------------------------------------------------------------------------------------- incidents

    def stopped(self) -> None:
        """Everybody was stopped. What is wished stays, and is agreed again when training goes on."""
        self._in.clear()
        self._leaving.clear()
        self._early.clear()
        self._since, self._deserted = None, False
        if self._work is not None:
            self._end_work(Outcome(False, self._work.broken or "a fault came in between; look at the incident"))
        self._settle()

    def ended(self, why: str) -> None:
        """Nothing will come true any more."""
        for name in list(self._requests):
            self._answer(name, Outcome(False, f"the job has ended: {why}"))


def _number(event: Asked, name: str, default: float, flag: str) -> float:
    text = event.args.get(name, "")
    try:
        number = float(text) if text else default
    except ValueError:
        raise Refusal(f"{flag}: {text!r} is no number") from None
    if not (math.isfinite(number) and 0 <= number <= MOST):
        raise Refusal(f"{flag} {text}: that is no number that can be counted to; give one from 0 to {MOST:.0f}")
    return number


def _words(args: Mapping[str, str]) -> str:
    return "".join(f", {name} {value}" for name, value in sorted(args.items()) if value)
