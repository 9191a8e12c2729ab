"""The numbers of a job, from the events and actions that pass the controller: a pure function of that stream.

Thousands of ranks say a word each second, so a word only leaves its number in a dictionary; what is computed from them
is computed when somebody asks. Whoever asks may be another thread: dictionaries are copied before they are looked
through, which the interpreter does in one go.

What each number is called for Prometheus, its unit and its meaning: `catalogue`. docs/metrics.md shows the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.repair import MOVED, WRONG_SHARDS
from mindspeed_tft.observe.progress import Effective, Pace
from mindspeed_tft.observe.recoveries import SAVING, Recovery, Running

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)  # seconds
_CHANGED_SHARD = "has hash "  # as a rank words it, in a fault or in the answer to an order that it could not carry out


@dataclass
class Histogram:
    """Counts of seconds up to each of `BUCKETS`, the last count for longer ones."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        index = next((index for index, bound in enumerate(BUCKETS) if seconds <= bound), len(BUCKETS))
        self.counts[index] += 1
        self.sum += seconds


@dataclass(frozen=True)
class Holding:
    """How well shards are held: by how many living ranks, on how many hosts, the shard that is held worst."""

    ranks: int
    hosts: int

    @property
    def level(self) -> int:
        """What may be lost without losing a completed step. 0: nothing, a shard has no holder; 1: no rank; 2: any one
        rank; 3: any one host."""
        return 0 if self.ranks == 0 else 1 if self.ranks == 1 else 2 if self.hosts == 1 else 3


