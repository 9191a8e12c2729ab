"""Jobs whose ranks save together: the engine for frameworks that bring callbacks of their own (`facade`).

Such a rank cannot lay a shard down for somebody else, nor finish an update that it had not begun when it was stopped:
its framework saves in one collective of all that give a shard, and begins an update from its training loop alone. So a
dump asks all of them at once, and a rank that did not come to an update which others completed is no source. It also
has no commit of ours, in which ranks could agree on a step to be held at: what operators ask for is refused.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_tft.engine.agreement import Means, agree
from mindspeed_tft.engine.desk import Payload
from mindspeed_tft.engine.dump import Dump, Stage
from mindspeed_tft.engine.machine import Engine
from mindspeed_tft.engine.planning import DumpPlan
from mindspeed_tft.engine.types import Answer, Asked, OrderKind

UNASKED = (
    "the ranks of this job are driven by callbacks of another adaptor, and have no commit in which they could agree on"
    " a step; what the job saves by itself, and the dump after a fault, are not concerned"
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


class JointEngine(Engine):
    """See the module."""

    _dumps = JointDump

    def _decide(self) -> None:
        agreement = agree(self._reports, self._roster.infos, start=True)
        for rank, offer in sorted(agreement.offers.items()):
            if offer.means is Means.FINISH_UPDATE:
                self._reports[rank] = replace(self._reports[rank], trusted=False)
                self._desk.note(f"rank {rank} did not come to its update of step {agreement.step}", warn=True)
        super()._decide()

    def _on_asked(self, event: Asked) -> None:
        self._desk.put(Answer(event.id, False, f"{event.kind} is not possible here: {UNASKED}"))
