"""The job that `controller.py` lets a controller lead: hosts with ranks that compute nothing and answer at once."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_tft.control import codec
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.machine import Engine
from mindspeed_tft.replica.holders import shard_of
from mindspeed_tft.settings import Settings

PARTS = 32  # model parts, at most
REPLICAS = 2
DIGEST = "5" * 64  # of the random state, the same on all ranks
STEPS_APART = 10  # from one repeat to the next: the engine takes faults of neighbouring steps for one that comes again
SETTINGS = Settings(enable_high_availability=True, enable_hbmfault_repair=True, enable_worker_reboot=True)
STRATEGIES = SETTINGS.strategies()


@dataclass(frozen=True)
class Shape:
    """A job of so many ranks."""

    ranks: int
    per_host: int
    heartbeat: float  # seconds

    @property
    def hosts(self) -> int:
        return self.ranks // self.per_host

    @property
    def deadlines(self) -> t.Deadlines:
        return replace(SETTINGS.deadlines(), heartbeat=self.heartbeat)

    def infos(self) -> list[t.RankInfo]:
        parts = min(PARTS, self.ranks // 8)
        return [self._info(rank, parts) for rank in range(self.ranks)]

    def _info(self, rank: int, parts: int) -> t.RankInfo:
        dp_rank, part = divmod(rank, parts)
        shard = f"tp{part}-pp0/dense/{shard_of(dp_rank, self.ranks // parts, REPLICAS)}"
        return t.RankInfo(rank, f"host{rank // self.per_host}", 1000 + rank, f"tp{part}-pp0", dp_rank, (shard,))


def newcomer(info: t.RankInfo) -> t.RankInfo:
    """Another process in the place of this one."""
    return replace(info, pid=info.pid + 100_000)


def report(rank: int, step: int, epoch: int, bare: bool) -> t.RankReport:
    """The fault came before the commit of `step`; `bare`: a newcomer speaks."""
    step, rng = (0, "") if bare else (step, DIGEST)
    return t.RankReport(rank, step, t.Commit.NONE, t.Update.UNTOUCHED, "", not bare, rng, "", epoch)


class Tally:
    """When the last rank had its stop, its first order and its last one. Seconds on the clock of this process."""

    def __init__(self, ranks: int, last: t.OrderKind, on_change: Callable[[str], None] = lambda _: None) -> None:
        self.at: dict[str, float] = {}
        self.orders: Counter[str] = Counter()
        self._ranks, self._last, self._on_change = ranks, last.value, on_change
        self._had: dict[str, set[int]] = {"stop": set(), "first order": set(), "last order": set()}

    def stopped(self, rank: int) -> None:
        self._book("stop", rank)

    def ordered(self, rank: int, kind: str) -> None:
        self.orders[kind] += 1
        self._book("first order", rank)
        if kind == self._last:
            self._book("last order", rank)

    def _book(self, what: str, rank: int) -> None:
        had = self._had[what]
        had.add(rank)
        if len(had) == self._ranks and what not in self.at:
            self.at[what] = time.perf_counter()
            self._on_change(what)

    def __str__(self) -> str:
        counts = ", ".join(f"{what}: {len(had)} of {self._ranks} ranks" for what, had in self._had.items())
        return f"{counts}; orders {dict(self.orders)}"


class SimRank:
    """A rank that computes nothing."""

    def __init__(self, info: t.RankInfo, bare: bool = False) -> None:
        """`bare`: it stands for another process."""
        self.info, self.epoch, self.bare, self._seq = info, 0, bare, 0
        self._session = secrets.token_hex(8)

    def hello(self) -> wire.FromRank:
        return self._word(codec.hello(self._session, self.info, self.epoch, bare=self.bare))

    def beat(self) -> wire.FromRank:
        return self._word(codec.says(t.Heartbeat(0.0, self.info.rank, 0, "forward-backward")))

    def says(self, event: t.Event) -> wire.FromRank:
        self._seq += 1
        return self._word(codec.says(event, self._seq))

    def lost(self) -> wire.FromRank:
        event = t.RankLost(0.0, self.info.rank, "killed by signal 9 (SIGKILL)", self.info.pid)
        return codec.lost_to_wire(event, self._session, codec.info_to_wire(self.info))

    def _word(self, says: wire.RankSays) -> wire.FromRank:
        return wire.FromRank(rank=self.info.rank, session=self._session, says=says)


class Host:
    """A relay with its ranks: what it says and hears. How that travels is not known here.

    As a real one, it passes on at once and one by one what ranks say, but for heartbeats.
    """

    def __init__(self, number: int, infos: Sequence[t.RankInfo]) -> None:
        self.number = number
        self.ranks = {info.rank: SimRank(info) for info in infos}
        self.tally: Tally | None = None
        self._beats = wire.HostSays()

    def greeting(self) -> wire.HostHello:
        name = f"host{self.number}"
        return wire.HostHello(protocol=codec.PROTOCOL, host=name, node_rank=self.number, pid=1, run="benchmark")

    def hellos(self) -> wire.HostSays:
        return wire.HostSays(ranks=[rank.hello() for rank in self.ranks.values()])

    def beats(self, step: int) -> wire.HostSays:
        """A heartbeat of each rank. Made once and changed: all else would keep this process busy."""
        if not self._beats.ranks:
            self._beats.ranks.extend(rank.beat() for rank in self.ranks.values())
        for word in self._beats.ranks:
            word.says.heartbeat.step, word.says.heartbeat.pulse = step, step
        said = wire.HostSays()
        said.CopyFrom(self._beats)
        return said

    def loses(self, number: int) -> list[wire.HostSays]:
        """A rank is gone, and another process is there for it."""
        gone = self.ranks[number].lost()
        rank = self.ranks[number] = SimRank(newcomer(self.ranks[number].info), bare=True)
        self._beats.Clear()
        return [wire.HostSays(ranks=[gone]), wire.HostSays(ranks=[rank.hello()])]

    def must_end(self, number: int) -> list[wire.HostSays]:
        """A rank was asked to end by a signal: a dump."""
        event = t.FaultSeen(0.0, number, "terminated", "received SIGTERM", own=True)
        return [wire.HostSays(ranks=[self.ranks[number].says(event)])]

    def reports(self, step: int) -> list[wire.HostSays]:
        said = (
            rank.says(t.Reported(0.0, report(number, step, rank.epoch, rank.bare)))
            for number, rank in self.ranks.items()
        )
        return [wire.HostSays(ranks=[word]) for word in said]

    def hear(self, message: wire.HostOrders) -> list[wire.HostSays]:
        """What the ranks answer to it, at once."""
        assert self.tally is not None
        kind = message.WhichOneof("body")
        if kind == "stop":
            for number in message.stop.ranks:
                self.ranks[number].epoch = message.stop.epoch
                self.tally.stopped(number)
        elif kind == "order":
            order = message.order
            self.tally.ordered(order.rank, order.kind)
            self.ranks[order.rank].bare = False
            event = t.OrderDone(0.0, order.rank, order.id, True, "", {"path": "/save/iter", "resume": "run it again"})
            return [wire.HostSays(ranks=[self.ranks[order.rank].says(event)])]
        return []


class Job:
    """All hosts of a job, between two faults."""

    def __init__(self, shape: Shape) -> None:
        infos, per = shape.infos(), shape.per_host
        self.shape, self.step = shape, 1
        self.hosts = [Host(number, infos[number * per : (number + 1) * per]) for number in range(shape.hosts)]

    def next_fault(self, repeat: int, last: t.OrderKind, on_change: Callable[[str], None] = lambda _: None) -> Tally:
        """Everybody computes a later step, and is watched from now on."""
        self.step += STEPS_APART
        tally = Tally(self.shape.ranks, last, on_change)
        for host in self.hosts:
            host.tally = tally
        self.victim = (repeat * 37 + 5) % self.shape.ranks
        self.scene = self.hosts[self.victim // self.shape.per_host]
        return tally


def make_engine(shape: Shape) -> Engine:
    return Engine(shape.deadlines, shape.ranks, strategies=frozenset(STRATEGIES))


def make_config(shape: Shape, incidents: Path) -> ControlConfig:
    return ControlConfig(
        shape.deadlines, shape.ranks, shape.per_host, 0, shape.hosts, "host0", str(incidents), "benchmark", port=0,
        strategies=STRATEGIES, shutdown=1.0,
    )  # fmt: skip