class Metrics:
    """What is known of a job that this controller leads. Times are seconds on its monotonic clock."""

    def __init__(self, world_size: int, heartbeat_lost: float, told: Callable[[Recovery], None] | None = None) -> None:
        """
        Args:
            heartbeat_lost: seconds without a heartbeat after which a rank counts as silent.
            told: is called with each incident when it is over, on the thread that hands over events.
        """
        self.world_size, self.heartbeat_lost = world_size, heartbeat_lost
        self.pace, self.effective = Pace(), Effective()
        self.step = 0  # the highest that a rank computes
        self.furthest = 0  # the last that is known to be complete
        self.epoch = 0
        self.running: Running | None = None
        self.closed = False
        self.faults: Counter[tuple[str, str]] = Counter()  # (kind, strategy)
        self.outcomes: Counter[str] = Counter()
        self.stages: dict[tuple[str, str], Histogram] = {}  # (stage, strategy)
        self.steps_lost = 0
        self.repair_bytes = self.dump_bytes = 0
        self.dump_seconds: float | None = None  # of the last dump
        self.wrong_hashes = 0
        self.infos: dict[int, t.RankInfo] = {}  # the latest process of each rank
        self.heard: dict[int, float] = {}  # of living ranks
        self.held: set[int] = set()  # ranks that wait between two steps, because operators want it
        self._told = told
        self._gone: set[int] = set()  # lost, or finished
        self._finished: set[int] = set()
        self._bare: set[int] = set()  # living, without the state of their rank so far
        self._membership = 0  # grows with every change of who holds what
        self._holding: tuple[int, Holding] | None = None
        # By type; what is not here says nothing that counts. Orders come by the ten thousand, and are not here.
        self.events: dict[type, Callable[[Any], None]] = {
            t.Heartbeat: self._on_heartbeat,
            t.Registered: self._on_registered,
            t.RankLost: self._on_lost,
            t.RankFinished: self._on_finished,
            t.FaultSeen: self._on_fault,
            t.Reported: self._on_reported,
            t.OrderDone: self._on_done,
            t.Held: self._on_held,
            t.Released: self._on_released,
        }
        self.actions: dict[type, Callable[[Any, float], None]] = {
            t.Note: self._do_note,
            t.Stop: self._do_stop,
            t.Kill: self._do_kill,
            t.Recovered: self._do_recovered,
            t.Closed: self._do_closed,
        }

    def event(self, event: t.Event) -> None:
        """Something happened."""
        handler = self.events.get(type(event))
        if handler is not None:
            handler(event)

    def action(self, action: t.Action, at: float) -> None:
        """The engine answered."""
        handler = self.actions.get(type(action))
        if handler is not None:
            handler(action, at)

    # ------------------------------------------------------------------------------------------------ what is known

    def alive(self) -> list[int]:
        """Ranks whose process lives, as far as is known."""
        return [rank for rank in dict(self.infos) if rank not in self._gone]

    def silent(self, now: float) -> int:
        """Living ranks of which nothing was heard for `heartbeat_lost`."""
        return sum(now - at > self.heartbeat_lost for at in dict(self.heard).values())

    def protected(self, now: float) -> bool:
        """All ranks are known, this controller hears those that live, and the job goes on. Of a controller before this
        one it knows ranks that it may never hear."""
        if self.closed or len(self.infos) < self.world_size or self.silent(now):
            return False
        return all(rank in self.heard for rank in self.alive())

    def paused(self) -> bool:
        """Operators have all living ranks wait."""
        return bool(self.held) and len(self.held) == len(self.alive())

    def holding(self) -> Holding:
        """Of the shard that is held worst; a newcomer without state holds none."""
        known, version = self._holding, self._membership
        if known is not None and known[0] == version:
            return known[1]
        infos = dict(self.infos)
        out = self._gone | self._bare
        ranks: Counter[str] = Counter()
        hosts: dict[str, set[str]] = {}
        for rank, info in infos.items():
            for shard in info.holds:
                ranks[shard] += rank not in out
                where = hosts.setdefault(shard, set())
                if rank not in out:
                    where.add(info.host)
        found = Holding(min(ranks.values(), default=0), min(map(len, hosts.values()), default=0))
        self._holding = (version, found)
        return found

    def ages(self, now: float) -> dict[str, float]:
        """Seconds since the rank that was heard longest ago was heard, by host; of living ranks."""
        infos, found = dict(self.infos), dict[str, float]()
        for rank, at in dict(self.heard).items():
            info = infos.get(rank)
            if info is not None:
                found[info.host] = max(found.get(info.host, 0.0), now - at)
        return found

    # ------------------------------------------------------------------------------------------------ events

    def _on_heartbeat(self, event: t.Heartbeat) -> None:
        rank, step = event.rank, event.step
        if rank in self._gone:
            return
        self.heard[rank] = event.at
        if step <= 0 or self.running is not None:
            return
        self.pace.heard(rank, step, event.at)
        if self.effective.began is None:
            self.effective.begin(step - 1, event.at)
            if self.held:  # since before this controller led
                self.effective.pause(event.at)
        if step > self.step:
            self.step = step
            if step - 1 > self.furthest:
                self.furthest = step - 1
                self.effective.completed(step - 1, event.at)

    def _on_registered(self, event: t.Registered) -> None:
        info = event.info
        if info.rank >= self.world_size or info.rank in self._finished:
            return
        old = self.infos.get(info.rank)
        another = old is not None and (old.host, old.pid) != (info.host, info.pid)
        if another and self.running is not None:
            self.running.replaced(info.rank)
        if another or info.rank in self._gone:
            self.pace.forget(info.rank)
            self.heard[info.rank] = event.at
        if event.bare:
            self._bare.add(info.rank)
        self.infos[info.rank] = info
        self._gone.discard(info.rank)
        self._membership += 1
        if event.held:
            self._hold(info.rank, event.held_at, event.at)

    def _on_lost(self, event: t.RankLost) -> None:
        rank, info = event.rank, self.infos.get(event.rank)
        if rank in self._gone or self.closed or (info is not None and event.pid and event.pid != info.pid):
            return
        heard = self._leave(rank)
        if self.running is None or not self.running.leaving:
            self._open(event.at).fault(rank, "lost", event.at, heard)

    def _on_finished(self, event: t.RankFinished) -> None:
        self._finished.add(event.rank)
        self._leave(event.rank)

    def _on_fault(self, event: t.FaultSeen) -> None:
        if self.closed or event.rank in self._gone:
            return
        running = self._open(event.at)
        if event.own and not running.leaving:
            running.fault(event.rank, event.kind, event.at, self.heard.get(event.rank))
        if event.own and _CHANGED_SHARD in event.message:
            self.wrong_hashes += 1

    def _on_reported(self, event: t.Reported) -> None:
        if self.running is not None:
            self.running.report(event.report)

    def _on_done(self, event: t.OrderDone) -> None:
        result = event.result
        if "files" in result:  # a part of a dump was written
            self.dump_bytes += _number(result.get("bytes", ""))
        elif "taken" in result:  # transfers of a repair, given or taken
            self.repair_bytes += sum(_sent(event.rank, key, value) for key, value in result.items())
        if not event.ok and _CHANGED_SHARD in event.message:
            self.wrong_hashes += 1

    def _on_held(self, event: t.Held) -> None:
        if event.rank not in self._gone:
            self._hold(event.rank, event.step, event.at)

    def _hold(self, rank: int, step: int, at: float) -> None:
        if not self.held and self.running is None:
            self.furthest = max(self.furthest, step)
            self.effective.completed(step, at)
            self.effective.pause(at)
        self.held.add(rank)

    def _on_released(self, event: t.Released) -> None:
        self.held.discard(event.rank)
        if not self.held and self.running is None:
            self.effective.resume(event.at)
            self.pace.begin()

    def _leave(self, rank: int) -> float | None:
        """When it was heard last."""
        self._gone.add(rank)
        self.held.discard(rank)
        self._bare.discard(rank)
        self.pace.forget(rank)
        self._membership += 1
        return self.heard.pop(rank, None)

    # ------------------------------------------------------------------------------------------------ actions

    def _do_note(self, note: t.Note, at: float) -> None:
        if self.running is not None:
            self.running.note(note.stage, at)
        if note.text.startswith(WRONG_SHARDS):
            self.wrong_hashes += 1

    def _do_stop(self, stop: t.Stop, at: float) -> None:
        self.epoch = max(self.epoch, stop.epoch)
        self.held.clear()  # they leave the hold to be repaired, and may come back to it
        self._open(at).stop(stop)

    def _do_kill(self, kill: t.Kill, at: float) -> None:
        self._open(at).killed(kill.rank)

    def _do_recovered(self, recovered: t.Recovered, at: float) -> None:
        self._over(recovered.outcome, recovered.step, recovered.summary, at, trains=True)
        self.epoch = max(self.epoch, recovered.epoch)
        self._bare.clear()
        self._membership += 1
        self.pace.begin()

    def _do_closed(self, closed: t.Closed, at: float) -> None:
        if closed.outcome != "finished":
            self._over(closed.outcome, closed.step, closed.summary, at, trains=False)
        else:
            self.effective.broken(at)
            self.effective.ended = at
        self.closed = True

    def _open(self, at: float) -> Running:
        if self.running is None:
            self.running = Running(at)
            self.effective.broken(at)
        return self.running

    def _over(self, outcome: str, step: int, summary: str, at: float, trains: bool) -> None:
        if self.closed:
            return  # a second word corrects the text of the first
        running = self._open(at)
        self.furthest = max(self.furthest, running.furthest)
        self.effective.completed(self.furthest, at)
        found = running.end(outcome, step, self.furthest, summary, at)
        self.effective.over(step, running.opened, at, trains)
        self.running = None
        self.outcomes[outcome] += 1
        for kind, ranks in found.faults.items():
            self.faults[kind, found.strategy] += ranks
        seconds = found.seconds()
        for stage, spent in seconds.items():
            self.stages.setdefault((stage, found.strategy), Histogram()).observe(spent)
        if found.strategy == "dump":
            self.dump_seconds = sum(seconds.get(stage, 0.0) for stage in SAVING)
        self.steps_lost += found.lost or 0
        if step >= 0:
            self.step, self.furthest = step + 1 if trains else step, step
        if self._told is not None:
            self._told(found)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _sent(rank: int, key: str, value: str) -> int:
    """Bytes that this rank gave away in one transfer. Its other end tells of the same bytes, and is not counted."""
    if not key.startswith(MOVED):
        return 0
    words = key.removeprefix(MOVED).split("|")
    return _number(value.split()[0]) if len(words) == 3 and words[1] == str(rank) and value else 0
