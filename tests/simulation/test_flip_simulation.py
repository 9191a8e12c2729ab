"""Bits that flip silently in a shard, and then a fault that makes the shard wanted: by a dump, a repair, a newcomer, a
checkpoint. A flip after the last hash is noticed by whoever holds the shard, an older one by those that hold it too.

A failure prints its seed and scenario; `Simulation(with_flips(seed, ...)).run()` plays it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mindspeed_tft.engine import agreement

from .job import SimRank
from .layout import Agent, Fault, Layout, Scenario
from .oracle import judge
from .scenarios import CALM, LOSSY, WILD, Weather, draw, draw_recover, draw_retry, draw_rewind
from .simulation import Simulation
from .test_simulation import SMALL, THREEFOLD, play

WEATHERS = {"calm": CALM, "wild": WILD, "lossy": LOSSY}
DRAWS: dict[str, Callable[..., Scenario]] = {
    "dump": draw,
    "retry": draw_retry,
    "rewind": draw_rewind,
    "recover": draw_recover,
}
LATE = ("updated", "gather", "between")  # after the update of a step
EARLY = ("compute", "reduce", "clip", "entering", "commit", "passed")  # before it


def with_flips(seed: int, kind: str, weather: Weather = CALM) -> Scenario:
    """A drawn job in which one or two bits flip in the first steps."""
    scenario = DRAWS[kind](seed, weather)
    rng = random.Random(seed * 15_487_469 + 19)
    flips = tuple(
        Fault("flip", f"{rng.choice((*LATE, *EARLY))}@{rng.choice((1, 2, 3))}", rng.randint(1, 8), rng.random() * 0.01)
        for _ in range(rng.choice((1, 1, 2)))
    )
    return replace(scenario, faults=(*flips, *scenario.faults), hashes=("step", "stop")[seed % 2])


def outcome(simulation: Simulation) -> tuple[str, list[str]]:
    return simulation.closed[0][1].outcome, [done.outcome for _, done in simulation.recovered]


@pytest.mark.parametrize("point", LATE)
def test_the_other_holder_is_used(point: str) -> None:
    """The flipped rank is alive, trusted, and the natural source: nobody but its own hash speaks against it."""
    for count in range(1, SMALL.world_size + 1):
        flip = Fault("flip", f"{point}@2", count)
        simulation = play(Scenario(count, SMALL, (flip, Fault("raise", "reduce@3", 3)), hashes="step"))
        assert outcome(simulation) == ("dumped", []), f"{simulation.scenario}: {simulation.closed}"
        stop = Scenario(count, SMALL, (flip, Fault("link", "reduce@3", 3)), retry=True, last_step=5, hashes="step")
        simulation = play(stop)
        assert outcome(simulation) == ("finished", ["retried"]), f"{simulation.scenario}: {simulation.closed}"
        assert not any(rank.flips for rank in simulation.ranks)


@pytest.mark.parametrize("hashes", ["step", "stop"])
@pytest.mark.parametrize("layout", [THREEFOLD, Layout(1, 8, 4, 1)])
def test_the_majority_of_three_or_four_is_believed(layout: Layout, hashes: str) -> None:
    """The bit flipped an update ago: the rank's own hash is that of the flipped shard."""
    for count in range(1, layout.world_size + 1, 2):
        faults = (Fault("flip", "compute@2", count, 0.001), Fault("link", "reduce@4", 3))
        simulation = play(Scenario(count, layout, faults, retry=True, last_step=6, hashes=hashes))
        assert outcome(simulation) == ("finished", ["retried"]), f"{simulation.scenario}: {simulation.closed}"
        assert not any(rank.flips for rank in simulation.ranks)


def test_two_holders_that_differ_are_saved_by_nobody() -> None:
    for count in range(1, SMALL.world_size + 1):
        faults = (Fault("flip", "compute@2", count, 0.001), Fault("raise", "reduce@4", 3))
        simulation = play(Scenario(count, SMALL, faults, hashes="stop"))
        assert outcome(simulation) == ("failed", [])
        assert "nothing shows" in simulation.closed[0][1].summary
        rewound = replace(simulation.scenario, agent=Agent(), save_every=1, last_step=6)
        simulation = play(replace(rewound, faults=(faults[0], replace(faults[1], what="link"))))
        assert outcome(simulation)[0] == "finished"
        assert simulation.recovered[0][1].step <= 1, "the checkpoints since the flip differ between holders"


@pytest.mark.parametrize("weather", WEATHERS)
@pytest.mark.parametrize("kind", DRAWS)
def test_drawn_scenarios(kind: str, weather: str) -> None:
    for seed in range(40):
        play(with_flips(seed, kind, WEATHERS[weather]))


@pytest.mark.full
@pytest.mark.parametrize("weather", WEATHERS)
@pytest.mark.parametrize("kind", DRAWS)
def test_many_drawn_scenarios(kind: str, weather: str) -> None:
    for seed in range(1000, 5000):
        play(with_flips(seed, kind, WEATHERS[weather]))


# ------------------------------------------------------------------------------------------------ controls

BROKEN: dict[str, tuple[Any, str, Any]] = {
    "nobody is judged by its own hash": (agreement, "changed_shard", lambda report: ""),
    "holders are not compared": (agreement, "_compared", lambda *_: None),
    "ranks take no hash": (SimRank, "_digests", lambda self: {}),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_simulator_catches_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BROKEN[rule]
    monkeypatch.setattr(where, name, broken)
    for seed in range(300):
        for kind in DRAWS:
            if judge(Simulation(with_flips(seed, kind)).run()):
                return
    pytest.fail("1200 scenarios did not show the broken rule")
