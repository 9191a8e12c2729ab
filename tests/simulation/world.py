"""What surrounds the simulated ranks: their collectives, the orders that they carry out together, their connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mindspeed_tft.engine.types import Event, Order, OrderKind

from .disk import Disk
from .layout import Scenario

if TYPE_CHECKING:
    from .job import SimRank


class Job(Protocol):
    """The world around a rank."""

    scenario: Scenario
    disk: Disk
    ranks: list[SimRank]

    flips_aged: bool  # a bit flipped, and the hash that was taken next is that of the flipped shard
    watched: set[str]  # points of a step where a fault is waiting
    notices: set[int]  # holds of which some rank has told the others that they are over

    def after(self, seconds: float, action: Callable[[], None]) -> None: ...
    def then(self, rank: SimRank, seconds: float, action: Callable[[], None]) -> None: ...
    def jitter(self, most: float) -> float: ...
    def coin(self, chance: float) -> bool: ...
    def reach(self, rank: SimRank, point: str) -> None: ...
    def say(self, rank: SimRank, event: Event) -> None: ...
    def collective(self, rank: SimRank, name: str) -> Collective: ...
    def died(self, rank: SimRank, message: str) -> None: ...
    def meeting(self, rank: SimRank, order: Order) -> Meeting: ...
    def resumed(self, rank: SimRank, step: int) -> None: ...
    def committed(self, step: int) -> None: ...
    def holds(self, rank: SimRank) -> None: ...
    def spoiled(self, fault: str, since: int) -> None: ...
    def violation(self, text: str) -> None: ...


@dataclass
class Collective:
    """One collective call. Everybody's arrival is needed; who gets out of a torn one is chance."""

    job: Job
    name: str
    members: int
    arrived: list[SimRank] = field(default_factory=list)
    torn: bool = False
    offers: list[tuple[int, int, int]] = field(default_factory=list)  # of a commit: what ranks know to be wanted
    votes: list[bool] = field(default_factory=list)  # on whether to be held

    def arrive(self, rank: SimRank) -> None:
        self.arrived.append(rank)
        if len(self.arrived) == self.members:
            for member in self.arrived:
                self.job.after(self.job.jitter(0.01), lambda member=member: self._let_out(member))

    def _let_out(self, rank: SimRank) -> None:
        if rank.inside is self and not rank.frozen and not (self.torn and self.job.coin(0.5)):
            rank.inside = None
            if self.offers:
                hold, save, limit = (max(numbers) for numbers in zip(*self.offers, strict=True))
                rank.agreed = hold, save, limit
            rank.released(self.name)

    def tear(self) -> None:
        """A member that had arrived died or left. The others notice, or hang."""
        if self.torn:
            return
        self.torn = True
        for rank in self.arrived:
            if rank.inside is self and self.job.coin(self.job.scenario.weather.peer_errors):
                self.job.after(self.job.jitter(0.2), lambda rank=rank: rank.peer_lost(self))


# carried out with others, or not at all
TOGETHER = (OrderKind.REGROUP, OrderKind.REPAIR, OrderKind.ROLLBACK, OrderKind.LOAD)
REPAIRING = (*TOGETHER, OrderKind.RESUME)  # a fault of the rank's own ends these


@dataclass
class Meeting:
    """An order that several ranks carry out together: nobody ends it before all have come."""

    job: Job
    members: int
    arrived: list[tuple[SimRank, Callable[[], None]]] = field(default_factory=list)

    def arrive(self, rank: SimRank, go_on: Callable[[], None]) -> None:
        self.arrived.append((rank, go_on))
        if len(self.arrived) == self.members:
            for _, then in self.arrived:
                self.job.after(self.job.jitter(0.1), then)


@dataclass
class Link:
    """The connection of a rank: what is in flight when it breaks is said again by the rank, and lost downwards."""

    number: int = 0
    up: bool = True
    unsaid: list[Event] = field(default_factory=list)
    said: list[Event] = field(default_factory=list)  # since training went on last: told again to another engine
    clear_up: float = 0.0  # messages keep their order: not before this time
    clear_down: float = 0.0
