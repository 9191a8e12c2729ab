"""What the jobs of a drill left behind: steps that ranks ended, faults that fired, checkpoints, incident reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_tft.faults import spec, verdict
from mindspeed_tft.faults.spec import UNNOTICED, FaultSpec
from mindspeed_tft.faults.verdict import Recovery

INCIDENTS = "tft_incidents"  # the controller's default, in the --save directory

# In the order in which they pass; `dump` and `exit` belong to this preset alone.
STAGES = (
    *("detect", "stop", "decide", "dump", "exit", "reboot", "regroup", "repair", "rollback", "load", "first_step"),
    "total",
)

_DUMP_STAGES = ("finish", "stage", "write", "publish")  # of the engine; a drill counts them as one: `dump`


@dataclass(frozen=True)
class StepLog:
    """The steps that the ranks of a job ended."""

    steps: Mapping[int, tuple[dict[str, Any], ...]]  # by rank

    @property
    def completed(self) -> int:
        """The last step that some rank ended, 0 if none."""
        return max((record["step"] for record in self._records()), default=0)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: records[-1]["pid"] for rank, records in self.steps.items() if records}

    @property
    def restarted(self) -> tuple[int, ...]:
        """Ranks that went on in another process."""
        found = {rank: {record["pid"] for record in records} for rank, records in self.steps.items()}
        return tuple(sorted(rank for rank, pids in found.items() if len(pids) > 1))

    @property
    def computed_again(self) -> int:
        """Steps that some rank began when some rank had ended them already."""
        ended: dict[int, float] = {}
        for record in self._records():
            ended[record["step"]] = min(record["end_wall"], ended.get(record["step"], record["end_wall"]))
        return len({record["step"] for record in self._records() if record["begin_wall"] > ended[record["step"]]})

    def first(self, after: float = 0.0) -> tuple[int, float, float] | None:
        """The first step that was begun later than `after` (wall clock) and ended: when its first rank began, and when
        its last rank ended it."""
        begun = [[record for record in records if record["begin_wall"] > after] for records in self.steps.values()]
        step = min((record["step"] for records in begun for record in records), default=None)
        if step is None:
            return None
        # Each rank's first time: a further fault may have made it compute the step again.
        times = [[record for record in records if record["step"] == step] for records in begun]
        of_step = [records[0] for records in times if records]
        return step, min(record["begin_wall"] for record in of_step), max(record["end_wall"] for record in of_step)

    def _records(self) -> list[dict[str, Any]]:
        return [record for records in self.steps.values() for record in records]


def read_steps(directory: Path) -> StepLog:
    """Read what `gpt_job` wrote; the last line of a killed rank may be torn and is then not counted."""
    steps = {}
    for path in sorted(directory.glob("rank*.jsonl")) if directory.is_dir() else ():
        whole = path.read_text().rpartition("\n")[0]
        steps[int(path.stem.removeprefix("rank"))] = tuple(json.loads(line) for line in whole.splitlines())
    return StepLog(steps)


def read_fired(log: Path, faults: Sequence[FaultSpec]) -> tuple[tuple[FaultSpec, ...], tuple[float, ...]]:
    """Which faults fired, each as often as it did, and when (wall clock, in order)."""
    if not log.exists():
        return (), ()
    records = [json.loads(line) for line in log.read_text().splitlines() if line.strip()]
    found = [(spec.parse_fault(record["fault"]), float(record["wall"])) for record in records]
    left = spec.without(faults, [fault for fault, _ in found])
    # Time counts from the first fault that training notices, if there is such a one.
    noticed = [wall for fault, wall in found if fault.kind not in UNNOTICED] or [wall for _, wall in found]
    return spec.without(faults, left), tuple(sorted(noticed))


def saved_step(save: Path) -> int | None:
    """The step that a `--save` directory's tracker names, None without a checkpoint."""
    from mindspeed_tft.faults import compare

    if not (save / compare.TRACKER).is_file():
        return None
    step = compare.tracked_iteration(save)
    return step if (save / f"iter_{step:07d}").is_dir() else None


def read_incident(save: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest incident report that the controller left beside the dump, None if there is none."""
    reports = read_incidents(save)
    return reports[-1] if reports else None


def read_incidents(save: Path) -> list[tuple[Path, dict[str, Any]]]:
    """All incident reports of a job, the oldest first."""
    found = [(path, json.loads(path.read_text())) for path in (save / INCIDENTS).glob("incident-*.json")]
    return sorted(found, key=lambda report: float(report[1]["opened"]))


# By the outcome of an incident.
_STRATEGIES = {
    "retried": "retry",
    "rebooted": "recover",
    "rewound": verdict.REWIND,
    "dumped": "dump",
    "exists": "dump",
}


def recovery_of(incident: Mapping[str, Any]) -> Recovery:
    """What an incident report says about the way out."""
    strategy, step = _STRATEGIES.get(incident["outcome"], "none"), int(incident["step"])
    # Newcomers may join in a rewind, too; in all other recoveries S is the furthest step that was completed.
    furthest = int(incident["engine"]["furthest_step"]) if strategy in ("recover", verdict.REWIND) else step
    return Recovery(strategy, step, tuple(range(step + 1, furthest + 1)))


def stage_seconds(
    fault: float | None,
    incident: Mapping[str, Any] | None,
    first: tuple[int, float, float] | None,
    relaunched: bool = True,
) -> dict[str, float | None]:
    """Seconds of each stage, from the fault to the end of the first step after it; None: not known, or no such stage.

    Where a new job is started (`relaunched`), by hand and here at once, `reboot` is from the end of the incident to the
    begin of its first step. Where the job goes on there is no `dump`, and `reboot` is the wait for newcomers, if any.
    """
    found: dict[str, float | None] = dict.fromkeys(STAGES)
    if incident is not None:
        spent = incident["seconds"]
        found.update({name: spent[name] for name in STAGES if name in spent and name != "total"})
        if relaunched:
            found["dump"] = sum(spent.get(name, 0.0) for name in _DUMP_STAGES)
        if fault is not None:
            found["detect"] = incident["opened"] - fault
    if first is not None:
        _, begin, end = first
        found["first_step"] = end - begin
        if incident is not None and relaunched:
            found["reboot"] = begin - incident["closed"]
        if fault is not None:
            found["total"] = end - fault
    return {name: None if value is None else round(value, 3) for name, value in found.items()}
