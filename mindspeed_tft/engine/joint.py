"""Jobs whose ranks save together: the engine for frameworks that bring callbacks of their own (`facade`).

Such a rank cannot lay a shard down for somebody else, nor finish an update that it had not begun when it was stopped:
its framework saves in one collective of all that give a shard, and begins an update from its training loop alone. So a
dump asks all of them at once, and a rank that did not come to an update which others completed is no source.

It also has no commit of ours, in which ranks agree on a step to be held at. Each holds at the first end of a step at
which it knows that it is to; whoever comes there without knowing goes on into the next step, where it waits for the
others. So ranks that are held apart are told to meet one step later, until all are held after the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mindspeed_tft.engine.agreement import Means, agree
from mindspeed_tft.engine.desk import Desk, Payload
from mindspeed_tft.engine.dump import Dump, Stage
from mindspeed_tft.engine.hold import Holds, Work
from mindspeed_tft.engine.machine import Engine
from mindspeed_tft.engine.planning import DumpPlan
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.states import State
from mindspeed_tft.engine.types import Answer, Asked, Deadlines, Held, OrderKind

UNASKED = (
    "the ranks of this job are driven by callbacks of another adaptor, none of which does it; `tftctl pause` works, and"
    " after SIGTERM to a rank the job saves and leaves"
)


class JointDump(Dump):
    """WRITE_PART goes to all ranks that give a shard, at the same time. Its payload has no sources but `groups`: of
    each list of shards that the rank takes part in, "list|rank,rank,...", the ranks in the order of their shards."""

    def _stage_shards(self) -> None:
        attempt = self.attempts[-1]
        groups = joint_groups(attempt.plan)
        payloads: dict[int, Payload] = {}
        for rank in sorted({rank for ranks in groups.values() for rank in ranks}):
            mine = [f"{name}|{','.join(map(str, ranks))}" for name, ranks in groups.items() if rank in ranks]
            payloads[rank] = {"step": attempt.plan.step, "directory": attempt.directory, "groups": mine}
        attempt.touched |= payloads.keys()
        self._run(Stage.WRITE, OrderKind.WRITE_PART, payloads)


def joint_groups(plan: DumpPlan) -> dict[str, tuple[int, ...]]:
    """List of shards ("ranks0/dense" of shard "ranks0/dense/3") -> the rank that gives each of them, in their order.

    Experts may be wanted by several parts; they are given once.
    """
    sources: dict[str, int] = {}
    for part in plan.parts:
        for shard, rank in part.sources.items():
            sources.setdefault(shard, rank)
    groups: dict[str, dict[int, int]] = {}
    for shard, rank in sources.items():
        name, _, number = shard.rpartition("/")
        groups.setdefault(name, {})[int(number)] = rank
    return {name: tuple(by[number] for number in sorted(by)) for name, by in sorted(groups.items())}


class JointHolds(Holds):
    """A pause and its end, and nothing that ranks would do meanwhile."""

    def __init__(self, desk: Desk, roster: Roster, deadlines: Deadlines, issued: int) -> None:
        super().__init__(desk, roster, deadlines, issued)
        self._kinds = {"pause": self._pause, "resume": self._resume}
        self._at: dict[int, int] = {}  # the step after which each rank was held last
        self._apart_since: float | None = None  # some are held, and not all after the same step

    def offer(self, kind: str, make: Callable[[Asked], Work], limit: float) -> None:
        """No work is possible here."""

    def asked(self, event: Asked, state: State, computing: int) -> None:
        if event.kind in self._kinds:
            super().asked(event, state, computing)
        else:
            self._desk.put(Answer(event.id, False, f"{event.kind} is not possible here: {UNASKED}"))

    @property
    def paused(self) -> bool:
        return super().paused and len({self._at.get(rank) for rank in self._in}) == 1

    def held(self, event: Held) -> None:
        self._at[event.rank] = event.step
        super().held(event)

    def tick(self, computing: int) -> None:
        now = self._desk.now
        if not (self.wish.hold and self._in) or self.paused:
            self._apart_since = None
        elif self._apart_since is None:
            self._apart_since = now
        elif now - self._apart_since >= self._deadlines.heartbeat_lost / 2:
            self._meet_later(max(self._at[rank] for rank in self._in) + 1)
        super().tick(computing)

    def _meet_later(self, step: int) -> None:
        self._desk.note(f"{len(self._in)} of {len(self._roster.alive)} ranks are held, not all after one step: all"
                        f" go on to the end of step {step}")  # fmt: skip
        self._leaving |= self._in
        self._in, self._apart_since = set(), None
        self._hold(step, self.wish.limit, pending=self.wish.pending)


class JointEngine(Engine):
    """See the module."""

    _dumps = JointDump
    _operated = JointHolds

    def _decide(self) -> None:
        agreement = agree(self._reports, self._roster.infos, start=True)
        for rank, offer in sorted(agreement.offers.items()):
            if offer.means is Means.FINISH_UPDATE:
                self._reports[rank] = replace(self._reports[rank], trusted=False)
                self._desk.note(f"rank {rank} did not come to its update of step {agreement.step}", warn=True)
        super()._decide()
