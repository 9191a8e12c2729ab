"""Replicas: N from 1 to d, several parts, shards that every rank holds, and experts (whose ranks hold dense shards that
are written into the files of other ranks too). While one holder of each shard is left, nothing is lost; without one, it
is said which shard, who held it and what became of each.

A failure prints its scenario; `Simulation(scenario).run()` plays it again.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from mindspeed_tft.engine import planning
from mindspeed_tft.engine.types import RankInfo

from .layout import STEP_POINTS, Agent, Fault, Layout, Scenario
from .oracle import judge
from .scenarios import CALM, WILD, draw, draw_recover, draw_retry, draw_rewind
from .simulation import Simulation
from .test_simulation import play

DIVIDED = (  # parts, d, N, ranks on a host
    Layout(1, 8, 8, 1),  # every rank holds everything
    Layout(1, 8, 4, 2),
    Layout(2, 8, 4, 1, common=True),
    Layout(3, 6, 3, 1),
    Layout(4, 4, 2, 2),
)
EXPERTS = (
    Layout(1, 4, 2, 1, experts=2),
    Layout(2, 8, 2, 1, common=True, experts=2),
    Layout(1, 8, 2, 2, experts=4),
    Layout(2, 8, 4, 1, experts=2),
)
BARE = (Layout(1, 4, 1, 1), Layout(3, 2, 1, 1), Layout(1, 4, 1, 1, experts=2), Layout(2, 4, 1, 2, common=True))
DRAWS = {"dump": draw, "retry": draw_retry, "rewind": draw_rewind, "recover": draw_recover}


def name_of(layout: Layout) -> str:
    return f"{layout.parts}x{layout.d}-N{layout.n}-e{layout.experts}{'-common' * layout.common}"


def victims(layout: Layout, seed: int, holders_left: int) -> list[int]:
    """All holders of a shard but so many, whatever else they hold. The other shards keep at least as many."""
    rng = random.Random(seed)
    owned = {shard: ranks for shard, ranks in layout.holders().items() if len(ranks) == layout.n}
    of_shard = list(rng.choice(list(owned.values())))
    rng.shuffle(of_shard)
    return of_shard[holders_left:]


def broken(layout: Layout, seed: int, holders_left: int, **more: Any) -> Simulation:
    """These ranks are killed within a few milliseconds, somewhere in the second step; in the fifth or so of a job that
    saves, so that there is something to load."""
    dead = victims(layout, seed, holders_left)
    simulation = Simulation(Scenario(seed, layout, (), last_step=12, **more))
    rng = random.Random(seed * 31 + 1)
    base = (1.4 if "save_every" in more else 0.62) + rng.random() * 0.15
    for rank in dead:
        simulation.harmed.add(rank)
        simulation.after(base + rng.random() * 0.01, simulation.ranks[rank].kill)
    return simulation.run()


def outcome(simulation: Simulation) -> tuple[str, list[str]]:
    return simulation.closed[0][1].outcome, [done.outcome for _, done in simulation.recovered]


@pytest.mark.parametrize("layout", [*DIVIDED, *EXPERTS], ids=name_of)
def test_all_holders_but_one_die_at_once_and_no_step_is_lost(layout: Layout) -> None:
    for seed in range(12):
        simulation = broken(layout, seed, holders_left=1)
        assert judge(simulation) == [], seed
        assert outcome(simulation) == ("dumped", []), f"seed {seed}: {simulation.closed}"
        simulation = broken(layout, seed, holders_left=1, agent=Agent())
        assert judge(simulation) == [], seed
        assert outcome(simulation) == ("finished", ["rebooted"]), f"seed {seed}: {simulation.closed}"
        assert "0 completed steps lost" in simulation.recovered[0][1].summary


@pytest.mark.parametrize("layout", [*DIVIDED[1:], *EXPERTS], ids=name_of)
def test_without_a_holder_the_shard_and_its_holders_are_named(layout: Layout) -> None:
    for seed in range(8):
        dead = victims(layout, seed, 0)
        simulation = broken(layout, seed, holders_left=0)
        assert judge(simulation) == [], seed
        assert outcome(simulation) == ("failed", [])
        summary = simulation.closed[0][1].summary
        lost = [shard for shard, ranks in layout.holders().items() if set(ranks) <= set(dead)]
        assert any(f"no holder left of shard {shard} (" in summary for shard in lost), summary
        assert all(f"rank {rank}: lost" in summary for rank in dead[:8])
        assert simulation.disk.published == []


@pytest.mark.parametrize("layout", [*BARE, EXPERTS[1]], ids=name_of)
def test_without_a_holder_all_load_the_last_checkpoint_where_there_is_one(layout: Layout) -> None:
    for seed in range(8):
        simulation = broken(layout, seed, holders_left=0, agent=Agent(), save_every=1)
        assert judge(simulation) == [], seed
        how, recovered = outcome(simulation)
        assert how == "finished"
        assert recovered == ["rebooted"], f"seed {seed}: {simulation.closed}"
        assert "Rewound" in simulation.recovered[0][1].summary


def test_where_a_whole_part_dies_nobody_has_the_tensors_that_no_checkpoint_holds() -> None:
    """Two ranks hold one shard, and are all there is of their group of experts."""
    for seed in range(8):
        simulation = broken(EXPERTS[0], seed, holders_left=0, agent=Agent(), save_every=1)
        assert judge(simulation) == [], seed
        assert outcome(simulation) == ("failed", [])
        summary = simulation.closed[0][1].summary
        assert "no checkpoint holds all its tensors" in summary
        words = summary.partition("no holder left of shard ")[2]
        assert words.count("p0/dense/") == 1, "each shard is named once, though two files need it"


@pytest.mark.parametrize("layout", EXPERTS, ids=name_of)
@pytest.mark.parametrize("point", STEP_POINTS)
def test_a_fault_anywhere_in_a_step_with_experts(point: str, layout: Layout) -> None:
    for count in range(1, layout.world_size + 1, 3):
        fault = Fault("kill", f"{point}@2", count, 0.004 * (count % 2))
        simulation = play(Scenario(count, layout, (fault,)))
        assert outcome(simulation) == ("dumped", []), f"{simulation.scenario}: {simulation.closed}"
        files = simulation.disk.published[0].parts
        assert {part: set(file.shards) for part, file in files.items() if file} == layout.files()
        simulation = play(Scenario(count, layout, (replace(fault, what="memory"),), retry=True, last_step=4))
        assert outcome(simulation) == ("finished", ["retried"])


@pytest.mark.parametrize("kind", DRAWS)
def test_drawn_scenarios(kind: str) -> None:
    for seed in range(40):
        scenario = DRAWS[kind](seed, WILD if seed % 3 == 0 else CALM)
        layouts = BARE if kind == "rewind" and seed % 2 else (*DIVIDED, *EXPERTS)
        play(replace(scenario, layout=layouts[seed % len(layouts)]))


@pytest.mark.full
@pytest.mark.parametrize("kind", DRAWS)
def test_many_drawn_scenarios(kind: str) -> None:
    layouts = (*DIVIDED, *EXPERTS, *BARE)
    for seed in range(1000, 6000):
        scenario = DRAWS[kind](seed, WILD if seed % 3 == 0 else CALM)
        play(replace(scenario, layout=layouts[seed % len(layouts)]))


# ------------------------------------------------------------------------------------------------ controls


def only_shards_of_the_part(self: Any, *args: Any) -> None:
    _init(self, *args)
    for part, members in self._members.items():
        self.shards_of[part] = sorted({shard for rank in members for shard in self._infos[rank].holds})


def the_first_holder_is_alive(self: Any, shard: str) -> list[int]:
    return self._holders[shard][:1]  # type: ignore[no-any-return]


def any_rank_of_the_part_holds_it(
    infos: dict[int, RankInfo], wanted: Any, holders: dict[str, list[int]], *more: Any
) -> Any:
    able = sorted({rank for found in holders.values() for rank in found})
    return _share(infos, wanted, {shard: able or found for shard, found in holders.items()}, *more)


_init, _share = planning._Chooser.__init__, planning._share

BROKEN: dict[str, tuple[Any, str, Any]] = {
    "a file holds what its own ranks hold": (planning._Chooser, "__init__", only_shards_of_the_part),
    "the first holder is alive": (planning._Chooser, "sources_of", the_first_holder_is_alive),
    "whoever can give has everything": (planning, "_share", any_rank_of_the_part_holds_it),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_simulator_catches_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken_one = BROKEN[rule]
    monkeypatch.setattr(where, name, broken_one)
    for seed in range(100):
        for kind in ("dump", "retry"):
            scenario = replace(DRAWS[kind](seed), layout=(*DIVIDED[1:], *EXPERTS)[seed % 8])
            try:
                if judge(Simulation(scenario).run()):
                    return
            except (KeyError, AttributeError):  # a rank is told to give what it has not
                return
    pytest.fail("200 scenarios did not show the broken rule")
