"""Nothing but a proof is called exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindspeed_tft.faults.spec import parse_fault
from mindspeed_tft.faults.verdict import Compared, Evidence, Verdict, judge, possible_steps, steps_lost

EQUAL = (Compared("dump", 37, 1000, 0), Compared("end", 37, 1000, 0))
GOOD = Evidence(
    fired=(parse_fault("kill@1:7:backward"),),
    steps=12,
    faulty_exit=1,
    completed=6,
    saved=6,
    reported=6,
    resumed_exit=0,
    resumed_first=7,
    comparisons=EQUAL,
)


def test_a_proven_recovery_is_exact() -> None:
    assert judge(GOOD) == (Verdict.EXACT, ())
    assert steps_lost(GOOD) == 0


@pytest.mark.parametrize(
    ("change", "word", "reason"),
    [
        ({"fired": ()}, Verdict.LOST, "no fault fired"),
        ({"faulty_exit": None}, Verdict.LOST, "deadline"),
        ({"faulty_exit": 0}, Verdict.LOST, "exit status 0"),
        ({"saved": None}, Verdict.LOST, "no checkpoint"),
        ({"resumed_exit": None}, Verdict.LOST, "deadline"),
        ({"resumed_exit": 1}, Verdict.LOST, "exit status 1"),
        ({"comparisons": ()}, Verdict.INEXACT, "dump: was not compared"),
        ({"comparisons": EQUAL[:1]}, Verdict.INEXACT, "end: was not compared"),
        ({"comparisons": (EQUAL[0], Compared("end", 0, 0, 0))}, Verdict.INEXACT, "no tensor"),
        ({"comparisons": (EQUAL[0], Compared("end", 37, 0, 0))}, Verdict.INEXACT, "no tensor"),
        ({"comparisons": (Compared("dump", 37, 1000, 1, "x: 1"), EQUAL[1])}, Verdict.INEXACT, "x: 1"),
        ({"compare": False, "comparisons": ()}, Verdict.INEXACT, "--no-compare"),
        ({"resumed_first": 6}, Verdict.INEXACT, "went on at step 6"),
        ({"completed": 7}, Verdict.DEGRADED, "1 completed steps"),
        ({"resumed_first": None}, Verdict.DEGRADED, "not known"),
        ({"leftover": ("17 python",)}, Verdict.DEGRADED, "17 python"),
        ({"fired": (parse_fault("kill@1:7:update"),)}, Verdict.DEGRADED, "step 7 to be saved"),
        ({"saved": 5, "reported": 5, "resumed_first": 6}, Verdict.DEGRADED, "step 5 was saved"),
        ({"reported": 5}, Verdict.INEXACT, "the incident report names step 5"),
        ({"reported": None}, Verdict.DEGRADED, "no incident report"),
    ],
)
def test_whatever_is_missing_is_named(change: dict[str, Any], word: Verdict, reason: str) -> None:
    found, reasons = judge(replace(GOOD, **change))
    assert found is word
    assert any(reason in text for text in reasons), reasons


def test_the_worst_finding_decides() -> None:
    seen = replace(GOOD, completed=8, comparisons=(Compared("dump", 37, 1000, 1, "x"), EQUAL[1]))
    assert judge(seen)[0] is Verdict.INEXACT
    assert judge(replace(seen, resumed_exit=1))[0] is Verdict.LOST


@pytest.mark.parametrize(
    ("faults", "steps"),
    [
        (["kill@1:7:data"], (6,)),
        (["kill@1:7:backward"], (6,)),
        (["kill@1:7:clip"], (6,)),
        (["kill@1:7:commit"], (6, 7)),
        (["kill@1:7:update"], (7,)),
        (["kill@1:7:param-gather"], (7,)),
        (["kill@1:8:backward", "kill@2:7:update"], (7,)),
        (["kill@1:7:update", "kill@2:7:forward"], (6,)),
    ],
)
def test_the_phase_of_the_first_fault_says_which_step_can_be_saved(faults: list[str], steps: tuple[int, ...]) -> None:
    assert possible_steps([parse_fault(text) for text in faults]) == steps


def test_steps_are_lost_when_a_completed_one_was_not_saved() -> None:
    assert steps_lost(replace(GOOD, completed=9)) == 3
    assert steps_lost(replace(GOOD, completed=5)) == 0
    assert steps_lost(replace(GOOD, saved=None)) is None


def test_exit_statuses_are_those_of_the_interface() -> None:
    assert {word.value: word.exit_status for word in Verdict} == {"exact": 0, "inexact": 3, "degraded": 4, "lost": 5}
