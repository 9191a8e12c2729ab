"""Each kind of message by itself: every one of them comes twice, comes late (and is overtaken by later ones), or some
are lost, while all others travel well. So no kind can hide behind the rarity of the others.

A failure prints its seed and scenario; `Simulation(with_mischief(seed, ...)).run()` plays it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from mindspeed_tft.engine import machine, stops
from mindspeed_tft.engine.hold import OF_HELD
from mindspeed_tft.engine.roster import Arrival, Roster
from mindspeed_tft.engine.types import Order, OrderKind, RankInfo, RankReport

from .job import SimRank
from .layout import Scenario, Weather
from .oracle import judge
from .scenarios import draw, draw_hang, draw_operated, draw_recover, draw_retry, draw_rewind
from .simulation import Simulation
from .test_simulation import play

UP = (
    "Registered",
    "Heartbeat",
    "FaultSeen",
    "Reported",
    "OrderDone",
    "RankFinished",
    "RankLost",
    "RankQuiet",
    "Examined",
)
DOWN = ("Stop", "Kill", *(kind.value for kind in OrderKind if kind not in OF_HELD))
OPERATORS = ("Tell", "Held", "Released", "SavedStep", OrderKind.SAVE.value)  # another link has a simulation of its own
MISCHIEF = {
    "twice": Weather(duplicate=1.0, delay=1.0),  # the second long after the first
    "late": Weather(reorder=True, delay=1.5),
    "lost": Weather(loss=0.3),
}
DRAWS: dict[str, Callable[..., Scenario]] = {
    "dump": draw,
    "retry": draw_retry,
    "rewind": draw_rewind,
    "recover": draw_recover,
    "hang": draw_hang,
}


def kinds_of(message: str) -> Iterable[str]:
    """The kinds of scenarios in which it is sent."""
    return ["operated"] if message in OPERATORS else DRAWS


def with_mischief(seed: int, kind: str, message: str, mischief: str) -> Scenario:
    scenario = draw_operated(seed) if kind == "operated" else DRAWS[kind](seed)
    return replace(scenario, weather=replace(MISCHIEF[mischief], only=message))


@pytest.mark.parametrize("mischief", MISCHIEF)
@pytest.mark.parametrize("message", [*UP, *DOWN, *OPERATORS])
def test_drawn_scenarios(message: str, mischief: str) -> None:
    for kind in kinds_of(message):
        if (kind, mischief) == ("hang", "lost"):
            continue  # lost goodbyes make these runs long: see the full test
        for seed in range({"hang": 1, "operated": 8}.get(kind, 2)):
            play(with_mischief(seed, kind, message, mischief))


@pytest.mark.full
@pytest.mark.parametrize("mischief", MISCHIEF)
@pytest.mark.parametrize("message", [*UP, *DOWN, *OPERATORS])
def test_many_drawn_scenarios(message: str, mischief: str) -> None:
    for kind in kinds_of(message):
        for seed in range(1000, 1010 if (kind, mischief) == ("hang", "lost") else 1100):
            play(with_mischief(seed, kind, message, mischief))


@pytest.mark.parametrize("message", [*UP, *DOWN, *OPERATORS])
def test_every_kind_is_sent(message: str) -> None:
    """Guards the tests above: a kind that no run sends would prove nothing."""
    for seed in range(30):
        for kind in kinds_of(message):
            simulation = Simulation(with_mischief(seed, kind, message, "twice")).run()
            if simulation.befallen:
                return
    pytest.fail(f"no run sent {message}")


# ------------------------------------------------------------------------------------------------ controls


def who_registers_twice_is_another(self: Roster, info: RankInfo) -> Arrival:
    found = _classify(self, info)
    return Arrival.NEWCOMER if found is Arrival.AGAIN else found


def any_stop_is_answered(self: stops.Stops, report: RankReport) -> bool:
    return False


_order, _classify = SimRank.order, Roster.classify


def carried_out_each_time(self: SimRank, order: Order) -> None:
    self._answers.pop(order.id, None)
    _order(self, order)


# rule -> where it is broken, and the message and mischief that must show it
BROKEN: dict[str, tuple[Any, str, Any, str, str]] = {
    "who registers twice is another one": (Roster, "classify", who_registers_twice_is_another, "Registered", "twice"),
    "a report of an older stop counts": (machine.Engine, "_stale", any_stop_is_answered, "Reported", "late"),
    "an order is carried out each time it comes": (SimRank, "order", carried_out_each_time, "resume", "twice"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_simulator_catches_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, message, mischief = BROKEN[rule]
    monkeypatch.setattr(where, name, broken)
    for seed in range(300):
        for kind in ("retry", "recover"):
            try:
                if judge(Simulation(with_mischief(seed, kind, message, mischief)).run()):
                    return
            except (KeyError, AttributeError, AssertionError, IndexError):  # the engine is led into the absurd
                return
    pytest.fail("600 scenarios did not show the broken rule")
