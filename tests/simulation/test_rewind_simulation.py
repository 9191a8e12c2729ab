"""Rewinds against simulated jobs that save from time to time: wrong numbers, and memory faults without replicas. Nobody
trains on with numbers that are known to be wrong, all ranks go on from one checkpoint, and the steps lost are told.

A failure prints its seed and scenario; `Simulation(draw_rewind(seed, ...)).run()` plays it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from mindspeed_tft.engine import machine, planning, repair
from mindspeed_tft.engine.types import RankReport

from .layout import REWIND_POINTS, SPOILING_FAULTS, STEP_POINTS, Fault, Layout, Scenario
from .oracle import judge
from .scenarios import CALM, WILD, draw_rewind
from .simulation import Simulation
from .test_simulation import SMALL, WEATHERS, large_run, play

BARE = Layout(parts=2, d=4, n=1, per_host=1)  # no replicas


def rewinding(seed: int, *faults: Fault, layout: Layout = SMALL, last_step: int = 6, **more: Any) -> Scenario:
    return Scenario(seed, layout, faults, last_step=last_step, retry=True, save_every=more.pop("save_every", 1), **more)


def outcome(simulation: Simulation) -> tuple[str, list[str]]:
    return simulation.closed[0][1].outcome, [done.outcome for _, done in simulation.recovered]


@pytest.mark.parametrize("kind", SPOILING_FAULTS)
@pytest.mark.parametrize("point", [*STEP_POINTS, "save", "saved"])
def test_wrong_numbers_anywhere_in_a_step_lead_back_to_a_good_checkpoint(point: str, kind: str) -> None:
    for rank in range(1, SMALL.world_size + 1):
        simulation = play(rewinding(rank, Fault(kind, f"{point}@4", rank, 0.002 * (rank % 2))))
        assert outcome(simulation) == ("finished", ["rewound"]), f"{simulation.scenario}: {simulation.closed}"
        assert simulation.recovered[0][1].step in (1, 2, 3)


@pytest.mark.parametrize("point", [*STEP_POINTS, "save", "saved"])
def test_a_memory_fault_without_replicas_leads_back_to_the_last_checkpoint(point: str) -> None:
    for rank in range(1, BARE.world_size + 1):
        simulation = play(rewinding(rank, Fault("memory", f"{point}@4", rank), layout=BARE))
        assert outcome(simulation) == ("finished", ["rewound"]), f"{simulation.scenario}: {simulation.closed}"
        assert simulation.recovered[0][1].step in (3, 4)


@pytest.mark.parametrize("layout", [SMALL, BARE])
@pytest.mark.parametrize("point", REWIND_POINTS)
def test_a_second_fault_at_every_stage_of_the_rewind(point: str, layout: Layout) -> None:
    struck = 0
    for kind in ("memory", "link", "cut", "fail", "slow", "kill", "hang", "raise", *SPOILING_FAULTS):
        for count in (1, 2, 7):
            scenario = rewinding(count, Fault("corrupted", "update@4", 3), Fault(kind, point, count), layout=layout)
            simulation = play(scenario)
            struck += len(simulation.struck) == 2
            if kind in ("link", "cut", "fail", *SPOILING_FAULTS):
                assert outcome(simulation)[0] == "finished", f"{scenario}: {simulation.closed}"
    assert struck


def test_wrong_numbers_that_come_again_and_again_are_given_up() -> None:
    faults = [Fault("precision", "compute@5", count) for count in range(3, 150)]
    simulation = play(rewinding(1, *faults, last_step=8))
    assert outcome(simulation)[0] == "failed"
    steps = [done.step for _, done in simulation.recovered]
    assert 1 <= len(steps) <= repair.MAX_TRIES_AT_STEP
    assert "did not help" in simulation.closed[0][1].summary


@pytest.mark.parametrize("weather", WEATHERS)
def test_drawn_scenarios(weather: str) -> None:
    for seed in range({"calm": 300, "wild": 200, "lossy": 100}[weather]):
        play(draw_rewind(seed, WEATHERS[weather]))


@pytest.mark.full
@pytest.mark.parametrize("weather", WEATHERS)
def test_many_drawn_scenarios(weather: str) -> None:
    for seed in range(1000, 9000):
        play(draw_rewind(seed, WEATHERS[weather]))


def test_drawn_scenarios_are_worth_drawing() -> None:
    """Guards the test above: many are rewound, often at a later try, some several times; others are repaired."""
    runs = [play(draw_rewind(seed)) for seed in range(150)]
    done = [done for run in runs for _, done in run.recovered]
    assert sum(found.outcome == "rewound" for found in done) > 50
    assert sum(found.outcome == "rewound" and found.tries > 1 for found in done) > 20
    assert sum(found.outcome == "retried" for found in done) > 3
    assert sum(len(run.recovered) > 1 for run in runs) > 10
    assert sum(run.closed[0][1].outcome == "failed" for run in runs) > 20


def test_2048_ranks_are_rewound_twice() -> None:
    faults = (Fault("corrupted", "update@3", 100), Fault("link", "order:load", 1500))
    layout = Layout(parts=4, d=512, n=2, per_host=8)
    simulation, took = large_run(layout, faults, retry=True, last_step=4, save_every=1)
    assert outcome(simulation) == ("finished", ["rewound"])
    assert simulation.recovered[0][1].tries == 2
    assert sum(seconds for seconds, _ in took) < 10


# ------------------------------------------------------------------------------------------------ controls

_loadable = planning.loadable
_train_on = machine.Engine._train_on


def one_rank_is_enough(reports: Iterable[RankReport], most: int) -> tuple[int, ...]:
    return tuple(sorted({step for report in reports for step in report.checkpoints if step <= most}))


def lost_steps_are_lost_again(self: machine.Engine, done: repair.Repair) -> None:
    before = self._furthest
    _train_on(self, done)
    self._furthest = before


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "the checkpoint of S is good": (repair, "unspoiled", lambda reports, last: last),
    "any update may have been the last": (repair, "unspoiled", lambda reports, last: last - 1),
    "one rank that has it is enough": (repair, "loadable", one_rank_is_enough),
    "a half loaded job is repaired": (repair.Repairs, "_half_loaded", property(lambda self: False)),
    "what no checkpoint holds is left damaged": (repair, "plan_unowned", lambda *_: ()),
    "steps are lost twice": (machine.Engine, "_train_on", lost_steps_are_lost_again),
    "wrong numbers are repaired": (repair, "SPOILING", frozenset()),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_simulator_catches_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BROKEN[rule]
    monkeypatch.setattr(where, name, broken)
    if name == "SPOILING":
        monkeypatch.setattr(repair, "REPAIRABLE", repair.REPAIRABLE | {*SPOILING_FAULTS})
    for weather in (CALM, WILD):
        for seed in range(500):
            if judge(Simulation(draw_rewind(seed, weather)).run()):
                return
    pytest.fail("1000 scenarios did not show the broken rule")
