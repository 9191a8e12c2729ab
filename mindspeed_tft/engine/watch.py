"""The watch for hangs: whose process lives, but does not move any more, so that all others wait for it?

Two signs. A *mute* rank is one of which its relay hears nothing: its process is stopped, or a native call holds the
interpreter's lock. A *stuck* rank beats, but neither it nor the job has moved for longer than steps take, and it is not
waiting while others are. A false alarm ends a healthy process, so every doubt speaks for the rank (`docs/hangs.md`).

Whoever is found is looked at by its relay first, which keeps its stacks and may object. What happens to the job then is
`stops`' affair.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindspeed_tft.engine.desk import Desk
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.types import Deadlines, Examine, Examined, Heartbeat, RankQuiet
from mindspeed_tft.engine.words import ranks, some

STEPPING = frozenset({"forward-backward", "commit", "update", "param-gather"})  # elsewhere work may take any time
WARM_UP = 10  # steps after training began (again): compilation, caches, the first batches
COLD = 2  # of these, so many say nothing about how long a step takes
WINDOW = 300  # steps by which the others are judged
FACTOR = 3.0  # times the 99th percentile of the step time
LAST = 3  # steps that count however rare they are, since steps may become longer for good
LONG = 4.0  # times the limit: where there is an innocent explanation that ends by itself
BUSY = 12.0  # times the limit: where something still moves
BEATS = 4  # heartbeat periods for which a word is news


@dataclass
class Seen:
    """What a rank's last heartbeat said."""

    step: int
    phase: str
    waiting: bool
    pulse: int
    at: float
    moved: float  # since when it has said nothing else

    @property
    def where(self) -> str:
        return f"in {self.phase} of step {self.step}"


@dataclass(frozen=True)
class Hang:
    """A process that is to be killed."""

    rank: int
    pid: int
    message: str


@dataclass(frozen=True)
class Deadlock:
    """All ranks that are heard wait: a message was lost, or a host. No process is to blame that could be ended."""

    message: str


class Inquest:
    """A closer look at some ranks, by their relays. Who is not answered for, or is spared, is no victim."""

    def __init__(self, desk: Desk, roster: Roster, reasons: Mapping[int, str], patience: float) -> None:
        """`reasons`: rank -> why it is suspected, for the user; `patience`: seconds until the relays have answered."""
        self.began = desk.now
        self.reasons = dict(reasons)
        self.answers: dict[int, Examined] = {}
        self._desk, self._roster, self._until = desk, roster, desk.now + patience
        for rank in sorted(reasons):
            desk.put(Examine(rank))

    def answer(self, event: Examined) -> None:
        process = self._roster.process_of(event.rank)
        if event.rank in self.reasons and process is not None and process.pid == event.pid:
            self.answers[event.rank] = event

    @property
    def over(self) -> bool:
        return self.answers.keys() >= self.reasons.keys() or self._desk.now >= self._until

    def spared(self) -> dict[int, str]:
        """Ranks that must be left alone, and why."""
        why = {rank: answer.spare for rank, answer in sorted(self.answers.items()) if answer.spare}
        silent = dict.fromkeys(self.reasons.keys() - self.answers.keys(), "its host does not answer")
        return why | silent

    def victims(self) -> list[Hang]:
        return [
            Hang(rank, answer.pid, f"{self.reasons[rank]}; {_stacks(answer)}")
            for rank, answer in sorted(self.answers.items())
            if rank in self.reasons and not answer.spare
        ]


def _stacks(answer: Examined) -> str:
    return f"stacks in {answer.stacks}" if answer.stacks else f"no stacks ({answer.message or 'no reason given'})"


