"""The judge of a drill: from what was seen to one word and its reasons. Pure.

Nothing that was printed by a training job enters here; what counts is which files exist, which steps ranks ended,
and what the byte comparison said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mindspeed_tft.faults.spec import (
    PHASES,
    REPAIR_PHASES,
    STEP_PHASES,
    UNNOTICED,
    FaultSpec,
    first_rewind,
    without,
)

# Before a rank reaches this phase no rank can have passed the commit of the step; after it every one has.
_COMMIT = STEP_PHASES.index("commit")


class Verdict(str, Enum):
    """The outcome of a drill, with its exit status."""

    EXACT = "exact"
    INEXACT = "inexact"
    DEGRADED = "degraded"
    LOST = "lost"

    @property
    def exit_status(self) -> int:
        return {"exact": 0, "inexact": 3, "degraded": 4, "lost": 5}[self.value]


@dataclass(frozen=True)
class Compared:
    """One comparison of two checkpoints; `different` counts everything that is not equal."""

    what: str
    tensors: int
    bytes: int
    different: int
    first_difference: str | None = None
    padding: int = 0


@dataclass(frozen=True)
class Recovery:
    """How one incident ended: the strategy, and the completed step S from which training went on or goes on."""

    strategy: str
    step: int
    again: tuple[int, ...] = ()  # completed steps that it gives up, to be computed once more

    @property
    def rewound(self) -> bool:
        """The state came from a checkpoint."""
        return self.strategy == REWIND or bool(self.again)


@dataclass(frozen=True)
class Evidence:
    """What was seen of a drill. The last block belongs to the presets in which training goes on in the same job."""

    fired: tuple[FaultSpec, ...]  # the faults that announced themselves, with their phases
    steps: int  # of the whole training
    faulty_exit: int | None  # exit status of the job that was broken; None: killed at its deadline
    completed: int  # the last step that some rank of the broken job ended, 0 if none
    saved: int | None  # step of the dump; None: there is none
    reported: int | None = None  # step that the last incident report says is saved; None: none says so
    resumed_exit: int | None = None  # exit status of the job that went on from the dump; None: did not end, or not run
    resumed_first: int | None = None  # first step that it computed
    compare: bool = True
    comparisons: tuple[Compared, ...] = ()  # must hold both those of `EXPECTED_COMPARISONS`
    leftover: tuple[str, ...] = ()  # processes that outlived their job
    preset: str = "dump"
    ordered: tuple[FaultSpec, ...] = ()  # the faults that were to fire
    recoveries: tuple[Recovery, ...] = ()  # as the incidents tell them, in order
    computed_again: int = 0  # steps that some rank had ended and that were computed once more in the same job
    restarted: tuple[int, ...] = ()  # ranks whose process id changed in the broken job
    replicas: int = 2  # of each shard of the optimizer
    per_node: int = 1  # ranks; only faults of a whole node ask
    takes_nodes: bool = False  # the whole node of a victim is taken away

    @property
    def may_rewind(self) -> bool:
        """The preset promises no more than to go on from the last checkpoint: what was lost has no other holder, or
        the numbers of all holders are in doubt."""
        return first_rewind(self.ordered, self.replicas) is not None

    @property
    def online(self) -> bool:
        """The broken job itself trained to its end."""
        return self.preset != "dump" and self.faulty_exit == 0

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks that had to go on as another process."""
        if self.preset != "recover":
            return ()
        ended = {rank for fault in self.fired for rank in fault.victims(self.per_node)}
        if self.takes_nodes:
            nodes = {rank // self.per_node for rank in ended}
            ended = {node * self.per_node + place for node in nodes for place in range(self.per_node)}
        return tuple(sorted(ended))


REWIND = "rewind"  # the strategy that goes on, in the same job, from the last periodic checkpoint
DUMP_COMPARISON = "dump"  # the dump against the unbroken run's checkpoint of the same step
FINAL_COMPARISON = "end"  # the end of the resumed run against the end of the unbroken run
EXPECTED_COMPARISONS = (DUMP_COMPARISON, FINAL_COMPARISON)
ONLINE_COMPARISONS = (FINAL_COMPARISON,)  # no checkpoint lies between: the end of the broken job is what counts


def possible_steps(faults: Sequence[FaultSpec]) -> tuple[int, ...]:
    """The steps at which the job may be saved after the first of these faults, the lowest first.

    A rank that broke before the commit point of its step held all others back; once one is past it, every rank had
    final gradients and the step must be finished. At the commit point itself both can happen. A rank that is asked to
    end breaks nothing: it trains on until the stop arrives, which may be in the next step.
    """
    in_steps = [fault for fault in faults if fault.phase not in REPAIR_PHASES]  # the others come after one of these
    in_steps = [fault for fault in in_steps if fault.kind not in UNNOTICED] or in_steps
    first = min(in_steps or faults, key=lambda fault: (fault.step, _phase_index(fault)))
    if first.kind == "term":
        return (first.step - 1, first.step, first.step + 1)
    phase = _phase_index(first)
    if phase < _COMMIT:
        return (first.step - 1,)
    if phase > _COMMIT:
        return (first.step,)
    return (first.step - 1, first.step)


def judge(seen: Evidence) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict, and why: every reason that speaks against a better one."""
    if seen.preset == "dump":
        return _judge_dump(seen)
    if seen.online:
        return _judge_online(seen)
    word, reasons = _judge_dump(seen)
    if word in (Verdict.EXACT, Verdict.DEGRADED):
        # The state was verified all the same, but the preset promises that the job goes on.
        return Verdict.DEGRADED, (f"the job ended with exit status {seen.faulty_exit} and a checkpoint", *reasons)
    return word, reasons


def _judge_dump(seen: Evidence) -> tuple[Verdict, tuple[str, ...]]:
    lost = _lost(seen)
    if lost:
        return Verdict.LOST, lost
    inexact = _inexact(seen)
    if inexact:
        return Verdict.INEXACT, inexact
    degraded = _degraded(seen)
    if degraded:
        return Verdict.DEGRADED, degraded
    return Verdict.EXACT, ()


def _judge_online(seen: Evidence) -> tuple[Verdict, tuple[str, ...]]:
    lost = _lost_online(seen)
    if lost:
        return Verdict.LOST, lost
    inexact = _unequal(seen, ONLINE_COMPARISONS) + _untold(seen)
    if inexact:
        return Verdict.INEXACT, inexact
    degraded = _degraded_online(seen)
    if degraded:
        return Verdict.DEGRADED, degraded
    return Verdict.EXACT, ()


def _lost_online(seen: Evidence) -> tuple[str, ...]:
    reasons = []
    silent = [str(fault) for fault in without(seen.ordered, seen.fired)]
    if not seen.fired:
        reasons.append("no fault fired, so nothing was rehearsed")
    elif silent:
        reasons.append(f"did not fire, so not rehearsed: {' '.join(silent)}")
    if seen.saved != seen.steps:
        reasons.append(f"the job ended well, but its last checkpoint is {seen.saved}, not step {seen.steps}")
    return tuple(reasons)


def _untold(seen: Evidence) -> tuple[str, ...]:
    """What the incidents say of lost steps must be what happened.

    A step past its commit is complete for them, also when no rank had ended it: at most one a rewind.
    """
    told, rewound = len(_told_again(seen)), [recovery for recovery in seen.recoveries if recovery.rewound]
    if not rewound or seen.computed_again <= told <= seen.computed_again + len(rewound):
        return ()
    return (
        f"the incident reports tell of {told} completed steps to be computed again (after step "
        f"{' and '.join(str(recovery.step) for recovery in rewound)}), but {seen.computed_again} were",
    )


def _told_again(seen: Evidence) -> set[int]:
    return {step for recovery in seen.recoveries for step in recovery.again}


def _degraded_online(seen: Evidence) -> tuple[str, ...]:
    reasons = []
    strategies = [recovery.strategy for recovery in seen.recoveries]
    rewound = any(recovery.rewound for recovery in seen.recoveries)
    best = "recover" if seen.victims else "retry"  # without a victim, preset `recover` has nothing better to offer
    promised = {best, REWIND} if seen.may_rewind else {best}
    noticed = any(fault.kind not in UNNOTICED for fault in seen.fired)
    if noticed and not promised & set(strategies):
        reasons.append(f"no incident report tells of a recovery by {best} (told: {_told(strategies)})")
    if rewound and not seen.may_rewind:
        reasons.append(f"the state came from a checkpoint, not from replicas (told: {_told(strategies)})")
    if seen.computed_again and not (seen.may_rewind and rewound):
        reasons.append(f"{seen.computed_again} completed steps had to be computed again")
    if needlessly := sorted({*seen.restarted} - {*seen.victims}):
        reasons.append(f"the processes of ranks {_listed(needlessly)} were started again, though nothing ended them")
    if missing := sorted({*seen.victims} - {*seen.restarted}):
        reasons.append(f"no step tells of another process of ranks {_listed(missing)}, whose own one had to end")
    if seen.leftover:
        reasons.append(f"{len(seen.leftover)} processes outlived their job: {'; '.join(seen.leftover)}")
    return tuple(reasons)


def _listed(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))


def _told(strategies: Sequence[str]) -> str:
    return " ".join(strategies) or "none at all"


def steps_lost(seen: Evidence) -> int | None:
    """Completed steps that had to be computed again."""
    if seen.online:
        return max(seen.computed_again, len(_told_again(seen)))
    return None if seen.saved is None else seen.computed_again + max(0, seen.completed - seen.saved)


def resumed_at(seen: Evidence) -> int | None:
    """The completed step from which training went on after the first fault."""
    if seen.online:
        return seen.recoveries[0].step if seen.recoveries else None
    return seen.saved


def _lost(seen: Evidence) -> tuple[str, ...]:
    reasons = []
    if not seen.fired:
        reasons.append("no fault fired, so nothing was rehearsed")
    if seen.faulty_exit is None:
        reasons.append("the broken job did not end by its deadline")
    if seen.faulty_exit == 0:
        reasons.append("the broken job ended with exit status 0, as if nothing had happened")
    if seen.saved is None:
        reasons.append("no checkpoint was left behind")
    if reasons:
        return tuple(reasons)
    if seen.resumed_exit is None:
        return ("the job that went on from the dump did not end by its deadline",)
    if seen.resumed_exit != 0:
        return (f"the job that went on from the dump failed with exit status {seen.resumed_exit}",)
    return ()


def _inexact(seen: Evidence) -> tuple[str, ...]:
    reasons = list(_unequal(seen, EXPECTED_COMPARISONS))
    if not seen.compare:
        return tuple(reasons)
    if seen.resumed_first is not None and seen.saved is not None and seen.resumed_first != seen.saved + 1:
        reasons.append(f"the job went on at step {seen.resumed_first}, but step {seen.saved} was saved")
    if seen.reported is not None and seen.reported != seen.saved:
        reasons.append(f"the incident report names step {seen.reported}, but step {seen.saved} was saved")
    return tuple(reasons)


def _unequal(seen: Evidence, expected: Sequence[str]) -> tuple[str, ...]:
    if not seen.compare:
        return ("nothing was compared (--no-compare), so equality is not claimed",)
    reasons = []
    found = {compared.what: compared for compared in seen.comparisons}
    for what in expected:
        compared = found.get(what)
        if compared is None:
            reasons.append(f"{what}: was not compared")
        elif compared.tensors == 0 or compared.bytes == 0:
            reasons.append(f"{what}: the comparison looked at no tensor")
        elif compared.different:
            reasons.append(f"{what}: {compared.different} differences, the first: {compared.first_difference}")
    return tuple(reasons)


def _degraded(seen: Evidence) -> tuple[str, ...]:
    reasons = []
    again = steps_lost(seen)
    if again:
        reasons.append(f"{again} completed steps had to be computed again")
    possible = possible_steps(seen.fired)
    # After a recovery the job went on, and it was a later fault that ended it.
    repaired = any(recovery.strategy not in ("dump", "none") for recovery in seen.recoveries)
    if seen.saved not in possible and not repaired:
        wanted = " or ".join(str(step) for step in possible)
        reasons.append(f"step {seen.saved} was saved, the fault left step {wanted} to be saved")
    if seen.resumed_first is None:
        reasons.append("it is not known at which step the job went on")
    if seen.reported is None:
        reasons.append("no incident report tells of a checkpoint")
    if seen.leftover:
        reasons.append(f"{len(seen.leftover)} processes outlived their job: {'; '.join(seen.leftover)}")
    return tuple(reasons)


def _phase_index(fault: FaultSpec) -> int:
    if fault.phase is None:
        raise ValueError(f"fault {fault}: it has no phase, settle it first")
    return PHASES.index(fault.phase)  # `save` and `eval` come after the step, so the step is complete
