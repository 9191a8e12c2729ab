"""Several faults in one job, one after the other: a start of real Megatron costs more than a repair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_tft.faults.spec import parse_fault

FIRST, APART = 4, 3  # step of the first fault; whole steps between two, so that each falls into healthy training


def in_a_row(kinds: Sequence[str], ranks: Sequence[int], phases: Sequence[str]) -> tuple[str, ...]:
    """A fault for each phase, in steps 4, 7, 10, ...; of kinds and ranks as many are taken as there are phases.

    Once one falls into an evaluation or a save, only that step may be such a step: give each of both at most once.
    """
    chosen = zip(kinds, ranks, phases, strict=False)
    return tuple(f"{kind}@{rank}:{FIRST + APART * n}:{phase}" for n, (kind, rank, phase) in enumerate(chosen))


def went_on_after(fault: str) -> tuple[int, ...]:
    """The completed steps from which training may go on after a fault.

    Past the commit point every rank had final gradients: the step of the fault is finished, not computed again.
    """
    found = parse_fault(fault)
    if found.phase in ("update", "param-gather", "save", "eval"):
        return (found.step,)
    return (found.step - 1, found.step) if found.phase == "commit" else (found.step - 1,)


def assert_in_a_row(recoveries: Sequence[Mapping[str, Any]], strategy: str, faults: Sequence[str]) -> None:
    """Each fault was mended by itself, and training went on in the step in which it came."""
    assert [each["strategy"] for each in recoveries] == [strategy] * len(faults)
    for fault, each in zip(faults, recoveries, strict=True):
        assert each["step"] in went_on_after(fault), (fault, each)
