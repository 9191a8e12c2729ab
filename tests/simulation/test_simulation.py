"""The engine against simulated jobs: faults at every point, further faults on top, bad networks, thousands of ranks.

A failure prints its seed and scenario; `Simulation(draw(seed, ...)).run()` plays it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mindspeed_tft.engine import agreement, dump
from mindspeed_tft.engine.types import Event, OrderKind, RankReport, Update

from .layout import DUMP_POINTS, FIRST_FAULTS, LATER_FAULTS, RECOVERY_POINTS, STEP_POINTS, Fault, Layout, Scenario
from .oracle import check, judge
from .scenarios import CALM, LOSSY, WILD, draw
from .simulation import Simulation

SMALL = Layout(parts=2, d=4, n=2, per_host=1)
THREEFOLD = Layout(parts=2, d=6, n=3, per_host=1)  # after two losses every shard has a holder left
LARGE = Layout(parts=8, d=512, n=2, per_host=8)
WEATHERS = {"calm": CALM, "wild": WILD, "lossy": LOSSY}


def play(scenario: Scenario) -> Simulation:
    simulation = Simulation(scenario).run()
    check(simulation)
    return simulation


def outcome(simulation: Simulation) -> str:
    return simulation.closed[0][1].outcome


@pytest.mark.parametrize("kind", FIRST_FAULTS)
@pytest.mark.parametrize("point", STEP_POINTS)
def test_one_fault_anywhere_in_a_step_loses_no_step(point: str, kind: str) -> None:
    for rank in range(1, SMALL.world_size + 1):
        for delay in (0.0, 0.004):
            simulation = play(Scenario(rank, SMALL, (Fault(kind, f"{point}@2", rank, delay),)))
            assert outcome(simulation) == "dumped", f"{simulation.scenario}: {simulation.closed}"
            assert simulation.closed[0][1].step in (1, 2)


@pytest.mark.parametrize("point", RECOVERY_POINTS)
@pytest.mark.parametrize("first", ["commit", "update", "gather"])
def test_a_second_fault_at_every_stage_of_the_dump(first: str, point: str) -> None:
    struck = 0
    for kind in sorted(set(LATER_FAULTS)):
        if kind in ("fail", "slow") and point not in DUMP_POINTS:
            continue  # these befall orders
        for count in (1, 2):
            faults = (Fault("kill", f"{first}@2", 3, 0.002), Fault(kind, point, count))
            simulation = play(Scenario(count, THREEFOLD, faults))
            assert outcome(simulation) in ("dumped", "exists"), f"{simulation.scenario}: {simulation.closed}"
            struck += len(simulation.struck) == 2
    torn = first == "commit"  # only a torn commit leaves updates to finish
    assert struck or (point.endswith("finish_update") and not torn), "no run came to this point"


@pytest.mark.parametrize("moment", ["order:publish", "renamed", "done:publish"])
def test_loss_of_the_publisher_before_during_and_after_the_rename(moment: str) -> None:
    faults = (Fault("kill", "update@2", 3), Fault("kill", moment))
    simulation = play(Scenario(1, THREEFOLD, faults))
    assert outcome(simulation) == ("exists" if moment == "done:publish" else "dumped")


@pytest.mark.parametrize("weather", WEATHERS)
def test_drawn_scenarios(weather: str) -> None:
    for seed in range({"calm": 700, "wild": 500, "lossy": 300}[weather]):
        play(draw(seed, WEATHERS[weather]))


@pytest.mark.full
@pytest.mark.parametrize("weather", WEATHERS)
def test_many_drawn_scenarios(weather: str) -> None:
    for seed in range(1000, 16_000):
        play(draw(seed, WEATHERS[weather]))


def test_drawn_scenarios_are_worth_drawing() -> None:
    """Guards the tests above: most runs end in a dump, several of them after a second attempt."""
    runs = [play(draw(seed, CALM)) for seed in range(200)]
    outcomes = [outcome(run) for run in runs]
    attempts = [len(run.engine.incident()["attempts"]) for run in runs]  # type: ignore[arg-type]
    assert outcomes.count("dumped") > 120
    assert outcomes.count("failed") > 5
    assert sum(count > 1 for count in attempts) > 10


@pytest.mark.parametrize("early_rng", [True, False])
@pytest.mark.parametrize("point", STEP_POINTS)
def test_the_dump_has_the_random_state_of_the_first_rank_of_each_part(point: str, early_rng: bool) -> None:
    for drifted in (0, 3, 6):  # the oracle compares with what the first rank drew, drifted or not
        scenario = Scenario(
            drifted, SMALL, (Fault("raise", f"{point}@2", 5, 0.002),), early_rng=early_rng, drifted=drifted
        )
        assert outcome(play(scenario)) == "dumped"


def test_without_the_first_rank_a_random_state_that_left_the_others_is_never_dumped() -> None:
    refused = 0
    for seed in range(40):
        drifted = SMALL.parts + seed % (SMALL.world_size - SMALL.parts)  # not a first rank
        simulation = Simulation(Scenario(seed, SMALL, (), drifted=drifted))
        simulation.after(0.6 + 0.01 * seed, simulation.ranks[drifted % SMALL.parts].kill)
        simulation.run()
        assert judge(simulation) == [], seed
        assert outcome(simulation) in ("failed", "finished"), seed
        refused += "not provably one state" in simulation.closed[0][1].summary
    assert refused > 10


def test_a_fault_before_everybody_registered_ends_the_job_without_a_dump() -> None:
    for seed in range(30):
        simulation = Simulation(Scenario(seed, SMALL, (), reborn=seed % 2 == 0))
        simulation.after(0.1, simulation.ranks[seed % SMALL.world_size].kill)
        simulation.run()
        check(simulation)
        assert simulation.disk.published == []
        assert outcome(simulation) == "failed"


# ------------------------------------------------------------------------------------------------ size


def large_run(layout: Layout, faults: tuple[Fault, ...], **more: Any) -> tuple[Simulation, list[tuple[float, str]]]:
    """The run, and for each event the CPU seconds that the engine took: other load on the machine must not matter."""
    simulation = Simulation(Scenario(7, layout, faults, **more))
    handle = simulation.engine.handle
    took: list[tuple[float, str]] = []

    def timed(event: Event) -> Any:
        start = time.process_time()
        actions = handle(event)
        took.append((time.process_time() - start, type(event).__name__))
        return actions

    simulation.engine.handle = timed  # type: ignore[method-assign]
    simulation.run()
    check(simulation)
    return simulation, took


def test_4096_ranks_lose_a_host_in_the_update_and_a_writer_in_the_dump() -> None:
    faults = (Fault("kill_host", "update@2", 100), Fault("kill", "order:write_part", 3))
    simulation, took = large_run(LARGE, faults)
    assert outcome(simulation) == "dumped"
    assert sum(seconds for seconds, _ in took) < 10  # about one second here; a quadratic engine takes minutes
    assert simulation.closed[0][1].step == 2


@pytest.mark.full
def test_large_jobs_with_drawn_faults() -> None:
    for seed in range(40):
        play(draw(seed, CALM, LARGE))


# ------------------------------------------------------------------------------------------------ controls


def s_is_the_minimum(reports: dict[int, RankReport], registered: Any, departed: Any) -> agreement.Agreement:
    found = agreement.agree(reports, registered)
    steps = [agreement.completed(report) for report in reports.values() if report.trusted]
    return agreement.revise(replace(found, step=min(steps, default=-1)), reports, registered)


_offer_at = agreement._offer_at


def dirty_is_good_enough(report: RankReport, where: str) -> agreement.Offer:
    if report.update is Update.DIRTY:
        return agreement.Offer(agreement.Means.AS_IS, where)
    return _offer_at(report, where)


def nobody_finishes(report: RankReport, where: str) -> agreement.Offer:
    offer = _offer_at(report, where)
    return agreement.Offer(agreement.Means.AS_IS, where) if offer.means is agreement.Means.FINISH_UPDATE else offer


def everybody_discards(self: dump.Dump, attempt: dump.Attempt) -> None:
    """Also while a publication may be running."""
    for rank in sorted(attempt.touched & self._roster.alive):
        self._desk.issue(rank, OrderKind.DISCARD, {"directory": attempt.directory})


def waits_for_ever(self: dump.Dump) -> None:
    """No order ever times out."""


BROKEN: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "S is the minimum": (dump, "agree", s_is_the_minimum),
    "a dirty shard is a source": (agreement, "_offer_at", dirty_is_good_enough),
    "nobody finishes an update": (agreement, "_offer_at", nobody_finishes),
    "everybody discards": (dump.Dump, "_discard", everybody_discards),
    "orders have no deadline": (dump.Dump, "_time_out", waits_for_ever),
    "a random state is not compared": (dump, "rng_conflict", lambda *_: ""),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_simulator_catches_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BROKEN[rule]
    monkeypatch.setattr(where, name, broken)
    if name == "rng_conflict":
        monkeypatch.setattr("mindspeed_tft.engine.planning.rng_conflict", broken)
    for seed in range(600):
        scenario = draw(seed, CALM)
        if name == "rng_conflict":
            scenario = replace(scenario, drifted=seed % scenario.layout.world_size)
        if judge(Simulation(scenario).run()):
            return
    pytest.fail("600 scenarios did not show the broken rule")
