"""Hangs in simulated jobs: at every point of a step and of a repair, in all kinds of weather. All end, and no healthy
rank is ever killed, however uneven its steps are.

A failure prints its seed and scenario; `Simulation(draw_hang(seed, ...)).run()` plays it again.
"""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_tft.engine import machine, watch

from .layout import HANGING_POINTS, HANGS, REPAIR_POINTS, Agent, Fault, Layout, Scenario
from .oracle import judge
from .scenarios import CALM, WILD, draw_hang
from .simulation import Simulation
from .test_simulation import SMALL, WEATHERS, play

STEP = 15  # after the warm-up


def hanging(seed: int, *faults: Fault, layout: Layout = SMALL, **more: Any) -> Scenario:
    more.setdefault("last_step", STEP + 3)
    return Scenario(seed, layout, faults, watch=True, **more)


def outcome(simulation: Simulation) -> tuple[str, list[str]]:
    return simulation.closed[0][1].outcome, [done.outcome for _, done in simulation.recovered]


@pytest.mark.parametrize("kind", HANGS)
@pytest.mark.parametrize("point", HANGING_POINTS)
def test_a_hang_anywhere_in_a_step_is_ended_and_no_step_is_lost(point: str, kind: str) -> None:
    for rank in range(1, SMALL.world_size + 1, 3):
        fault = Fault(kind, f"{point}@{STEP}", rank, 0.004 * (rank % 2))
        simulation = play(hanging(rank, fault, agent=Agent()))
        assert outcome(simulation) == ("finished", ["rebooted"]), f"{simulation.scenario}: {simulation.closed}"
        assert [victim.number for victim in simulation.killed], "it was not killed, but came out of it"
        simulation = play(hanging(rank, fault))
        assert outcome(simulation) == ("dumped", []), f"{simulation.scenario}: {simulation.closed}"
        assert simulation.closed[0][1].step in (STEP - 1, STEP)


@pytest.mark.parametrize("point", ["stopping", "reported", *REPAIR_POINTS])
def test_a_hang_while_another_rank_is_replaced(point: str) -> None:
    for kind in (*HANGS, "hang"):
        for count in (1, 3):
            layout = Layout(parts=2, d=6, n=3, per_host=1)
            faults = (Fault("kill", "commit@2", 3, 0.002), Fault(kind, point, count))
            simulation = play(hanging(count, *faults, layout=layout, agent=Agent(), last_step=5))
            if len(simulation.struck) == 2 and simulation.recovered:
                assert simulation.killed, f"{simulation.scenario}: {simulation.timeline}"


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("kind", [*HANGS, "hang"])
def test_who_does_not_hear_the_stop_is_replaced_too(kind: str, ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the control: without that rule the job ends in a dump."""
    if not ended:
        monkeypatch.setattr(machine.Engine, "_may_end_silent", lambda self: False)
    layout = Layout(parts=2, d=6, n=3, per_host=1)
    for count in (1, 4, 8):
        faults = (Fault("kill", "commit@2", 3, 0.002), Fault(kind, "stopping", count))
        simulation = play(hanging(count, *faults, layout=layout, agent=Agent(), last_step=5))
        expected = ("finished", ["rebooted"]) if ended else ("dumped", [])
        assert outcome(simulation) == expected, f"{simulation.scenario}: {simulation.closed}"
        assert len(simulation.killed) == ended


@pytest.mark.parametrize("agent", [None, Agent()])
def test_a_healthy_job_is_left_alone(agent: Agent | None) -> None:
    for seed in range(12):
        simulation = play(hanging(seed, agent=agent, uneven=True, last_step=150))
        assert outcome(simulation) == ("finished", [])
        assert simulation.stopped_at is None and not simulation.killed


@pytest.mark.parametrize("weather", WEATHERS)
def test_a_healthy_job_in_bad_weather(weather: str) -> None:
    for seed in range(8):
        simulation = Simulation(hanging(seed, uneven=True, last_step=100, weather=WEATHERS[weather])).run()
        assert not simulation.violations and not simulation.killed
        assert simulation.stopped_at is None, simulation.engine.timeline


@pytest.mark.parametrize("weather", WEATHERS)
def test_drawn_scenarios(weather: str) -> None:
    for seed in range({"calm": 150, "wild": 100, "lossy": 30}[weather]):
        play(draw_hang(seed, WEATHERS[weather]))


@pytest.mark.full
@pytest.mark.parametrize("weather", WEATHERS)
def test_many_drawn_scenarios(weather: str) -> None:
    for seed in range(1000, 5000):
        play(draw_hang(seed, WEATHERS[weather]))


def test_drawn_scenarios_are_worth_drawing() -> None:
    """Guards the test above: most hangs are ended, and many of the jobs train on."""
    runs = [play(draw_hang(seed)) for seed in range(80)]
    assert sum(bool(run.killed) for run in runs) > 50
    assert sum("rebooted" in outcome(run)[1] for run in runs) > 25
    assert sum(outcome(run)[0] == "dumped" for run in runs) > 10


# ------------------------------------------------------------------------------------------------ controls


def all_who_are_alive(self: watch.Watch) -> dict[int, str]:
    standing = self._standing
    return dict.fromkeys(self._roster.alive, "it stands") if (self.limit or 1e9) < standing else {}


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "nobody looks": (watch.Watch, "look", lambda self: None),
    "everybody is suspected": (watch.Watch, "_stuck", all_who_are_alive),
    "pauses are steps": (watch, "STEPPING", watch.STEPPING | {"between-steps"}),
    "mute ranks are overlooked": (watch.Watch, "_mute", lambda self: {}),
    "stuck ranks are overlooked": (watch.Watch, "_stuck", lambda self: {}),
}


def caught(scenario: Scenario) -> bool:
    simulation = Simulation(scenario).run()
    return bool(judge(simulation)) or (not scenario.faults and bool(simulation.killed))


@pytest.mark.parametrize("rule", BROKEN)
def test_the_simulator_catches_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BROKEN[rule]
    monkeypatch.setattr(where, name, broken)
    for seed in range(150):
        if caught(draw_hang(seed, WILD if seed % 2 else CALM)):
            return
        if rule == "pauses are steps" and caught(hanging(seed, uneven=True, last_step=150)):
            return
    pytest.fail("150 scenarios did not show the broken rule")
