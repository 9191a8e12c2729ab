"""The engine's clock jumps by an hour, ahead or back, and its process is stopped for longer than any deadline, in the
middle of anything. Nothing of that is the fault of a rank: no healthy rank is killed or left out, no attempt is lost,
and everything still ends.

A failure prints its seed and scenario; `Simulation(with_jumps(seed, ...)).run()` plays it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mindspeed_tft.engine import desk, watch

from .layout import CLOCK_FAULTS, DUMP_POINTS, REPAIR_POINTS, REWIND_POINTS, STEP_POINTS, Agent, Fault, Scenario
from .oracle import judge
from .scenarios import CALM, LOSSY, WILD, Weather, draw, draw_hang, draw_recover, draw_retry, draw_rewind
from .simulation import Simulation
from .test_simulation import SMALL, THREEFOLD, play

WEATHERS = {"calm": CALM, "wild": WILD, "lossy": LOSSY}
DRAWS: dict[str, Callable[..., Scenario]] = {
    "dump": draw,
    "retry": draw_retry,
    "rewind": draw_rewind,
    "recover": draw_recover,
    "hang": draw_hang,
}
POINTS = ("stopping", "reported", *DUMP_POINTS, *REPAIR_POINTS, *REWIND_POINTS, *(f"{p}@2" for p in STEP_POINTS))


def with_jumps(seed: int, kind: str, weather: Weather = CALM) -> Scenario:
    """A drawn job whose controller's clock jumps, or stands still, once or twice."""
    scenario = DRAWS[kind](seed, weather)
    rng = random.Random(seed * 67_867_967 + 17)
    jumps = tuple(
        Fault(
            rng.choice(CLOCK_FAULTS),
            rng.choice(POINTS),
            rng.randint(1, scenario.layout.world_size),
            rng.choice((0.0, rng.random())),
        )
        for _ in range(rng.choice((1, 1, 2)))
    )
    return replace(scenario, faults=(*scenario.faults, *jumps))


def outcome(simulation: Simulation) -> str:
    return simulation.closed[0][1].outcome


@pytest.mark.parametrize("kind", CLOCK_FAULTS)
def test_a_jump_alone_stops_nobody(kind: str) -> None:
    for seed, point in enumerate(STEP_POINTS):
        faults = (Fault(kind, f"{point}@14", 1 + seed % SMALL.world_size), Fault(kind, f"{point}@18", 2))
        for watched in (True, False):
            scenario = Scenario(seed, SMALL, faults, last_step=30, watch=watched, agent=Agent(), uneven=True)
            simulation = Simulation(scenario).run()
            assert simulation.jumps == 2
            assert simulation.stopped_at is None, simulation.engine.timeline
            assert not simulation.violations and not simulation.killed
            assert outcome(simulation) == "finished"


@pytest.mark.parametrize("kind", CLOCK_FAULTS)
@pytest.mark.parametrize("point", ["stopping", "reported", *DUMP_POINTS])
def test_a_dump_survives_a_jump(point: str, kind: str) -> None:
    jumped = 0
    for count in range(1, 5):
        faults = (Fault("kill", "commit@2", 3, 0.002), Fault(kind, point, count, 0.01 * (count % 2)))
        simulation = play(Scenario(count, THREEFOLD, faults))
        assert outcome(simulation) == "dumped", f"{simulation.scenario}: {simulation.closed}"
        assert len(simulation.engine.incident()["attempts"]) == 1, "a jump costs no attempt"  # type: ignore[arg-type]
        assert not simulation.engine.incident()["silent"]
        jumped += simulation.jumps
    assert jumped or point.endswith("finish_update")


@pytest.mark.parametrize("kind", CLOCK_FAULTS)
@pytest.mark.parametrize("point", ["stopping", "reported", *REPAIR_POINTS])
def test_a_reboot_survives_a_jump(point: str, kind: str) -> None:
    for count in (1, 3, 8):
        faults = (Fault("kill", "update@2", 3), Fault(kind, point, count))
        simulation = play(Scenario(count, SMALL, faults, last_step=5, agent=Agent()))
        assert outcome(simulation) == "finished", f"{simulation.scenario}: {simulation.closed}"
        assert [done.tries for _, done in simulation.recovered] == [1], "a jump costs no try"


@pytest.mark.parametrize("weather", WEATHERS)
@pytest.mark.parametrize("kind", DRAWS)
def test_drawn_scenarios(kind: str, weather: str) -> None:
    if (kind, weather) == ("hang", "lossy"):
        pytest.skip("lost goodbyes make these runs long: see the full test")
    for seed in range(10 if kind == "hang" else 40):
        play(with_jumps(seed, kind, WEATHERS[weather]))


@pytest.mark.full
@pytest.mark.parametrize("weather", WEATHERS)
@pytest.mark.parametrize("kind", DRAWS)
def test_many_drawn_scenarios(kind: str, weather: str) -> None:
    for seed in range(1000, 3000):
        play(with_jumps(seed, kind, WEATHERS[weather]))


# ------------------------------------------------------------------------------------------------ controls


def all_time_counts(self: desk.Desk, at: float) -> float:
    self.at = self.now = max(self.now, at)
    return 0.0


def time_follows_the_clock(self: desk.Desk, at: float) -> float:
    self.at = self.now = at
    return 0.0


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "all time counts": (desk.Desk, "advance", all_time_counts),
    "time follows the clock": (desk.Desk, "advance", time_follows_the_clock),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_simulator_catches_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BROKEN[rule]
    monkeypatch.setattr(where, name, broken)
    for seed in range(100):
        if judge(Simulation(with_jumps(seed, "dump")).run()) or judge(Simulation(with_jumps(seed, "recover")).run()):
            return
    pytest.fail("200 scenarios did not show the broken rule")


def suspects_all_after_ten_minutes(self: watch.Watch) -> dict[int, str]:
    return dict.fromkeys(self._roster.alive, "it stands") if self._standing > 600 else {}


@pytest.mark.parametrize("guarded", [True, False])
def test_a_watch_that_trusts_the_clock_is_caught(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a watch that suspects everybody is not misled by a jump, unless both guards are taken away: the engine's
    time, and that the watch begins anew where nobody looked for a while."""
    monkeypatch.setattr(watch.Watch, "_stuck", suspects_all_after_ten_minutes)
    monkeypatch.setattr(watch.Watch, "_confirmed", lambda self, found: bool(found))
    if guarded:
        test_a_jump_alone_stops_nobody("ahead")
        return
    look = watch.Watch.look

    def without_guard(self: watch.Watch) -> Any:
        self._looked = None
        return look(self)

    monkeypatch.setattr(desk.Desk, "advance", all_time_counts)
    monkeypatch.setattr(watch.Watch, "look", without_guard)
    with pytest.raises(AssertionError):
        test_a_jump_alone_stops_nobody("ahead")
