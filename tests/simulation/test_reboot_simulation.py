"""Worker reboot against simulated jobs: processes die at every point of a step, of the wait and of a repair, and are
started again by an agent that is slow, forgetful or unlucky. Every newcomer that trains has all of S, and nobody less.

A failure prints its seed and scenario; `Simulation(draw_recover(seed, ...)).run()` plays it again.
"""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_tft.engine import incident, planning, reboot, repair
from mindspeed_tft.engine.roster import Arrival, Roster
from mindspeed_tft.engine.types import RankInfo

from .layout import REBOOT_FAULTS, REPAIR_POINTS, REPAIRABLE_FAULTS, STEP_POINTS, Agent, Fault, Layout, Scenario
from .oracle import judge
from .scenarios import CALM, WILD, draw_recover
from .simulation import Simulation
from .test_simulation import SMALL, THREEFOLD, WEATHERS, large_run, play


def rebooting(seed: int, *faults: Fault, layout: Layout = SMALL, last_step: int = 5, **more: Any) -> Scenario:
    more.setdefault("agent", Agent())
    return Scenario(seed, layout, faults, last_step=last_step, **more)


def outcome(simulation: Simulation) -> tuple[str, list[str]]:
    return simulation.closed[0][1].outcome, [done.outcome for _, done in simulation.recovered]


@pytest.mark.parametrize("kind", REBOOT_FAULTS)
@pytest.mark.parametrize("point", STEP_POINTS)
def test_a_process_that_dies_anywhere_in_a_step_is_replaced(point: str, kind: str) -> None:
    for rank in range(1, SMALL.world_size + 1):
        for step in (1, 3):
            simulation = play(rebooting(rank, Fault(kind, f"{point}@{step}", rank, 0.004 * (rank % 2))))
            assert outcome(simulation) == ("finished", ["rebooted"]), f"{simulation.scenario}: {simulation.closed}"
            assert step - 1 <= simulation.recovered[0][1].step <= step
            assert "0 completed steps lost" in simulation.recovered[0][1].summary


@pytest.mark.parametrize("point", ["reported", "stopping", *REPAIR_POINTS])
def test_a_second_fault_at_every_point_of_the_reboot(point: str) -> None:
    for kind in ("kill", "raise", "memory", "link", "cut", "fail", "slow", "hang", "terminate"):
        for count in (1, 2, 7):
            faults = (Fault("kill", "commit@2", 3, 0.002), Fault(kind, point, count))
            simulation = play(rebooting(count, *faults, layout=THREEFOLD))
            if kind in ("kill", "raise", "memory", "link", "cut"):
                assert outcome(simulation)[0] == "finished", f"{simulation.scenario}: {simulation.closed}"


def test_a_dead_host_comes_back() -> None:
    layout = Layout(2, 4, 2, 2)
    for count in range(1, layout.world_size + 1):
        simulation = play(rebooting(count, Fault("kill_host", "update@3", count), layout=layout))
        assert outcome(simulation) == ("finished", ["rebooted"]), f"{simulation.scenario}: {simulation.closed}"


def test_without_replicas_all_load_the_last_checkpoint() -> None:
    bare = Layout(parts=2, d=4, n=1, per_host=1)
    for rank in range(1, bare.world_size + 1):
        simulation = play(rebooting(rank, Fault("kill", "update@4", rank), layout=bare, save_every=1))
        assert outcome(simulation) == ("finished", ["rebooted"]), f"{simulation.scenario}: {simulation.closed}"
        assert simulation.recovered[0][1].step == 3


@pytest.mark.parametrize(("agent", "saved"), [(Agent(never=1), True), (Agent(late=1), True), (Agent(dies=0.5), False)])
def test_who_does_not_come_in_time_is_not_waited_for_longer(agent: Agent, saved: bool) -> None:
    for seed in range(10):
        simulation = play(rebooting(seed, Fault("kill", "update@3", 1 + seed % 8), agent=agent))
        assert outcome(simulation)[0] == "dumped" or not saved


