"""Incidents in numbers: what befell which rank, how long each stage took, what came of it. A pure function of the
events and actions that pass the controller; the incident file, which has all of them, is `incident`'s affair.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.agreement import completed

STRATEGIES = {"retried": "retry", "rebooted": "recover", "rewound": "rewind", "dumped": "dump", "exists": "dump"}
NO_STRATEGY = "none"  # the outcome "failed": nothing was saved
DETECT = "detect"  # from the last heartbeat of the first rank that broke until its fault was told: at most so long
TOTAL = "total"
SAVING = ("decide", "finish", "stage", "write", "publish")  # the stages of a dump
_OUTSIDE = ("start", "train", "exit", "closed")  # notes of these begin no stage of a recovery
_LEAVING = ("exit", "closed")


@dataclasses.dataclass(frozen=True)
class Recovery:
    """One incident, when it is over. Times are seconds on the controller's monotonic clock."""

    opened: float  # the first sign of a fault
    closed: float  # training goes on, or the job ends
    outcome: str  # as in `Recovered` and `Closed`
    step: int  # S, or that of the checkpoint that was loaded; -1: nothing was saved
    lost: int | None  # completed steps that are to be computed again; None: nobody knows, since nothing was saved
    epoch: int
    detect: float | None  # seconds; None: the rank that broke was never heard
    stages: tuple[tuple[str, float, float], ...]  # (stage, begin, end), in order; a stage may come again
    faults: Mapping[str, int]  # kind -> ranks that it befell
    summary: str

    @property
    def strategy(self) -> str:
        return STRATEGIES.get(self.outcome, NO_STRATEGY)

    def seconds(self) -> dict[str, float]:
        """Seconds in each stage, with `TOTAL`, and `DETECT` where it is known."""
        found: dict[str, float] = {} if self.detect is None else {DETECT: self.detect}
        for stage, begin, end in self.stages:
            found[stage] = found.get(stage, 0.0) + end - begin
        return {**found, TOTAL: self.closed - self.opened}


class Running:
    """An incident that goes on."""

    def __init__(self, opened: float) -> None:
        self.opened = opened
        self.epoch = 0
        self.furthest = 0  # the last step that a report proves complete
        self.stage = ""
        self.leaving = False  # ranks were told to exit: that they go is no fault
        self._detect: float | None = None
        self._notes: list[tuple[float, str]] = []  # where a stage begins
        self._faults: dict[int, str] = {}  # rank -> kind, of its present process
        self._settled: Counter[str] = Counter()  # of processes that were replaced
        self._doubt = False

    def fault(self, rank: int, kind: str, at: float, heard: float | None) -> None:
        """A rank's own fault, told by itself or by others; the first word on a process counts."""
        if kind == "terminated" and kind in {*self._faults.values(), *self._settled}:
            return  # a scheduler asks all ranks to end: one fault, of the job
        if not self._faults and not self._settled and heard is not None:
            self._detect = max(0.0, at - heard)
        self._faults.setdefault(rank, kind)

    def killed(self, rank: int) -> None:
        """The engine ends a process, which then is lost as well."""
        self._faults[rank] = "hang"

    def replaced(self, rank: int) -> None:
        """Another process stands for the rank: its next fault is another one."""
        if rank in self._faults:
            self._settled[self._faults.pop(rank)] += 1

    def report(self, report: t.RankReport) -> None:
        if report.trusted:
            self.furthest = max(self.furthest, completed(report))
        if report.fault:
            self._faults.setdefault(report.rank, "stopped")

    def stop(self, stop: t.Stop) -> None:
        self.epoch = stop.epoch
        self._doubt = self._doubt or bool(stop.doubt)

    def note(self, stage: str, at: float) -> None:
        self.leaving = self.leaving or stage in _LEAVING
        if stage != self.stage:
            self.stage = stage
            self._notes.append((at, stage))

    def end(self, outcome: str, step: int, furthest: int, summary: str, at: float) -> Recovery:
        """`furthest`: the last step that anybody said to be complete."""
        ends = [*(when for when, _ in self._notes[1:]), at]
        stages = [(stage, begin, end) for (begin, stage), end in zip(self._notes, ends, strict=False)]
        return Recovery(
            self.opened,
            at,
            outcome,
            step,
            max(0, max(furthest, self.furthest) - step) if step >= 0 else None,
            self.epoch,
            self._detect,
            tuple(stage for stage in stages if stage[0] not in _OUTSIDE),
            self._kinds(),
            summary,
        )

    def _kinds(self) -> dict[str, int]:
        found = self._settled + Counter(self._faults.values())
        if self._doubt and not {"precision", "corrupted"} & found.keys():
            found["precision"] += 1  # an engine before this one knew who
        return dict(found) or {"link": 1}  # ranks noticed each other's absence, and all are there