class Watch:
    """Looks at a job in training. Nothing here costs more in a larger job, until the job stands still."""

    def __init__(self, desk: Desk, roster: Roster, deadlines: Deadlines) -> None:
        self._desk, self._roster, self._deadlines = desk, roster, deadlines
        self._seen: dict[int, Seen] = {}
        self._quiet: dict[int, RankQuiet] = {}
        self._times: deque[float] = deque(maxlen=WINDOW)  # seconds that each of the last steps took
        self._looked: float | None = None  # last time
        self._spared: dict[int, float] = {}  # ranks that are left alone until then, or until they move
        self.begin()

    # ------------------------------------------------------------------------------------------------ what is heard

    def begin(self) -> None:
        """Training begins, or goes on after a repair, perhaps from an earlier step."""
        self._seen.clear()
        self._quiet.clear()
        self._spared.clear()
        self._since = self._progress = self._desk.now  # before it nothing counts; when the job moved last
        self._front: tuple[int, float] | None = None  # the furthest step heard of, and when
        self._rested = False  # a rank was heard twice in the same pause between steps: no step takes that long
        self._steps = 0
        self._warned = False
        self._first: tuple[object, float] | None = None  # what the first look found, and when
        self._inquest: Inquest | None = None

    def heard(self, event: Heartbeat) -> None:
        """A rank is alive and says where it is."""
        rank, now, old = event.rank, self._desk.now, self._seen.get(event.rank)
        self._quiet.pop(rank, None)
        same = old is not None and (old.step, old.phase) == (event.step, event.phase)
        if not same:
            self._progress, self._warned = now, False
        elif event.phase not in STEPPING:
            self._rested = True
        still = old is not None and same and (old.waiting, old.pulse) == (event.waiting, event.pulse)
        moved = old.moved if old is not None and still else now
        self._seen[rank] = Seen(event.step, event.phase, event.waiting, event.pulse, now, moved)
        if moved == now and self._spared.pop(rank, None) is not None:
            self._progress = now  # it was held, and shall have its time from now on
        self._time_steps(event.step)

    def quiet(self, event: RankQuiet) -> None:
        """Its relay misses a rank."""
        if event.rank in self._roster.alive:
            self._quiet[event.rank] = replace(event, at=self._desk.now)

    def examined(self, event: Examined) -> None:
        if self._inquest is not None:
            self._inquest.answer(event)

    def _time_steps(self, step: int) -> None:
        """Steps that pass between two heartbeats share the time."""
        now = self._desk.now
        if self._front is None:
            self._front = step, now
        elif step > self._front[0]:
            count = step - self._front[0]
            self._steps += count
            if self._steps > COLD and not self._rested:
                self._times.extend([(now - self._front[1]) / count] * min(count, WINDOW))
            self._front, self._rested = (step, now), False

    # ------------------------------------------------------------------------------------------------ the limit

    @property
    def limit(self) -> float | None:
        """Seconds without progress that no healthy step takes; None while that is not known."""
        shortest = self._deadlines.hang
        if shortest <= 0:
            return None
        if self._deadlines.hang_fixed:
            return shortest
        if self._steps < WARM_UP or not self._times:
            return None
        ordered = sorted(self._times)
        usual = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return max(shortest, FACTOR * max(usual, *list(self._times)[-LAST:]))

    @property
    def step_seconds(self) -> float:
        """Seconds that a step takes, the median of the last ones; 0 while that is not known."""
        ordered = sorted(self._times)
        return ordered[len(ordered) // 2] if ordered else 0.0

    @property
    def _standing(self) -> float:
        """Seconds since the job moved last."""
        return self._desk.now - max(self._progress, self._since)

    # ------------------------------------------------------------------------------------------------ the verdict

    def look(self) -> list[Hang] | Deadlock | None:
        """With each tick of a job in training. Hangs are told once: their processes are to be ended."""
        if self._deadlines.hang <= 0:
            return None
        last, self._looked = self._looked, self._desk.at
        if last is not None and abs(self._desk.at - last) > self._deadlines.heartbeat_lost / 2:
            self._since, self._first = self._desk.now, None  # nobody looked: what was heard in between came all at once
        if self._inquest is not None:
            return self._conclude(self._inquest)
        found = self._mute() or self._stuck()
        if not self._confirmed(found):
            return None
        if isinstance(found, Deadlock):
            self._first = None
            return found
        self._desk.note(some(f"rank {rank} seems to hang: {why}" for rank, why in sorted(found.items())), warn=True)
        self._inquest = Inquest(self._desk, self._roster, found, self._deadlines.heartbeat_lost)
        return None

    def _confirmed(self, found: dict[int, str] | Deadlock) -> bool:
        """The same was found by a look at least one heartbeat ago, and by all since."""
        key = None if not found else "deadlock" if isinstance(found, Deadlock) else frozenset(found)
        if key is None or self._first is None or self._first[0] != key:
            self._first = None if key is None else (key, self._desk.now)
            return False
        return self._desk.now - self._first[1] >= self._deadlines.heartbeat

    def _conclude(self, inquest: Inquest) -> list[Hang] | None:
        for rank in [rank for rank in inquest.reasons if self._moves(rank, inquest.began)]:
            del inquest.reasons[rank]
            self._desk.note(f"rank {rank} moves again")
        if inquest.reasons and not inquest.over:
            return None
        self._inquest = self._first = None
        for rank, why in inquest.spared().items():
            if rank in inquest.reasons:
                self._desk.note(f"rank {rank} seems to hang and is left alone: {why}", warn=True)
                self._spared[rank] = self._desk.now + BUSY * self._deadlines.heartbeat_lost
        return inquest.victims() or None

    def _is_spared(self, rank: int) -> bool:
        return self._desk.now < self._spared.get(rank, -math.inf)

    def _moves(self, rank: int, since: float) -> bool:
        seen, gone = self._seen.get(rank), rank not in self._roster.alive
        return gone or (rank not in self._quiet and seen is not None and seen.moved > since)

    # ------------------------------------------------------------------------------------------------ mute

    def _mute(self) -> dict[int, str]:
        """Ranks whose relays have missed them for too long. Nobody, if it is everybody: then the job was suspended."""
        if not self._quiet:
            return {}
        news = self._desk.now - BEATS * self._deadlines.heartbeat
        alive = self._roster.alive
        quiet = {rank: word for rank, word in self._quiet.items() if rank in alive and word.at >= news}
        if len(quiet) == len(alive) and not self._roster.finished:
            if all(word.seconds >= self._deadlines.heartbeat_lost for word in quiet.values()):
                self._warn(f"no rank is heard any more: {ranks(quiet)}")
            return {}
        return {
            rank: self._describe_mute(rank, word)
            for rank, word in quiet.items()
            if not self._is_spared(rank) and word.seconds >= self._patience_with(rank, word.state)
        }

    def _patience_with(self, rank: int, state: str) -> float:
        """Seconds for which a rank may say nothing. Stopped is stopped; other silence may be work in native code."""
        limit, seen = self.limit, self._seen.get(rank)
        shortest = self._deadlines.hang if limit is None else limit
        if state == "T":
            return shortest
        least = max(self._deadlines.heartbeat_lost, shortest)
        if limit is None or state == "t":
            return math.inf
        if state == "D":
            return BUSY * least
        return least if seen is not None and seen.phase in STEPPING else LONG * least

    def _describe_mute(self, rank: int, word: RankQuiet) -> str:
        seen = self._seen.get(rank)
        what = "its process is stopped (state T)" if word.state == "T" else "its process lives and does not speak"
        return f"no sign of life for {word.seconds:.1f} s{' ' + seen.where if seen is not None else ''}, {what}"

    # ------------------------------------------------------------------------------------------------ stuck

    def _stuck(self) -> dict[int, str] | Deadlock:
        """Ranks for which others wait, and which have not moved for longer than a step takes."""
        limit, standing = self.limit, self._standing
        if limit is None or standing < limit:
            return {}
        here = {rank: self._seen[rank] for rank in self._roster.alive if rank in self._seen}
        news = self._desk.now - BEATS * self._deadlines.heartbeat
        if len(here) < len(self._roster.alive) or any(seen.at < news for seen in here.values()):
            return self._cut_off(here)  # somebody is not heard, for whom all others may wait
        if any(seen.phase not in STEPPING and not seen.waiting for seen in here.values()):
            return {}  # it evaluates or saves, which takes as long as it takes
        working = {rank: seen for rank, seen in here.items() if not seen.waiting}
        if not working:
            return self._deadlock(here, limit)
        if len(working) == len(here):
            if standing >= LONG * limit:
                self._warn(f"no progress for {standing:.0f} s, but no rank waits for another one: a long step?")
            return {}
        return {
            rank: f"no progress for {standing:.1f} s {seen.where}"
            for rank, seen in working.items()
            if not self._is_spared(rank) and (self._rests(seen) >= limit or standing >= BUSY * limit)
        }

    def _cut_off(self, here: Mapping[int, Seen]) -> dict[int, str] | Deadlock:
        """Ranks that nobody hears, nor their relays, while all others wait in a step: a host that lost its power closes
        no connection. One that is merely cut off from the controller trains on, and so do the others."""
        before = self._desk.now - self._deadlines.heartbeat_lost
        gone = {rank for rank in self._roster.alive if rank not in here or here[rank].at < before}
        left = {rank: seen for rank, seen in here.items() if rank not in gone}
        if not gone or not left or gone & self._quiet.keys():
            return {}
        if any(seen.phase not in STEPPING or not seen.waiting or seen.at < before for seen in left.values()):
            return {}
        standing = f"no progress for {self._standing:.1f} s"
        return Deadlock(f"{standing}: all wait, and {ranks(gone)} cannot be heard, nor can whoever watches them")

    def _rests(self, seen: Seen) -> float:
        return self._desk.now - max(seen.moved, self._since)

    def _deadlock(self, here: Mapping[int, Seen], limit: float) -> dict[int, str] | Deadlock:
        """Networks stand still for a while and go on: this takes longer to be believed."""
        if any(seen.phase not in STEPPING or self._rests(seen) < LONG * limit for seen in here.values()):
            return {}
        first = min(here.values(), key=lambda seen: seen.step)
        return Deadlock(f"each waits for another one, no progress for {self._standing:.1f} s {first.where}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._desk.note(text, warn=True)