def test_many_reboots_in_one_job() -> None:
    kinds = (*REBOOT_FAULTS, *REPAIRABLE_FAULTS)
    world = SMALL.world_size
    faults = tuple(Fault(kinds[n % 6], f"reduce@{n}", 1 + n % world, 0.001) for n in range(2, 40, 2))
    simulation = play(rebooting(5, *faults, last_step=42))
    how, recovered = outcome(simulation)
    assert how == "finished"
    assert recovered.count("rebooted") >= 8


@pytest.mark.parametrize("weather", WEATHERS)
def test_drawn_scenarios(weather: str) -> None:
    for seed in range({"calm": 300, "wild": 200, "lossy": 100}[weather]):
        play(draw_recover(seed, WEATHERS[weather]))


@pytest.mark.full
@pytest.mark.parametrize("weather", WEATHERS)
def test_many_drawn_scenarios(weather: str) -> None:
    for seed in range(1000, 9000):
        play(draw_recover(seed, WEATHERS[weather]))


def test_drawn_scenarios_are_worth_drawing() -> None:
    """Guards the test above: many are rebooted, often at a later try, some several times; others are not."""
    runs = [play(draw_recover(seed)) for seed in range(150)]
    done = [done for run in runs for _, done in run.recovered]
    assert sum(found.outcome == "rebooted" for found in done) > 50
    assert sum(found.outcome == "rebooted" and found.tries > 1 for found in done) > 8
    assert sum(found.outcome == "rebooted" and "Rewound" in found.summary for found in done) > 3
    assert sum(found.outcome == "retried" for found in done) > 10
    assert sum(len(run.recovered) > 1 for run in runs) > 15
    assert sum(run.closed[0][1].outcome in ("dumped", "exists") for run in runs) > 10


def test_2048_ranks_replace_a_host() -> None:
    faults = (Fault("kill_host", "update@2", 100), Fault("link", "order:rollback", 1500))
    layout = Layout(parts=4, d=512, n=2, per_host=8)
    simulation, took = large_run(layout, faults, agent=Agent(), last_step=3)
    assert outcome(simulation) == ("finished", ["rebooted"])
    assert len(simulation.reborn) == 8
    assert sum(seconds for seconds, _ in took) < 10


# ------------------------------------------------------------------------------------------------ controls


def predecessors_count(self: Roster, info: RankInfo) -> Arrival:
    found = _classify(self, info)
    return Arrival.AGAIN if found is Arrival.NEWCOMER and info.rank not in self.lost else found


_classify = Roster.classify

BROKEN: dict[str, tuple[Any, str, Any]] = {
    "the small state is left out": (planning, "_plan_smalls", lambda *_: ()),
    "what no checkpoint holds is left out": (repair, "plan_unowned", lambda *_: ()),
    "the wait never ends": (reboot.Reboots, "late", lambda self: ""),
    "the last holder is sent away": (reboot.Reboots, "_no_way", lambda *_: ""),
    "faults outlive their process": (incident.Incident, "current", lambda self: list(self.faults)),
    "a dead newcomer stays ready": (reboot.Reboots, "gone", lambda *_: None),
    "a newcomer is the process before it": (Roster, "classify", predecessors_count),
    "a process that cannot go on is kept": (reboot.Reboots, "_doomed", lambda self: {}),
}


def caught(scenario: Scenario) -> bool:
    try:
        return bool(judge(Simulation(scenario).run()))
    except KeyError:  # the engine adopts somebody who is not there
        return True


@pytest.mark.parametrize("rule", BROKEN)
def test_the_simulator_catches_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BROKEN[rule]
    monkeypatch.setattr(where, name, broken)
    for weather in (CALM, WILD):
        for seed in range(500):
            if caught(draw_recover(seed, weather)):
                return
    pytest.fail("1000 scenarios did not show the broken rule")
