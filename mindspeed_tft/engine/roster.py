"""Who takes part in the job and what became of each rank. Keeps books; decides nothing.

A rank is *alive* while the process that registered for it, with the training state in its memory, is believed to run.
A process that registers for a rank whose first process is gone is a *newcomer*: it holds no state. It is
told to stop, and to leave unless it is adopted.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from mindspeed_tft.engine.types import RankInfo


class Arrival(Enum):
    """What a registration means."""

    OUTSIDE = "outside"  # no rank of this job
    FIRST = "first"
    AGAIN = "again"  # the same process, after a reconnect
    NEWCOMER = "newcomer"  # another process in the place of one that is gone or must be


class Roster:
    """Membership of one job of fixed size."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.infos: dict[int, RankInfo] = {}  # by rank, of the process that holds the training state
        self.alive: set[int] = set()
        self.newcomers: dict[int, RankInfo] = {}
        self.lost: dict[int, str] = {}
        self.finished: set[int] = set()
        self._heard: OrderedDict[int, float] = OrderedDict()  # rank -> last sign of life, oldest first
        self._quiet: set[int] = set()
        self._known: set[int] = set()  # registered, lost or finished

    def __contains__(self, rank: int) -> bool:
        return 0 <= rank < self.world_size

    @property
    def complete(self) -> bool:
        """Every rank of the job has registered at some time."""
        return len(self.infos) == self.world_size

    @property
    def accounted(self) -> bool:
        """Nobody is left who might still register for the first time."""
        return len(self._known) == self.world_size

    @property
    def told(self) -> tuple[int, ...]:
        """Ranks with a process that can be told something."""
        return tuple(sorted(self.alive | self.newcomers.keys()))

    def missing(self) -> list[int]:
        """Ranks of which nothing was heard yet."""
        return [rank for rank in range(self.world_size) if rank not in self._known]

    def classify(self, info: RankInfo) -> Arrival:
        """What this registration would mean, without entering it."""
        rank = info.rank
        if rank not in self:
            return Arrival.OUTSIDE
        known = self.newcomers.get(rank) or self.infos.get(rank)
        if known is None:
            return Arrival.NEWCOMER if rank in self.lost else Arrival.FIRST
        same = (known.host, known.pid) == (info.host, info.pid)
        gone = rank in self.lost and rank not in self.newcomers  # a lost process does not come back
        return Arrival.AGAIN if same and not gone else Arrival.NEWCOMER

    def enter(self, info: RankInfo, arrival: Arrival, now: float) -> None:
        self._known.add(info.rank)
        if arrival is Arrival.NEWCOMER:
            self.newcomers[info.rank] = info
        elif arrival is Arrival.FIRST or info.rank in self.alive:
            self.infos[info.rank] = info
            if info.rank not in self.finished:
                self.alive.add(info.rank)
                self.hear(info.rank, now)

    def adopt(self, rank: int, now: float) -> None:
        """The newcomer takes the place of the lost process."""
        del self.lost[rank]
        self.infos[rank] = self.newcomers.pop(rank)
        self.alive.add(rank)
        self.hear(rank, now)

    def lose(self, rank: int, message: str) -> None:
        self.lost[rank] = message
        self._forget(rank)

    def finish(self, rank: int) -> None:
        self.finished.add(rank)
        self._forget(rank)

    def process_of(self, rank: int) -> RankInfo | None:
        """The latest process of a rank, alive or not."""
        return self.newcomers.get(rank) or self.infos.get(rank)

    def hear(self, rank: int, now: float) -> bool:
        """Book a sign of life; True when the rank had been quiet."""
        self._heard[rank] = now
        self._heard.move_to_end(rank)
        if rank in self._quiet:
            self._quiet.discard(rank)
            return True
        return False

    def last_heard(self, rank: int) -> float | None:
        return self._heard.get(rank)

    def newly_quiet(self, before: float) -> list[int]:
        """Ranks not heard since `before`, each named once per silence. Looks only at those and one more."""
        found: list[int] = []
        for rank, at in self._heard.items():
            if at >= before:
                break
            if rank not in self._quiet:
                found.append(rank)
        self._quiet.update(found)
        return sorted(found)

    def _forget(self, rank: int) -> None:
        self._known.add(rank)
        self.alive.discard(rank)
        self._heard.pop(rank, None)
        self._quiet.discard(rank)
