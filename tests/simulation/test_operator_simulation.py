"""Operators at simulated jobs: pauses, resumes and dumps while ranks fail, controllers die and messages get lost. No
two ranks are held after different steps, an answer that says "paused" is true, each request has one answer.

A failure prints its seed and scenario; `Simulation(draw_operated(seed, ...)).run()` plays it again.
"""

from __future__ import annotations

from typing import Any

import pytest

from .job import SimRank
from .layout import STEP_POINTS, Agent, Fault, Layout, Request, Scenario
from .oracle import check
from .scenarios import draw_operated
from .simulation import AWAY, Simulation
from .test_simulation import SMALL, WEATHERS

PAUSE = Request(1.0, "pause", {"limit": "60"})


def play(scenario: Scenario) -> Simulation:
    simulation = Simulation(scenario).run()
    if simulation.stopped_at is not None:
        check(simulation)
    assert not simulation.violations, f"{scenario}: {simulation.violations}"
    assert simulation.closed or scenario.weather.loss, f"{scenario}: it did not end, {simulation.engine.status()}"
    if not simulation.takeovers and simulation.closed:
        open_ = set(simulation.asked) - simulation.answers.keys()
        withdrawn = sum(request.kind == "withdraw" for request in scenario.requests)
        assert len(open_) <= withdrawn, f"{scenario}: no answer to {open_}"
    return simulation


def operated(seed: int, *requests: Request, faults: tuple[Fault, ...] = (), **more: Any) -> Scenario:
    more.setdefault("last_step", 30)
    return Scenario(seed, more.pop("layout", SMALL), faults, requests=requests, **more)


def test_a_job_is_paused_saved_and_goes_on() -> None:
    dump, resume = Request(3.0, "dump"), Request(6.0, "resume")
    simulation = play(operated(1, Request(0.6, "dump"), PAUSE, dump, resume, Request(6.5, "dump")))
    answers = simulation.answers
    assert [(name, answer.ok) for name, answer in sorted(answers.items())] == [
        ("dump0", True), ("dump2", True), ("dump4", True), ("pause1", True), ("resume3", True),
    ]  # fmt: skip
    assert answers["dump2"].data["step"] == answers["pause1"].data["step"] == answers["resume3"].data["step"]
    assert simulation.closed[0][1].outcome == "finished"
    assert simulation.now > 6.0


@pytest.mark.parametrize("seed", range(20))
def test_a_pause_at_a_step_is_one_at_that_step(seed: int) -> None:
    simulation = play(operated(seed, Request(0.5, "pause", {"step": "12", "limit": "2"}), layout=Layout(2, 4, 2, 2)))
    assert simulation.answers["pause0"].data["step"] == 12


@pytest.mark.parametrize("what", ["memory", "link", "kill", "terminate"])
def test_a_fault_while_the_job_is_held(what: str) -> None:
    """A rank that comes to the hold, and one that is in it."""
    for delay in (0.0, 0.02, 1.0):
        faults = (Fault(what, "held", 2, delay),)
        request = Request(0.4, "pause", {"step": "4", "limit": "5"})
        simulation = play(operated(1, request, faults=faults, retry=True, agent=Agent(), last_step=8))
        assert simulation.struck, simulation.scenario
        repaired = what != "terminate"
        outcome = simulation.closed[0][1].outcome
        assert outcome == ("finished" if repaired else "dumped"), f"{simulation.scenario}: {simulation.closed}"
        if repaired:
            assert len({hold for hold, _ in simulation._held_at}) == 1
            assert len(simulation._held_at) == 2, "it is held again when it trains again"


@pytest.mark.parametrize("point", STEP_POINTS)
def test_a_controller_dies_with_every_request_on_its_way(point: str) -> None:
    for kind in ("takeover", "amnesia"):
        for step in (2, 3, 4):
            faults = (Fault(kind, f"{point}@{step}", 1, 0.01),)
            request = Request(0.4, "pause", {"step": "3", "limit": "3"})
            simulation = play(operated(step, request, faults=faults, last_step=8))
            assert simulation.closed[0][1].outcome == "finished", f"{simulation.scenario}: {simulation.closed}"


