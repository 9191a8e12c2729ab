"""The soak: hundreds of seeded random faults in one job, each recovered from online; nothing may add up.

What a single recovery leaves behind (a thread, a file, a group, some memory) no drill notices. Here the job is broken
again and again, has to end byte for byte where the unbroken run ends, and its ranks must use at the end what they used
after the first few recoveries. With preset `recover` some ranks also die, now and then; the others are judged. Jobs,
comparison and verdict are those of a drill (`rehearsal`).
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_tft.faults import jobs, spec
from mindspeed_tft.faults.plans import Plan
from mindspeed_tft.faults.rehearsal import Listener, Report, rehearse
from mindspeed_tft.faults.spec import REPAIR_PHASES, STEP_PHASES, FaultSpec, Layout, SpecError
from mindspeed_tft.faults.traces import StepLog, read_incidents, read_steps
from mindspeed_tft.faults.verdict import Verdict

PRESETS = ("retry", "recover")
KINDS = ("uce", "uce-low", "link")
DEATHS = ("kill", "segv", "exc")
_DEATH_CHANCE = 1 / 6  # that somebody dies in an incident
# A launcher gives up on a worker that dies for the fourth time within a minute.
DEATH_PACE = 21
MIN_FAULTS, MAX_FAULTS = 40, 5000
# Two faults of one step both fire only where neither can complete the step: before its commit point.
_BEFORE_COMMIT = STEP_PHASES[: STEP_PHASES.index("commit")]
# How the faults of a step come: alone, on two ranks at once, or the second one in the repair of the first.
_FORMS = ("alone", "alone", "alone", "at once", "in repair")
_GAPS = (2, 3)  # steps from one incident to the next: one to recover in, and one that shows that it has helped

SETTLED = 5  # recoveries after which everything has been allocated once
SAMPLE = 10  # steps that are one sample of the levels
MIN_BETWEEN = 5  # recoveries between the two samples, at least
# A send that was under way when its connection was shut keeps its old group, until that group's own timeout: gloo does
# not tell it. A rank is not judged meanwhile, and it may not take longer than this (seconds).
GROUP_TIMEOUT_MINUTES = 1
MAX_WINDING_UP = 60.0 * GROUP_TIMEOUT_MINUTES + 30.0
# Bytes that may be added a recovery before it counts as a leak; twice to three times what was measured over 50
# recoveries without one. Resident memory creeps on for a hundred recoveries, since new groups and their threads spread
# what is allocated over more pages; the allocated bytes themselves stand still, and tell of a leak of a few kilobytes.
HEAP_PER_REPAIR = 32 * 1024
MEMORY_PER_REPAIR = 384 * 1024
_ALLOWED = {"heap": HEAP_PER_REPAIR, "memory": MEMORY_PER_REPAIR}


def random_faults(layout: Layout, replicas: int, count: int, seed: int, preset: str = "retry") -> tuple[FaultSpec, ...]:
    """`count` faults in the order of their steps; the same seed always gives the same. At no time are all holders of a
    shard damaged or gone."""
    chance = random.Random(f"soak/{seed}")
    mortal = mortals(layout, seed) if preset == "recover" else ()
    deaths = 0
    found: list[FaultSpec] = []
    step = 0
    while len(found) < count:
        step += chance.choice(_GAPS)
        form = chance.choice(_FORMS) if count - len(found) > 1 else "alone"
        first = _Fault(chance.choice(KINDS), chance.randrange(layout.world_size))
        if mortal and chance.random() < _DEATH_CHANCE:
            first = _Fault(chance.choice(DEATHS), mortal[deaths % len(mortal)])
            deaths += 1
            # It may have to wait for its time, and a rank that waits cannot obey: nobody else breaks before it.
            form = "alone" if form == "at once" else form
        found += _FORM[form](chance, layout, replicas, step, first)
    return tuple(found)


def mortals(layout: Layout, seed: int) -> tuple[int, ...]:
    """The ranks that die in a soak with preset `recover`, in turn: half of them, so that the others can be judged."""
    return tuple(random.Random(f"mortals/{seed}").sample(range(layout.world_size), max(1, layout.world_size // 2)))


@dataclass(frozen=True)
class _Fault:
    """Of which kind the first fault of an incident is, and on which rank."""

    kind: str
    rank: int

    def at(self, step: int, phase: str) -> FaultSpec:
        return FaultSpec(self.kind, self.rank, step, phase)


def _alone(chance: random.Random, _layout: Layout, _replicas: int, step: int, first: _Fault) -> list[FaultSpec]:
    return [first.at(step, chance.choice(STEP_PHASES))]


def _at_once(chance: random.Random, layout: Layout, replicas: int, step: int, first: _Fault) -> list[FaultSpec]:
    found = [first.at(step, chance.choice(_BEFORE_COMMIT))]
    others = _elsewhere(layout, replicas, first.rank)
    if others:
        found.append(FaultSpec(chance.choice(KINDS), chance.choice(others), step, chance.choice(_BEFORE_COMMIT)))
    return found


def _in_repair(chance: random.Random, layout: Layout, replicas: int, step: int, first: _Fault) -> list[FaultSpec]:
    """The second fault falls into the repair of the first. In phase `repair` only those who move a shard are there."""
    cause = first.at(step, chance.choice(STEP_PHASES))
    moves = cause.kind == "uce" or cause.ends_process
    phase = chance.choice([phase for phase in REPAIR_PHASES if phase != "repair" or moves])
    others = [] if phase == "repair" else _elsewhere(layout, replicas, cause.rank)
    return [cause, FaultSpec(chance.choice(KINDS), chance.choice([cause.rank, *others]), step, phase)]


def _elsewhere(layout: Layout, replicas: int, rank: int) -> list[int]:
    """The ranks that hold another shard than this one."""
    mine = layout.shard_of(rank, replicas)
    return [other for other in range(layout.world_size) if layout.shard_of(other, replicas) != mine]


_FORM = {"alone": _alone, "at once": _at_once, "in repair": _in_repair}


def make_plan(
    layout: str,
    dtype: str,
    replicas: int,
    faults: int,
    seed: int,
    timeout: float | None = None,
    preset: str = "retry",
) -> Plan:
    """Read and check the arguments of a soak.

    Raises:
        SpecError: names the argument and what would be right.
    """
    if not MIN_FAULTS <= faults <= MAX_FAULTS:
        raise SpecError(f"--faults {faults}: expected {MIN_FAULTS} to {MAX_FAULTS}")
    if preset not in PRESETS:
        raise SpecError(f"--preset {preset!r}: a soak goes on after each fault, with preset {' or '.join(PRESETS)}")
    sizes = spec.parse_layout(layout)
    spec.check_job(preset, sizes, replicas, dtype)
    if replicas < 2:
        raise SpecError(f"--replicas {replicas}: a soak repairs from other holders, so it needs at least 2")
    ordered = random_faults(sizes, replicas, faults, seed, preset)
    deaths = sum(fault.ends_process for fault in ordered)
    steps = ordered[-1].step + 2
    return Plan(
        layout=sizes,
        faults=ordered,
        steps=steps,
        dtype=dtype,
        replicas=replicas,
        preset=preset,
        launcher=jobs.default_launcher(preset),
        pace=DEATH_PACE if deaths else 0,
        # Ten times what it takes on two cores.
        timeout=120.0 + 10.0 * faults + 2.0 * steps + 60.0 * deaths if timeout is None else timeout,
        extra=("--distributed-timeout-minutes", str(GROUP_TIMEOUT_MINUTES)),
        every_step=False,
        levels=True,
    )


# ------------------------------------------------------------------------------------------------- levels


@dataclass(frozen=True)
class Level:
    """What a rank uses while no recovery is being wound up: over the steps of a sample, the least of what is counted,
    and the median of the bytes that it has allocated (`heap`) and that are resident (`memory`, without files)."""

    heap: int
    memory: int
    threads: int
    files: int
    groups: int


@dataclass(frozen=True)
class Levels:
    """Of one rank: after the first recoveries, and at the end, so many recoveries later."""

    first: Level
    last: Level
    repairs: int

    def per_repair(self, name: str) -> float:
        """Bytes of `heap` or `memory` that were added a recovery."""
        before, after = getattr(self.first, name), getattr(self.last, name)
        return float(after - before) / self.repairs


def levels_of(log: StepLog, closed: Sequence[float]) -> dict[int, Levels]:
    """By rank; `closed` are the ends of the recoveries (wall clock), in order. Without ranks that were started again,
    and without those of which too little is known, because there were too few recoveries or one of them is still being
    wound up."""
    found = {}
    for rank, records in log.steps.items():
        if rank in log.restarted:
            continue
        settled = [r for r in records if len(closed) >= SETTLED and r["end_wall"] > closed[SETTLED - 1]]
        calm = [record for record in settled if not record["winding"]]
        first, last = calm[:SAMPLE], calm[-SAMPLE:]
        if len(first) < SAMPLE:
            continue
        between = sum(first[-1]["end_wall"] < moment < last[0]["end_wall"] for moment in closed)
        if between >= MIN_BETWEEN:
            found[rank] = Levels(_level(first), _level(last), between)
    return found


def winding_up(log: StepLog) -> dict[int, float]:
    """By rank: the longest time for which old groups were still being destroyed (seconds)."""
    return {rank: _longest(records) for rank, records in log.steps.items()}


def _longest(records: Sequence[Mapping[str, Any]]) -> float:
    longest, since, pid = 0.0, None, 0
    for record in records:
        if not record["winding"]:
            since = None
            continue
        since = record["end_wall"] if since is None or record["pid"] != pid else since
        pid = record["pid"]
        longest = max(longest, record["end_wall"] - since)
    return longest


def _level(records: Sequence[Mapping[str, Any]]) -> Level:
    least = {name: min(int(record[name]) for record in records) for name in ("threads", "files", "groups")}
    middle = {name: int(statistics.median(record[name] for record in records)) for name in _ALLOWED}
    return Level(**least, **middle)


def grown(levels: Mapping[int, Levels]) -> list[str]:
    """What is not as it was, for each rank."""
    reasons = []
    for rank, found in sorted(levels.items()):
        for name in ("threads", "files", "groups"):
            before, after = getattr(found.first, name), getattr(found.last, name)
            if before != after:
                reasons.append(f"rank {rank}: {before} {name} became {after} in {found.repairs} recoveries")
        for name, allowed in _ALLOWED.items():
            if (grew := found.per_repair(name)) > allowed:
                reasons.append(
                    f"rank {rank}: {name} grew by {grew / 1024:.0f} KiB a recovery over {found.repairs} recoveries; "
                    f"{allowed / 1024:.0f} KiB are allowed"
                )
    return reasons


# ------------------------------------------------------------------------------------------------- the whole


@dataclass(frozen=True)
class Recovered:
    """One recovery of the job."""

    tries: int
    seconds: float  # from the first of its faults to the end of the first step after it


@dataclass(frozen=True)
class Soaked:
    """All that a soak found out."""

    report: Report
    seed: int
    recoveries: tuple[Recovered, ...]
    levels: Mapping[int, Levels]  # of the ranks that can be judged
    winding_up: Mapping[int, float]
    verdict: Verdict
    reasons: tuple[str, ...]

    @property
    def tries(self) -> int:
        return sum(recovery.tries for recovery in self.recoveries)

    @property
    def seconds(self) -> dict[str, float]:
        """Of a recovery: median, ninth decile, longest. Empty without one."""
        spent = sorted(recovery.seconds for recovery in self.recoveries)
        if not spent:
            return {}
        return {"median": statistics.median(spent), "p90": spent[int(0.9 * (len(spent) - 1))], "max": spent[-1]}

    def as_json(self) -> dict[str, Any]:
        faults = self.report.evidence.fired
        return {
            **self.report.as_json(),
            "verdict": self.verdict.value,
            "reasons": list(self.reasons),
            "soak_seed": self.seed,
            "kinds": dict(Counter(fault.kind for fault in faults)),
            "phases": dict(Counter(fault.phase for fault in faults)),
            "repairs": len(self.recoveries),
            "tries_of_all": self.tries,
            "recovery_seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "levels": {
                str(rank): {
                    "first": vars(found.first),
                    "last": vars(found.last),
                    "repairs_between": found.repairs,
                    "bytes_per_repair": {name: round(found.per_repair(name)) for name in _ALLOWED},
                }
                for rank, found in sorted(self.levels.items())
            },
            "bytes_per_repair_allowed": dict(_ALLOWED),
            "winding_up_seconds": {str(rank): round(spent, 1) for rank, spent in sorted(self.winding_up.items())},
        }


def soak(plan: Plan, seed: int, work: Path, cache: Path, listener: Listener) -> Soaked:
    """Run a soak and judge it."""
    report = rehearse(plan, work, cache, listener)
    incidents = [incident for _, incident in read_incidents(work / "dump")]
    log = read_steps(work / "broken-steps")
    recovered = [incident for incident in incidents if incident["outcome"] in ("retried", "rebooted")]
    levels = levels_of(log, [float(incident["closed"]) for incident in recovered])
    stuck = winding_up(log)
    word, reasons = judge(report, incidents, levels, stuck)
    return Soaked(report, seed, recoveries_of(recovered, report.fired_at, log), levels, stuck, word, reasons)


def recoveries_of(
    incidents: Sequence[Mapping[str, Any]], fired_at: Sequence[float], log: StepLog
) -> tuple[Recovered, ...]:
    """The recoveries that the incidents tell of, each with the time from its first fault (wall clock) on."""
    found = []
    before = 0.0
    for incident in incidents:
        opened, closed = float(incident["opened"]), float(incident["closed"])
        fault = min((moment for moment in fired_at if before < moment <= closed), default=opened)
        first = log.first(fault)
        found.append(Recovered(len(incident["engine"]["repairs"]), (first[2] if first else closed) - fault))
        before = closed
    return tuple(found)


def judge(
    report: Report,
    incidents: Sequence[Mapping[str, Any]],
    levels: Mapping[int, Levels],
    winding: Mapping[int, float],
) -> tuple[Verdict, tuple[str, ...]]:
    """The drill's verdict on the job, and on top of an exact one that nothing has added up."""
    seen = report.evidence
    if seen.fired and not seen.online:
        # There is no unbroken run's checkpoint of that step that the state could be compared with.
        why = incidents[-1]["summary"].partition(" Go on with:")[0] if incidents else "no incident report"
        reason = f"the job did not train to its end (exit status {seen.faulty_exit}, step {seen.completed}): {why}"
        return Verdict.LOST, (reason,)
    if report.verdict is not Verdict.EXACT:
        return report.verdict, report.reasons
    if not levels:
        return Verdict.DEGRADED, ("there are too few recoveries, or too few steps between them, to judge any rank",)
    reasons = grown(levels)
    for rank, spent in sorted(winding.items()):
        if spent > MAX_WINDING_UP:
            reasons.append(f"rank {rank}: old groups were not destroyed for {spent:.0f} s")
    return (Verdict.DEGRADED, tuple(reasons)) if reasons else (Verdict.EXACT, ())
