"""Nothing but a proof is called exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindspeed_tft.faults.spec import parse_fault
from mindspeed_tft.faults.verdict import (
    Compared,
    Evidence,
    Recovery,
    Verdict,
    judge,
    possible_steps,
    resumed_at,
    steps_lost,
)

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


ONLINE = Evidence(
    preset="retry",
    ordered=(parse_fault("uce@1:7:backward"),),
    fired=(parse_fault("uce@1:7:backward"),),
    steps=12,
    faulty_exit=0,
    completed=12,
    saved=12,
    recoveries=(Recovery("retry", 6),),
    comparisons=EQUAL[1:],
)
# The job could not be repaired and was saved; stock Megatron went on from there.
FELL_BACK = replace(GOOD, preset="retry", ordered=ONLINE.ordered, fired=ONLINE.fired, recoveries=(Recovery("dump", 6),))


def test_a_proven_repair_is_exact() -> None:
    assert judge(ONLINE) == (Verdict.EXACT, ())
    assert (steps_lost(ONLINE), resumed_at(ONLINE)) == (0, 6)
    several = (Recovery("retry", 6), Recovery("retry", 8))
    assert judge(replace(ONLINE, recoveries=several))[0] is Verdict.EXACT


@pytest.mark.parametrize(
    ("change", "word", "reason"),
    [
        ({"fired": ()}, Verdict.LOST, "no fault fired"),
        ({"ordered": (*ONLINE.ordered, parse_fault("link@2:9:data"))}, Verdict.LOST, "did not fire, so not rehearsed"),
        ({"saved": None}, Verdict.LOST, "its last checkpoint is None"),
        ({"saved": 6}, Verdict.LOST, "its last checkpoint is 6, not step 12"),
        ({"comparisons": ()}, Verdict.INEXACT, "end: was not compared"),
        ({"comparisons": EQUAL[:1]}, Verdict.INEXACT, "end: was not compared"),
        ({"comparisons": (Compared("end", 0, 0, 0),)}, Verdict.INEXACT, "no tensor"),
        ({"comparisons": (Compared("end", 37, 1000, 2, "x: 1"),)}, Verdict.INEXACT, "x: 1"),
        ({"compare": False}, Verdict.INEXACT, "--no-compare"),
        ({"recoveries": ()}, Verdict.DEGRADED, "told: none at all"),
        ({"recoveries": (Recovery("none", -1),)}, Verdict.DEGRADED, "told: none"),
        ({"computed_again": 1}, Verdict.DEGRADED, "1 completed steps"),
        ({"restarted": (1, 2)}, Verdict.DEGRADED, "ranks 1 2 were started again, though nothing ended them"),
        ({"leftover": ("17 python",)}, Verdict.DEGRADED, "17 python"),
    ],
)
def test_whatever_a_repair_lacks_is_named(change: dict[str, Any], word: Verdict, reason: str) -> None:
    found, reasons = judge(replace(ONLINE, **change))
    assert found is word
    assert any(reason in text for text in reasons), reasons


@pytest.mark.parametrize(
    ("change", "word", "reason"),
    [
        ({}, Verdict.DEGRADED, "ended with exit status 1 and a checkpoint"),
        ({"completed": 7}, Verdict.DEGRADED, "1 completed steps"),
        ({"resumed_exit": 1}, Verdict.LOST, "exit status 1"),
        ({"saved": None}, Verdict.LOST, "no checkpoint"),
        ({"faulty_exit": None}, Verdict.LOST, "deadline"),
        ({"comparisons": EQUAL[:1]}, Verdict.INEXACT, "end: was not compared"),
        ({"reported": 5}, Verdict.INEXACT, "names step 5"),
    ],
)
def test_a_dump_in_the_place_of_a_repair_is_judged_as_a_dump_but_never_exact(
    change: dict[str, Any], word: Verdict, reason: str
) -> None:
    found, reasons = judge(replace(FELL_BACK, **change))
    assert found is word
    assert any(reason in text for text in reasons), reasons


BACK = (Recovery("rewind", 4, (5, 6)),)
# Two of the steps had to be computed again from the checkpoint of step 4; that is all that these faults can have.
REWOUND = replace(ONLINE, recoveries=BACK, computed_again=2)
NAN = (parse_fault("nan@1:7:backward"),)


@pytest.mark.parametrize("promise", [{"replicas": 1}, {"ordered": NAN, "fired": NAN}])
def test_a_rewind_is_exact_where_nothing_better_can_be_promised(promise: dict[str, Any]) -> None:
    seen = replace(REWOUND, **promise)
    assert judge(seen) == (Verdict.EXACT, ())
    assert (steps_lost(seen), resumed_at(seen)) == (2, 4)
    # Step 7 was past its commit, so for the incident it was complete, but no rank had ended it.
    beyond = replace(seen, recoveries=(Recovery("rewind", 4, (5, 6, 7)),))
    assert judge(beyond) == (Verdict.EXACT, ())
    assert steps_lost(beyond) == 3
    # The same steps twice, when the gradient is corrupted once more.
    assert judge(replace(seen, recoveries=BACK * 2))[0] is Verdict.EXACT
    # A fault that damages nothing is repaired as always, and costs no step.
    assert judge(replace(ONLINE, **promise))[0] is Verdict.EXACT
    assert judge(replace(ONLINE, computed_again=1, **promise))[0] is Verdict.DEGRADED


@pytest.mark.parametrize(
    ("change", "word", "reason"),
    [
        (
            {"computed_again": 3},
            Verdict.INEXACT,
            "tell of 2 completed steps to be computed again (after step 4), but 3",
        ),
        ({"computed_again": 0}, Verdict.INEXACT, "but 0 were"),
        ({"comparisons": (Compared("end", 37, 1000, 2, "x: 1"),)}, Verdict.INEXACT, "x: 1"),
        ({"recoveries": ()}, Verdict.DEGRADED, "told: none at all"),
        ({"restarted": (1,)}, Verdict.DEGRADED, "ranks 1 were started again"),
        ({"saved": 4}, Verdict.LOST, "its last checkpoint is 4"),
    ],
)
def test_a_rewind_has_to_be_proved_as_well(change: dict[str, Any], word: Verdict, reason: str) -> None:
    found, reasons = judge(replace(REWOUND, replicas=1, **change))
    assert found is word
    assert any(reason in text for text in reasons), reasons


REBORN = replace(
    ONLINE,
    preset="recover",
    ordered=GOOD.fired,
    fired=GOOD.fired,
    recoveries=(Recovery("recover", 6),),
    restarted=(1,),
)


def test_a_proven_reboot_is_exact() -> None:
    assert judge(REBORN) == (Verdict.EXACT, ())
    assert (steps_lost(REBORN), resumed_at(REBORN), REBORN.victims) == (0, 6, (1,))


@pytest.mark.parametrize(
    ("faults", "strategies", "restarted"),
    [
        (["segv@3:7:commit"], ["recover"], (3,)),
        (["exc@0:7:save"], ["recover"], (0,)),
        (["oom@2:7:eval"], ["recover"], (2,)),
        (["kill@1:4:data", "kill@1:9:data"], ["recover", "recover"], (1,)),
        (["kill@1:7:data", "kill@2:7:rollback"], ["recover"], (1, 2)),
        (["uce@1:4:data", "kill@2:8:data"], ["retry", "recover"], (2,)),
        (["uce@1:7:data", "segv@2:7:repair"], ["recover"], (2,)),
        # An order that fails is tried again, and so is a step that no process died of.
        (["kill@1:7:data", "exc@2:7:rollback"], ["recover"], (1,)),
        (["link@1:7:data"], ["retry"], ()),
    ],
)
def test_exactly_those_ranks_are_started_again_whose_process_ended(
    faults: list[str], strategies: list[str], restarted: tuple[int, ...]
) -> None:
    given = tuple(parse_fault(text) for text in faults)
    told = tuple(Recovery(strategy, 6) for strategy in strategies)
    seen = replace(REBORN, ordered=given, fired=given, recoveries=told, restarted=restarted)
    assert judge(seen) == (Verdict.EXACT, ())
    for wrong in ((*restarted, 9), restarted[1:]):
        if wrong != restarted:
            assert judge(replace(seen, restarted=wrong))[0] is Verdict.DEGRADED


@pytest.mark.parametrize(
    ("change", "word", "reason"),
    [
        ({"restarted": (0, 1)}, Verdict.DEGRADED, "ranks 0 were started again, though nothing ended them"),
        ({"restarted": ()}, Verdict.DEGRADED, "no step tells of another process of ranks 1"),
        ({"recoveries": (Recovery("retry", 6),)}, Verdict.DEGRADED, "a recovery by recover (told: retry)"),
        ({"computed_again": 1}, Verdict.DEGRADED, "1 completed steps"),
        (
            {"computed_again": 2, "recoveries": (Recovery("recover", 4, (5, 6)),)},
            Verdict.DEGRADED,
            "the state came from a checkpoint, not from replicas (told: recover)",
        ),
        ({"leftover": ("17 python",)}, Verdict.DEGRADED, "17 python"),
        ({"comparisons": (Compared("end", 37, 1000, 2, "x: 1"),)}, Verdict.INEXACT, "x: 1"),
        ({"saved": 6}, Verdict.LOST, "not step 12"),
    ],
)
def test_whatever_a_reboot_lacks_is_named(change: dict[str, Any], word: Verdict, reason: str) -> None:
    found, reasons = judge(replace(REBORN, **change))
    assert found is word
    assert any(reason in text for text in reasons), reasons


def test_without_replicas_a_reboot_may_go_back_to_a_checkpoint() -> None:
    seen = replace(REBORN, replicas=1, recoveries=(Recovery("recover", 4, (5, 6)),), computed_again=2)
    assert judge(seen) == (Verdict.EXACT, ())
    assert steps_lost(seen) == 2
    assert judge(replace(seen, computed_again=3))[0] is Verdict.INEXACT


def test_a_death_that_preset_retry_cannot_repair_is_no_reason_to_start_anybody_again() -> None:
    assert replace(REBORN, preset="retry").victims == ()
    assert replace(REBORN, per_node=2, takes_nodes=True).victims == (0, 1)


def test_with_replicas_a_rewind_is_a_weaker_strategy() -> None:
    found, reasons = judge(REWOUND)
    assert found is Verdict.DEGRADED
    assert reasons == (
        "no incident report tells of a recovery by retry (told: rewind)",
        "the state came from a checkpoint, not from replicas (told: rewind)",
        "2 completed steps had to be computed again",
    )
    later = replace(REWOUND, recoveries=(Recovery("retry", 3), *BACK))
    assert judge(later)[1][0] == "the state came from a checkpoint, not from replicas (told: retry rewind)"


def test_a_fault_that_was_to_come_twice_and_came_once_was_not_rehearsed() -> None:
    twice = ONLINE.fired * 2
    assert judge(replace(ONLINE, ordered=twice, fired=twice))[0] is Verdict.EXACT
    found, reasons = judge(replace(ONLINE, ordered=twice))
    assert found is Verdict.LOST
    assert reasons == ("did not fire, so not rehearsed: uce@1:7:backward",)


def test_the_first_fault_says_nothing_of_the_dump_when_it_was_repaired() -> None:
    later = replace(FELL_BACK, saved=9, reported=9, completed=9, resumed_first=10)
    assert any("step 9 was saved" in text for text in judge(later)[1])
    repaired = replace(later, recoveries=(Recovery("retry", 6), Recovery("dump", 9)))
    assert judge(repaired)[1] == ("the job ended with exit status 1 and a checkpoint",)
    assert (steps_lost(repaired), resumed_at(repaired)) == (0, 9)


def test_steps_that_were_computed_twice_in_the_job_count_as_lost() -> None:
    assert steps_lost(replace(ONLINE, computed_again=2)) == 2
    assert steps_lost(replace(FELL_BACK, computed_again=1, completed=8)) == 3


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
        (["uce@1:7:save"], (7,)),
        (["link@1:7:eval"], (7,)),
        (["kill@1:8:backward", "kill@2:7:update"], (7,)),
        (["kill@1:7:update", "kill@2:7:forward"], (6,)),
        (["uce@1:7:forward", "kill@2:7:rollback"], (6,)),
        (["kill@2:7:repair", "uce@1:7:update"], (7,)),
    ],
)
def test_the_phase_of_the_first_fault_says_which_step_can_be_saved(faults: list[str], steps: tuple[int, ...]) -> None:
    assert possible_steps([parse_fault("term@1:7:clip")]) == (6, 7, 8)
    assert possible_steps([parse_fault(text) for text in faults]) == steps


def test_steps_are_lost_when_a_completed_one_was_not_saved() -> None:
    assert steps_lost(replace(GOOD, completed=9)) == 3
    assert steps_lost(replace(GOOD, completed=5)) == 0
    assert steps_lost(replace(GOOD, saved=None)) is None


def test_exit_statuses_are_those_of_the_interface() -> None:
    assert {word.value: word.exit_status for word in Verdict} == {"exact": 0, "inexact": 3, "degraded": 4, "lost": 5}
