"""The simulated job: who is who, what may go wrong, and how long things may take. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_tft.engine.types import Deadlines, RankInfo
from mindspeed_tft.replica.holders import holders, shard_of

DEADLINES = Deadlines(heartbeat=1.0, heartbeat_lost=5.0, stop=10.0, order=8.0, dump=45.0, exit=5.0, reboot=20.0)
TICK = 0.2
JUMP = 3600.0  # seconds
SUSPENDED = 40.0  # seconds, longer than every deadline but that of a whole dump

# Where a fault can strike, in the order of a step and of a dump. "update@2" is the update of the second step.
STEP_POINTS = ("compute", "reduce", "clip", "entering", "commit", "passed", "update", "updated", "gather", "between")
ORDER_KINDS = ("finish_update", "stage_shards", "write_part", "publish")
DUMP_POINTS = tuple(f"{when}:{kind}" for kind in ORDER_KINDS for when in ("order", "done"))
RECOVERY_POINTS = ("stopping", "reported", *DUMP_POINTS)

HANGS = ("freeze", "hold", "stick")  # stopped; a native call with the interpreter's lock; a call that never returns
HANGING_POINTS = tuple(point for point in STEP_POINTS if point != "between")  # there, work may take any time
CLOCK_FAULTS = ("ahead", "back", "suspend")  # the engine's clock jumps; the engine's process is stopped for a while
FIRST_FAULTS = ("kill", "kill_host", "raise", "memory", "terminate")
REBOOT_FAULTS = ("kill", "kill_host", "raise")  # the process does not survive them
LATER_FAULTS = ("kill", "kill", "kill_host", "fail", "hang", "slow", "cut", "memory")


SPOILING_FAULTS = ("precision", "corrupted")  # the last update may have spread wrong numbers
REWIND_KINDS = ("regroup", "repair", "load", "resume")
REWIND_POINTS = tuple(f"{when}:{kind}" for kind in REWIND_KINDS for when in ("order", "done"))

REPAIR_KINDS = ("finish_update", "regroup", "repair", "rollback", "resume")
REPAIR_POINTS = tuple(f"{when}:{kind}" for kind in REPAIR_KINDS for when in ("order", "done"))
REPAIRABLE_FAULTS = ("memory", "link", "flap")  # flap: a torn connection, and nobody knows whose fault it is


@dataclass(frozen=True)
class Fault:
    """`what` happens to the `count`-th rank that comes to `point`, `delay` seconds after it came there."""

    what: str
    point: str
    count: int = 1
    delay: float = 0.0


@dataclass(frozen=True)
class Layout:
    """`parts` model parts with `d` data-parallel ranks each and `n` replicas (1: none), `per_host` ranks on a host.

    With `experts` above 1 the data-parallel ranks of a part are divided among so many groups of experts: each group is
    a part of its own, with shards of its own, whose checkpoint file also holds the dense shards that all of them share.
    """

    parts: int
    d: int
    n: int
    per_host: int
    common: bool = False  # one more shard per part that all its ranks hold
    experts: int = 1

    @property
    def world_size(self) -> int:
        return self.parts * self.d

    def infos(self) -> list[RankInfo]:
        return [self._info(rank) for rank in range(self.world_size)]

    def holders(self) -> Mapping[str, list[int]]:
        """Shard -> ranks, by the arithmetic and not by what ranks say."""
        found: dict[str, list[int]] = {}
        for part in range(self.parts):
            for shard, positions in enumerate(self._positions()):
                found[f"p{part}/dense/{shard}"] = [position * self.parts + part for position in positions]
            if self.common:
                found[f"p{part}/common/0"] = [position * self.parts + part for position in range(self.d)]
            for group in range(self.experts) if self.experts > 1 else ():
                for shard in range(self.d // self.experts // self.n):
                    positions = range(shard, self.d // self.experts, self.d // self.experts // self.n)
                    ranks = [(position * self.experts + group) * self.parts + part for position in positions]
                    found[f"p{part}-e{group}/expert/{shard}"] = ranks
        return found

    def files(self) -> Mapping[str, set[str]]:
        """Part -> the shards that its checkpoint file must hold, by the arithmetic."""
        found: dict[str, set[str]] = {}
        for shard in self.holders():
            owner = shard.split("/")[0]
            dense = [f"{owner}-e{group}" for group in range(self.experts)] if self.experts > 1 else [owner]
            for part in [owner] if "-e" in owner else dense:
                found.setdefault(part, set()).add(shard)
        return found

    def column(self, rank: int) -> int:
        """Ranks of one column reduce gradients together."""
        return rank % self.parts

    def _positions(self) -> Sequence[Sequence[int]]:
        return holders(self.d, self.n) if self.n > 1 else [[position] for position in range(self.d)]

    def _info(self, rank: int) -> RankInfo:
        dp_rank, part = divmod(rank, self.parts)
        holds = (f"p{part}/dense/{shard_of(dp_rank, self.d, self.n) if self.n > 1 else dp_rank}",)
        if self.common:
            holds += (f"p{part}/common/0",)
        host, name, needs = f"host{rank // self.per_host}", f"p{part}", ()
        if self.experts > 1:
            among, group = divmod(dp_rank, self.experts)
            name, dp_rank = f"p{part}-e{group}", among
            holds += (f"{name}/expert/{shard_of(among, self.d // self.experts, self.n)}",)
            needs = self._needs(part, group)
        return RankInfo(rank, host, 1000 + rank, name, dp_rank, holds, needs)

    def _needs(self, part: int, group: int) -> tuple[str, ...]:
        dense = [f"p{part}/dense/{shard}" for shard in range(self.d // self.n)]
        experts = [f"p{part}-e{group}/expert/{shard}" for shard in range(self.d // self.experts // self.n)]
        return (*dense, *([f"p{part}/common/0"] if self.common else []), *experts)


@dataclass(frozen=True)
class Weather:
    """What the network does. Messages of one connection arrive in order unless `reorder`. `only`: it befalls messages
    of this kind alone (the name of an event, "Stop", or an order)."""

    duplicate: float = 0.0
    reorder: bool = False
    loss: float = 0.0
    delay: float = 0.02
    peer_errors: float = 0.5  # how likely a rank notices a lost peer by itself
    only: str = ""


@dataclass(frozen=True)
class Request:
    """An operator asks for something at a time, in seconds; "withdraw": he does not wait for the one before."""

    at: float
    kind: str
    args: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """What starts dead processes again, each within a few seconds but for these chances."""

    never: float = 0.0
    late: float = 0.0  # too late for anybody who waits
    dies: float = 0.0  # while it starts

    @property
    def reliable(self) -> bool:
        return not (self.never or self.late or self.dies)


@dataclass(frozen=True)
class Scenario:
    """All that a run depends on, together with its seed."""

    seed: int
    layout: Layout
    faults: tuple[Fault, ...]
    weather: Weather = field(default_factory=Weather)
    first_step: int = 1
    last_step: int = 1_000_000
    reborn: bool = False  # a new process registers in the place of a killed one
    early_rng: bool = True  # ranks know the digest of the end of a step when its commit begins
    retry: bool = False  # faults may be repaired online
    agent: Agent | None = None  # faults may also be repaired with processes that are started again
    save_every: int = 0  # steps from one periodic checkpoint to the next; 0: none
    one_way: bool = False  # the data cannot be put back: no checkpoint can be loaded online
    drifted: int = -1  # a rank whose random state left the others
    watch: bool = False  # hangs are looked for
    hashes: str = ""  # of shards: "": none; "stop": when a rank reports; "step": after each update, too
    uneven: bool = False  # steps take very different times, with long pauses between some
    requests: tuple[Request, ...] = ()  # of operators

    @property
    def online(self) -> bool:
        """Training may go on after a fault."""
        return self.retry or self.agent is not None

    @property
    def strategies(self) -> frozenset[str]:
        more = {"retry"} if self.retry else set()
        return frozenset({"dump", *more} if self.agent is None else {"dump", "recover", *more})
