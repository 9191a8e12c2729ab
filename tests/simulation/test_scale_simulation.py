"""Whole incidents of large jobs: 1,024, 4,096 and 16,384 ranks, eight on a host. What is proved of eight ranks holds
for them, and the engine's own time stays small: a quadratic step takes minutes here, and is seen.
"""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_tft.engine import planning

from .layout import Agent, Fault, Layout, Scenario
from .oracle import judge
from .simulation import Simulation
from .test_simulation import large_run

# Several parts and replicas each: 8 stages or tensor slices of 128, 16 of 256, 32 of 512 ranks; N = 2, 4, 2.
LAYOUTS = {1024: Layout(8, 128, 2, 8), 4096: Layout(16, 256, 4, 8), 16_384: Layout(32, 512, 2, 8)}
MICROSECONDS = 400.0  # of the engine, for each rank and incident: it takes 40 to 90, in a job of any size

# name -> faults (a share of the ranks comes to the point first), what may be done online, and how it has to end
INCIDENTS: dict[str, tuple[str, str, dict[str, Any], tuple[str, list[str]]]] = {
    "a kill, dumped": ("kill", "update", {}, ("dumped", [])),
    "a link fault, retried": ("link", "reduce", {"retry": True}, ("finished", ["retried"])),
    "a kill, recovered": ("kill", "commit", {"agent": Agent()}, ("finished", ["rebooted"])),
    "a host of eight, recovered": ("kill_host", "update", {"agent": Agent()}, ("finished", ["rebooted"])),
    "a memory fault, repaired": ("memory", "update", {"retry": True}, ("finished", ["retried"])),
    "wrong numbers, rewound": ("precision", "compute", {"retry": True, "save_every": 1}, ("finished", ["rewound"])),
}


def run(name: str, ranks: int, **more: Any) -> Simulation:
    """The first or second step of a job that began with step 41, broken by the rank that comes to the point as the
    third of ten."""
    kind, point, settings, _ = INCIDENTS[name]
    second = kind == "precision"  # the first checkpoint may be spoiled, too
    fault = Fault(kind, f"{point}@{3 if second else 1}", ranks * 3 // 10)
    last_step = 44 if second else 42
    simulation, took = large_run(
        LAYOUTS[ranks], (fault,), first_step=41, **{"last_step": last_step, **settings, **more}
    )
    cpu = sum(seconds for seconds, _ in took)
    assert cpu * 1e6 / ranks < MICROSECONDS, f"{cpu:.1f} s for {ranks} ranks"
    return simulation


def ended(simulation: Simulation) -> tuple[str, list[str]]:
    return simulation.closed[0][1].outcome, [done.outcome for _, done in simulation.recovered]


@pytest.mark.parametrize("name", INCIDENTS)
def test_1024_ranks(name: str) -> None:
    simulation = run(name, 1024)
    assert ended(simulation) == INCIDENTS[name][3]
    assert len(simulation.reborn) == {"a kill, recovered": 1, "a host of eight, recovered": 8}.get(name, 0)


@pytest.mark.full
@pytest.mark.parametrize("name", INCIDENTS)
def test_4096_ranks(name: str) -> None:
    assert ended(run(name, 4096)) == INCIDENTS[name][3]


@pytest.mark.full
def test_16384_ranks_save_a_step() -> None:
    simulation = run("a kill, dumped", 16_384)
    assert ended(simulation) == ("dumped", [])
    (checkpoint,) = simulation.disk.published
    assert len(checkpoint.parts) == 32
    assert sum(len(part.shards) for part in checkpoint.parts.values() if part) == 32 * 256


@pytest.mark.full
@pytest.mark.parametrize("name", INCIDENTS)
def test_16384_ranks(name: str) -> None:
    assert ended(run(name, 16_384)) == INCIDENTS[name][3]


@pytest.mark.full
def test_16384_ranks_lose_a_host_and_then_the_publisher() -> None:
    faults = (Fault("kill_host", "commit@2", 5000), Fault("kill", "order:publish"))
    simulation, took = large_run(LAYOUTS[16_384], faults)
    assert ended(simulation) == ("dumped", [])
    assert len(simulation.engine.incident()["attempts"]) == 2  # type: ignore[arg-type]
    assert sum(seconds for seconds, _ in took) < 60


def test_1024_ranks_are_watched_and_one_hangs() -> None:
    fault = Fault("freeze", "reduce@14", 300)
    simulation, took = large_run(LAYOUTS[1024], (fault,), agent=Agent(), watch=True, last_step=15)
    assert ended(simulation) == ("finished", ["rebooted"])
    assert len(simulation.killed) == 1
    assert sum(seconds for seconds, _ in took) < 10


# ------------------------------------------------------------------------------------------------ controls


@pytest.mark.full
def test_a_plan_that_looks_at_everybody_for_everybody_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = planning._Chooser

    def sources_of(self: Any, shard: str) -> list[int]:
        return [rank for rank in sorted(self._infos) if shard in self._infos[rank].holds and rank in self._able]

    monkeypatch.setattr(chooser, "sources_of", sources_of)
    with pytest.raises(AssertionError, match="s for 16384 ranks"):
        run("a kill, dumped", 16_384)  # at 4,096 a fast processor hides it


def test_a_large_dump_that_leaves_one_shard_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planning._Chooser.plan_part

    def forgetful(self: Any, part: str) -> planning.PartPlan:
        found = plan(self, part)
        kept = dict(list(found.sources.items())[:-1]) if part == "p3" else found.sources
        return planning.PartPlan(found.part, found.writer, kept)

    monkeypatch.setattr(planning._Chooser, "plan_part", forgetful)
    fault = Fault("kill", "update@1", 300)
    assert judge(Simulation(Scenario(7, LAYOUTS[1024], (fault,), first_step=41)).run())
