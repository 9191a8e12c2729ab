"""The controller dies, too: another engine takes over in the middle of anything, knowing no more than who takes part.

A failure prints its seed and scenario; `Simulation(with_takeovers(seed, ...)).run()` plays it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from .layout import DUMP_POINTS, REPAIR_POINTS, REWIND_POINTS, STEP_POINTS, Agent, Fault, Scenario
from .scenarios import CALM, LOSSY, WILD, Weather, draw, draw_recover, draw_rewind
from .simulation import Simulation
from .test_simulation import SMALL, THREEFOLD, play

WEATHERS = {"calm": CALM, "wild": WILD, "lossy": LOSSY}
DRAWS: dict[str, Callable[..., Scenario]] = {"dump": draw, "recover": draw_recover, "rewind": draw_rewind}
POINTS = ("stopping", "reported", *DUMP_POINTS, *REPAIR_POINTS, *REWIND_POINTS, *(f"{p}@2" for p in STEP_POINTS))


def with_takeovers(seed: int, kind: str, weather: Weather = CALM) -> Scenario:
    """A drawn job whose controller dies once or twice, at any point."""
    scenario = DRAWS[kind](seed, weather)
    rng = random.Random(seed * 86_028_121 + 13)
    world = scenario.layout.world_size
    # What one rank says keeps its order: a controller that knows nothing relies on that.
    kinds = ("takeover",) if weather.reorder else ("takeover", "takeover", "amnesia")
    lost = tuple(
        Fault(
            rng.choice(kinds),
            rng.choice(POINTS),
            rng.randint(1, world),
            rng.choice((0.0, rng.random())),
        )
        for _ in range(rng.choice((1, 1, 2)))
    )
    return replace(scenario, faults=(*scenario.faults, *lost))


def outcome(simulation: Simulation) -> str:
    return simulation.closed[0][1].outcome


@pytest.mark.parametrize("point", ["stopping", "reported", *DUMP_POINTS])
def test_a_dump_survives_the_controller(point: str) -> None:
    took = 0
    for count in range(1, 5):
        faults = (Fault("kill", "update@2", 3), Fault("takeover", point, count))
        simulation = play(Scenario(count, THREEFOLD, faults))
        assert outcome(simulation) in ("dumped", "exists"), f"{simulation.scenario}: {simulation.closed}"
        took += simulation.takeovers
    assert took or point.endswith("finish_update")


@pytest.mark.parametrize("point", ["stopping", "reported", *REPAIR_POINTS])
def test_a_reboot_survives_the_controller(point: str) -> None:
    took = 0
    for count in (1, 2, 5, 8):
        faults = (Fault("kill", "update@2", 3), Fault("takeover", point, count))
        simulation = play(Scenario(count, SMALL, faults, last_step=5, agent=Agent()))
        assert outcome(simulation) == "finished", f"{simulation.scenario}: {simulation.closed}"
        took += simulation.takeovers
    assert took or point.endswith("finish_update")


@pytest.mark.parametrize(
    "point", ["stopping", "reported", "order:regroup", "order:repair", "done:rollback", "reduce@2"]
)
def test_a_reboot_survives_all_controllers(point: str) -> None:
    for count in (1, 2, 5):
        faults = (Fault("kill", "update@2", 3), Fault("amnesia", point, count))
        simulation = play(Scenario(count, SMALL, faults, last_step=5, agent=Agent()))
        assert outcome(simulation) == "finished", f"{simulation.scenario}: {simulation.closed}"


def test_a_fault_after_a_takeover_is_repaired_as_ever() -> None:
    for kind in ("kill", "memory", "link"):
        faults = (Fault("takeover", "reduce@2", 1), Fault(kind, "update@4", 3, 0.01))
        simulation = play(Scenario(7, SMALL, faults, last_step=8, agent=Agent(), retry=True))
        assert simulation.takeovers == 1
        assert outcome(simulation) == "finished"
        assert len(simulation.recovered) == 1


@pytest.mark.parametrize("weather", WEATHERS)
@pytest.mark.parametrize("kind", DRAWS)
def test_drawn_scenarios(kind: str, weather: str) -> None:
    for seed in range(150):
        play(with_takeovers(seed, kind, WEATHERS[weather]))


@pytest.mark.full
@pytest.mark.parametrize("weather", WEATHERS)
@pytest.mark.parametrize("kind", DRAWS)
def test_many_drawn_scenarios(kind: str, weather: str) -> None:
    for seed in range(1000, 5000):
        play(with_takeovers(seed, kind, WEATHERS[weather]))