@pytest.mark.parametrize("weather", WEATHERS)
def test_drawn_scenarios(weather: str) -> None:
    for seed in range({"calm": 40, "wild": 30, "lossy": 20}[weather]):
        play(draw_operated(seed, WEATHERS[weather]))


@pytest.mark.full
@pytest.mark.parametrize("weather", WEATHERS)
def test_many_drawn_scenarios(weather: str) -> None:
    for seed in range(1000, 5000):
        play(draw_operated(seed, WEATHERS[weather]))


def test_drawn_scenarios_are_worth_drawing() -> None:
    """Guards the test above: many pauses come true, some after a recovery, some are ended by a resume."""
    runs = [play(draw_operated(seed)) for seed in range(50)]
    answers = [answer for run in runs for answer in run.answers.items()]
    good = [name.rstrip("0123456789") for name, answer in answers if answer.ok]
    assert min(good.count(kind) for kind in ("pause", "resume", "dump")) > 6
    assert sum(len(run._held_at) > len({hold for hold, _ in run._held_at}) for run in runs) > 0
    assert sum(bool(run.takeovers) for run in runs) > 5


def test_2048_ranks_are_held_like_few() -> None:
    layout = Layout(parts=4, d=512, n=2, per_host=8)
    simulation = play(operated(1, Request(0.5, "pause", {"limit": "1"}), layout=layout, last_step=4))
    assert simulation.answers["pause0"].ok


# ------------------------------------------------------------------------------------------------ controls


def last_commit(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> float:
    """The time of the last step."""
    times: list[float] = []
    committed = Simulation.committed
    monkeypatch.setattr(Simulation, "committed", lambda self, step: (times.append(self.now), committed(self, step))[1])
    simulation = play(scenario)
    assert simulation.struck and simulation.closed[0][1].outcome == "finished"
    return times[-1]


@pytest.mark.parametrize("told", [True, False])
def test_a_rank_that_has_lost_the_controller_alone_goes_on_with_the_others(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off while it is held, and for the whole resume. And the control, in which nobody tells it."""
    if not told:
        monkeypatch.setattr(SimRank, "_look_for_notice", lambda self, hold: None)
    requests = (Request(0.4, "pause", {"limit": "300"}), Request(5.0, "resume"))
    scenario = operated(3, *requests, faults=(Fault("away", "held", 2, 1.0),), last_step=12)
    assert (last_commit(scenario, monkeypatch) < AWAY / 2) is told


@pytest.mark.parametrize("asked", [True, False])
def test_a_wish_that_was_withdrawn_while_a_rank_was_cut_off_holds_nobody(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings that wish to the commit of its step. And the control, in which nobody is asked before all wait."""
    if not asked:
        wait = SimRank._wait_as_agreed

        def alone(self: SimRank) -> None:
            self.job.collective(self, "hold").votes.clear()
            wait(self)

        monkeypatch.setattr(SimRank, "_wait_as_agreed", alone)
        monkeypatch.setattr(SimRank, "_look_for_notice", lambda self, hold: None)
    requests = (Request(0.4, "pause", {"step": "12", "limit": "300"}), Request(1.5, "resume"))
    scenario = operated(3, *requests, faults=(Fault("away", "passed@5", 2),), last_step=16)
    assert (last_commit(scenario, monkeypatch) < AWAY / 2) is asked


@pytest.mark.parametrize("agreed", [True, False])
def test_ranks_that_decide_alone_are_caught(agreed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the control: some are held where the others go on to a step that cannot end, so no pause comes true."""
    released = SimRank.released

    def decide(self: SimRank, name: str) -> None:
        if name == "commit":
            self.agreed = self._offer()
        released(self, name)

    if not agreed:
        monkeypatch.setattr(SimRank, "released", decide)
    paused = []
    for seed in range(40):
        request = Request(0.5 + 0.01 * seed, "pause", {"limit": "2"})
        paused.append(Simulation(operated(seed, request, last_step=6)).run().answers["pause0"].ok)
    assert all(paused) is agreed
