"""Jobs that a ClusterD steers, against simulated faults: training goes on or is saved as without it, whatever befalls
the messages between them, and the negotiation never says anything at the wrong time.

A failure prints its seed; `SteeredSimulation(draw_recover(seed), LINES[name]).run()` plays it again.
"""

from __future__ import annotations

import pytest

from mindspeed_tft.clusterd.negotiation import Negotiation
from mindspeed_tft.engine.counsel import Counsel

from .layout import Agent, Fault, Layout, Scenario
from .oracle import check, judge
from .scenarios import draw_recover, draw_retry
from .steered import Line, SteeredSimulation

SMALL = Layout(parts=2, d=4, n=2, per_host=1)
CALM = Line()
LINES = {
    "calm": CALM,
    "doubled": Line(duplicate=0.5),
    "lossy": Line(duplicate=0.2, loss=0.2, late=0.1),
    "cut": Line(duplicate=0.1, cut=0.15),
}


def play(scenario: Scenario, line: Line = CALM, orderly: bool = True) -> SteeredSimulation:
    simulation = SteeredSimulation(scenario, line)
    simulation.run()
    found = judge(simulation)
    if {"dump", "exit"} & {*simulation.cluster.log}:  # it tries nothing twice in one event, where we would
        found = [text for text in found if not text.startswith("every fault could be repaired")]
        found = [text for text in found if "there is nothing to save" not in text]
    if found:
        check(simulation)
    wrong = simulation.cluster.violations if orderly else []
    assert not wrong, f"seed {scenario.seed}: {wrong}, log {simulation.cluster.log}, {simulation.cluster.reports}"
    return simulation


def outcome(simulation: SteeredSimulation) -> tuple[str, list[str]]:
    return simulation.closed[0][1].outcome, [done.outcome for _, done in simulation.recovered]


@pytest.mark.parametrize(
    ("kind", "strategies", "log", "ended"),
    [
        ("memory", ("retry", "dump", "exit"), ["retry", "retry 0"], ("finished", ["retried"])),
        ("link", ("retry", "dump", "exit"), ["retry", "retry 0"], ("finished", ["retried"])),
        ("memory", ("dump", "exit"), ["dump", "dump 0"], ("dumped", [])),
        ("memory", ("exit",), ["exit"], ("failed", [])),
        ("kill", ("recover", "dump", "exit"), ["recover", "recover 0"], ("finished", ["rebooted"])),
        ("kill", ("recover-in-place",), ["recover-in-place", "recover 0"], ("finished", ["rebooted"])),
        ("kill", ("dump", "exit"), ["dump", "dump 0"], ("dumped", [])),
        ("raise", ("recover", "dump"), ["recover", "recover 0"], ("finished", ["rebooted"])),
    ],
)
def test_each_strategy_is_carried_out(
    kind: str, strategies: tuple[str, ...], log: list[str], ended: tuple[str, list[str]]
) -> None:
    scenario = Scenario(1, SMALL, (Fault(kind, "reduce@2", 3),), last_step=5, retry=True, agent=Agent())
    simulation = SteeredSimulation(scenario, Line(strategies=strategies))
    simulation.run()
    assert outcome(simulation) == ended, simulation.closed
    assert (simulation.cluster.log, simulation.cluster.violations) == (log, [])
    assert simulation.unadvised == 0


def test_a_process_that_does_not_come_back_leads_to_the_next_strategy() -> None:
    scenario = Scenario(1, SMALL, (Fault("kill", "reduce@2", 3),), last_step=5, retry=True, agent=Agent(never=1))
    simulation = play(scenario)
    assert simulation.cluster.log == ["recover-in-place", "recover 406", "dump", "dump 0"]
    assert outcome(simulation) == ("dumped", [])
    assert "(--tft-reboot-wait)" in next(report.info for report in simulation.cluster.reports if report.code == 406)


def test_a_fault_in_a_retry_is_reported_as_its_failure() -> None:
    faults = (Fault("memory", "reduce@2", 3), Fault("memory", "order:rollback", 1))
    simulation = play(Scenario(1, SMALL, faults, last_step=5, retry=True, agent=Agent()))
    assert simulation.cluster.log[:2] == ["retry", "retry 405"]
    assert outcome(simulation)[0] == "finished"


@pytest.mark.parametrize("name", LINES)
def test_drawn_scenarios(name: str) -> None:
    asked = alone = cuts = 0
    for seed in range(25):
        for draw in (draw_recover, draw_retry):
            # A signal that is late or lost on its way leaves ClusterD at a place of its own.
            simulation = play(draw(seed), LINES[name], orderly=name in ("calm", "doubled"))
            asked += simulation.consults
            alone += simulation.unadvised
            cuts += simulation.cuts
    assert asked > 40
    assert (alone > 0) is (name == "lossy")
    assert (cuts > 0) is (name == "cut")


@pytest.mark.full
@pytest.mark.parametrize("name", LINES)
def test_many_drawn_scenarios(name: str) -> None:
    for seed in range(25, 400):
        for draw in (draw_recover, draw_retry):
            play(draw(seed), LINES[name], orderly=name in ("calm", "doubled"))


# ------------------------------------------------------------------------------------------------ controls


def test_an_engine_that_forgets_its_limit_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counsel, "late", lambda _: False)
    scenario = Scenario(1, SMALL, (Fault("memory", "reduce@2", 3),), last_step=5, retry=True)
    assert not judge(SteeredSimulation(scenario, Line()).run())
    assert judge(SteeredSimulation(scenario, Line(loss=1.0)).run())


def test_a_negotiation_that_takes_every_signal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategies are reported once more for a globalFault that comes twice."""
    hear = Negotiation._hear_of_all

    def careless(self: Negotiation, signal, nodes):  # type: ignore[no-untyped-def]
        from mindspeed_tft.clusterd.negotiation import Place

        self.place, self._offering = Place.STOPPED, False
        yield from hear(self, signal, nodes)

    monkeypatch.setattr(Negotiation, "_hear_of_all", careless)
    scenario = Scenario(1, SMALL, (Fault("memory", "reduce@2", 3),), last_step=5, retry=True)
    simulation = SteeredSimulation(scenario, Line(duplicate=1.0))
    simulation.run()
    assert simulation.cluster.violations
