"""Online repair against simulated jobs: faults at every point of a step and of a repair, many in one job, thousands of
ranks. Every rank that trains on after a repair has all its shards, clean, at the one step S.

A failure prints its seed and scenario; `Simulation(draw_retry(seed, ...)).run()` plays it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mindspeed_tft.engine import agreement, machine, planning, repair
from mindspeed_tft.engine.types import RankReport

from .layout import LATER_FAULTS, REPAIR_POINTS, REPAIRABLE_FAULTS, STEP_POINTS, Fault, Layout, Scenario
from .oracle import judge
from .scenarios import CALM, WILD, draw_retry
from .simulation import Simulation
from .test_simulation import SMALL, THREEFOLD, WEATHERS, dirty_is_good_enough, large_run, nobody_finishes, play

FLAPPING = ("reduce", "clip", "commit", "gather")  # where a connection can break under a rank


def retry(seed: int, *faults: Fault, last_step: int = 5, **more: Any) -> Scenario:
    return Scenario(seed, more.pop("layout", SMALL), faults, last_step=last_step, retry=True, **more)


def outcome(simulation: Simulation) -> tuple[str, int]:
    """How it ended, and after how many repairs."""
    return simulation.closed[0][1].outcome, len(simulation.recovered)


@pytest.mark.parametrize("kind", REPAIRABLE_FAULTS)
@pytest.mark.parametrize("point", STEP_POINTS)
def test_one_fault_anywhere_in_a_step_is_repaired(point: str, kind: str) -> None:
    if kind == "flap" and point not in FLAPPING:
        pytest.skip("nobody is in a collective there")
    for rank in range(1, SMALL.world_size + 1):
        for step in (1, 3):
            for delay in (0.0, 0.004):
                simulation = play(retry(rank, Fault(kind, f"{point}@{step}", rank, delay)))
                if delay and kind == "flap" and not simulation.struck:
                    continue
                assert outcome(simulation) == ("finished", 1), f"{simulation.scenario}: {simulation.closed}"
                assert step - 1 <= simulation.recovered[0][1].step <= step


@pytest.mark.parametrize("point", REPAIR_POINTS)
@pytest.mark.parametrize("first", ["commit", "update", "gather"])
def test_a_second_fault_at_every_stage_of_the_repair(first: str, point: str) -> None:
    struck = 0
    for kind in (
        "memory",
        "link",
        "cut",
        "fail",
        "slow",
        *sorted(set(LATER_FAULTS) - {"memory", "cut", "fail", "slow"}),
    ):
        for count in (1, 2):
            scenario = retry(
                count, Fault("memory", f"{first}@2", 3, 0.002), Fault(kind, point, count), layout=THREEFOLD
            )
            simulation = play(scenario)
            struck += len(simulation.struck) == 2
            how, repairs = outcome(simulation)
            if kind in ("memory", "link", "cut", "fail") or (kind == "slow" and "finish" not in point):
                assert (how, repairs >= 1) == ("finished", True), f"{scenario}: {simulation.closed}"
            else:
                assert how in ("dumped", "exists", "finished"), f"{scenario}: {simulation.closed}"
    torn = first == "commit"  # only a torn commit leaves updates to finish
    assert struck or (point.endswith("finish_update") and not torn), "no run came to this point"


def test_a_third_fault_in_the_repair_of_the_second() -> None:
    for index, point in enumerate(REPAIR_POINTS):
        faults = (Fault("memory", "commit@2", 3), Fault("link", point, 2), Fault("memory", point, 15, 0.01))
        assert outcome(play(retry(index, *faults, layout=THREEFOLD)))[0] == "finished"


@pytest.mark.parametrize("weather", WEATHERS)
def test_drawn_scenarios(weather: str) -> None:
    for seed in range({"calm": 300, "wild": 200, "lossy": 150}[weather]):
        play(draw_retry(seed, WEATHERS[weather]))


@pytest.mark.full
@pytest.mark.parametrize("weather", WEATHERS)
def test_many_drawn_scenarios(weather: str) -> None:
    for seed in range(1000, 9000):
        play(draw_retry(seed, WEATHERS[weather]))


def test_drawn_scenarios_are_worth_drawing() -> None:
    """Guards the test above: many are repaired, often at a later try, some several times, and some are dumped."""
    runs = [play(draw_retry(seed, CALM)) for seed in range(150)]
    assert sum(bool(run.recovered) for run in runs) > 60
    assert sum(any(done.tries > 1 for _, done in run.recovered) for run in runs) > 25
    assert sum(len(run.recovered) > 1 for run in runs) > 20
    assert sum(outcome(run)[0] == "dumped" for run in runs) > 10


def test_many_repairs_in_one_job() -> None:
    faults = tuple(
        Fault(REPAIRABLE_FAULTS[step % 3], f"{FLAPPING[step % 4]}@{step}", 1 + step % SMALL.world_size, 0.001)
        for step in range(1, 41)
    )
    simulation = play(retry(3, *faults, last_step=42))
    how, repairs = outcome(simulation)
    assert how == "finished"
    assert repairs >= 25
    assert [done.epoch for _, done in simulation.recovered] == sorted({done.epoch for _, done in simulation.recovered})


def test_a_step_that_breaks_again_and_again_is_given_up() -> None:
    world = SMALL.world_size
    faults = tuple(Fault("link", "reduce@2", 3 + world * time) for time in range(40))
    simulation = play(retry(1, *faults))
    assert outcome(simulation)[0] == "dumped"
    assert 1 <= len(simulation.recovered) <= repair.MAX_TRIES_AT_STEP


def test_2048_ranks_repair_a_damaged_one_twice() -> None:
    faults = (Fault("memory", "update@2", 100), Fault("link", "order:rollback", 1500))
    simulation, took = large_run(Layout(parts=4, d=512, n=2, per_host=8), faults, retry=True, last_step=3)
    assert outcome(simulation) == ("finished", 1)
    assert simulation.recovered[0][1].tries == 2
    assert sum(seconds for seconds, _ in took) < 10


# ------------------------------------------------------------------------------------------------ controls

_plan = planning.plan_repair


def s_is_the_minimum(
    reports: dict[int, RankReport], registered: Any, start: bool = False, departed: Any = ()
) -> agreement.Agreement:
    found = agreement.agree(reports, registered, start, departed)
    step = min((agreement.completed(report) for report in reports.values() if report.trusted), default=-1)
    return replace(found, step=step, offers=agreement._offers(reports, registered, step, start))


def damaged_ranks_give(*args: Any) -> Any:
    found = _plan(*args)
    if isinstance(found, planning.NoPlan):
        return found
    transfers = tuple(replace(transfer, source=transfer.target) for transfer in found.transfers)
    return replace(found, transfers=transfers)


def damaged_ranks_go_without(*args: Any) -> Any:
    found = _plan(*args)
    return found if isinstance(found, planning.NoPlan) else replace(found, transfers=())


def only_givers_finish(*args: Any) -> Any:
    found = _plan(*args)
    return found if isinstance(found, planning.NoPlan) else replace(found, finish=())


def reports_are_kept(self: machine.Engine, reason: str) -> None:
    self._repair = None
    self._desk.void()
    self._desk.incident.renew()
    self._stop(reason)


BROKEN: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "S is the minimum": (repair, "agree", s_is_the_minimum),
    "a dirty rank is not repaired": (agreement, "_offer_at", dirty_is_good_enough),
    "nobody finishes an update": (agreement, "_offer_at", nobody_finishes),
    "only sources finish their update": (repair, "plan_repair", only_givers_finish),
    "damaged ranks give": (repair, "plan_repair", damaged_ranks_give),
    "damaged ranks go without": (repair, "plan_repair", damaged_ranks_go_without),
    "reports of an older stop count": (machine.Engine, "_stale", lambda *_: False),
    "reports are kept over a stop": (machine.Engine, "_stop_again", reports_are_kept),
    "a further fault is ignored": (repair.Repair, "fail", lambda *_: None),
    "orders have no deadline": (repair.Repair, "tick", lambda *_: None),
    "losses can be repaired": (repair, "unrepairable", lambda *_: ""),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_simulator_catches_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BROKEN[rule]
    monkeypatch.setattr(where, name, broken)
    for weather in (CALM, WILD):  # some rules matter only where words come late
        for seed in range(500):
            if judge(Simulation(draw_retry(seed, weather)).run()):
                return
    pytest.fail("1000 scenarios did not show the broken rule")
