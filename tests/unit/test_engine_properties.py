"""The engine's pure functions against a small world whose truth is known: every mixture of ranks that can stand beside
each other in a step, with dead, silent, damaged and reborn ones among them. What is agreed, offered and planned is
judged by what the ranks really hold, not by the rules that led to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from mindspeed_tft.engine import agreement, planning
from mindspeed_tft.engine.agreement import Agreement, Means, agree
from mindspeed_tft.engine.planning import DumpPlan, NoPlan, RepairPlan, plan_dump, plan_repair, plan_unowned
from mindspeed_tft.engine.types import Commit, RankInfo, RankReport, Update
from mindspeed_tft.replica.holders import holders

N, E, P = Commit.NONE, Commit.ENTERED, Commit.PASSED
U, X, D = Update.UNTOUCHED, Update.DIRTY, Update.DONE
GARBAGE = -1
HEARD, SILENT, DEAD, DEAD_AFTER_ITS_REPORT, DAMAGED, REBORN = range(6)


@dataclass(frozen=True)
class Truth:
    """What a rank really holds: the step of its tensors, and the step whose final gradients it has."""

    tensors: int
    gradients: int


@dataclass(frozen=True)
class World:
    step: int  # that of the fault
    infos: dict[int, RankInfo]
    reports: dict[int, RankReport]
    truths: dict[int, Truth]
    fates: dict[int, int]

    @property
    def excluded(self) -> dict[int, str]:
        return {rank: "gone" for rank, fate in self.fates.items() if fate not in (HEARD, DAMAGED)}

    def shows(self, rank: int, step: int) -> bool:
        """This rank has, or can make alone, the state of `step`."""
        truth = self.truths[rank]
        return truth.tensors == step or (truth.tensors == step - 1 and truth.gradients == step)


# Nobody has passed the commit of the step: all have entered it or not. Somebody has: all have final gradients.
BEFORE = ((0, N, U), (0, E, U))
AFTER = ((0, E, U), (0, P, U), (0, P, X), (0, P, D), (1, N, U))
LAYOUTS = (
    (1, 2, 2, 1),
    (1, 4, 2, 1),
    (1, 4, 4, 1),
    (2, 4, 2, 1),
    (3, 3, 3, 1),
    (1, 3, 1, 1),
    (1, 4, 2, 2),
    (2, 4, 1, 2),
)


def infos_of(parts: int, d: int, n: int, experts: int) -> dict[int, RankInfo]:
    """Rank r is at place r // parts of part r % parts; with experts, of a group of experts within that part."""
    found: dict[int, RankInfo] = {}
    inner = d // experts
    for rank in range(parts * d):
        place, part = divmod(rank, parts)
        holds = tuple(f"p{part}/dense/{i}" for i, where in enumerate(holders(d, n)) if place in where)
        if experts == 1:
            found[rank] = RankInfo(rank, f"h{rank // 2}", 100 + rank, f"p{part}", place, holds)
            continue
        among, group = divmod(place, experts)
        few = min(n, inner)
        own = [f"p{part}e{group}/expert/{i}" for i in range(inner // few)]
        mine = tuple(own[i] for i, where in enumerate(holders(inner, few)) if among in where)
        needs = (*(f"p{part}/dense/{i}" for i in range(d // n)), *own)
        found[rank] = RankInfo(rank, f"h{rank // 2}", 100 + rank, f"p{part}e{group}", among, (*holds, *mine), needs)
    return found


@st.composite
def worlds(draw: st.DrawFn, fates: tuple[int, ...] = (HEARD, SILENT, DEAD, DEAD_AFTER_ITS_REPORT, DAMAGED)) -> World:
    infos = infos_of(*draw(st.sampled_from(LAYOUTS)))
    step = draw(st.integers(1, 9))
    cut = draw(st.sampled_from((BEFORE, AFTER)))
    reports, truths, fate_of = {}, {}, {}
    for rank, info in infos.items():
        offset, commit, update = draw(st.sampled_from(cut))
        fate = draw(st.sampled_from((HEARD, HEARD, *fates)))
        at = step + offset
        tensors = at if update is D else GARBAGE if update is X else at - 1
        gradients = at if commit is not N else at - 1
        report = RankReport(rank, at, commit, update, rng_start=f"{info.part}@{at - 1}", rng_end=f"{info.part}@{at}")
        truth = Truth(tensors, gradients)
        if fate == DAMAGED:
            report = RankReport(rank, at, commit, update, "ECC", trusted=False)
            truth = Truth(GARBAGE, GARBAGE)
        elif fate == REBORN:
            report, truth = RankReport(rank, 0, N, U, trusted=False), Truth(GARBAGE, GARBAGE)
        fate_of[rank], truths[rank] = fate, truth
        if fate not in (SILENT, DEAD):
            reports[rank] = report
    return World(step, infos, reports, truths, fate_of)


# ------------------------------------------------------------------------------------------------ the step


def judge_step(world: World) -> Agreement:
    """S is the last step that the world is known to have completed; offers are true, and nobody's is overlooked."""
    found = agree(world.reports, world.infos, start=True)
    trusted = {rank: report for rank, report in world.reports.items() if report.trusted}
    if not trusted:
        assert not found.provable
        return found
    passed = any(report.commit is P or report.step > world.step for report in trusted.values())
    assert found.step == (world.step if passed else world.step - 1), found.reason
    best = max(world.truths[rank].tensors for rank in trusted)
    committed = max(world.truths[rank].gradients for rank in trusted)
    assert best <= found.step <= committed
    for rank, offer in found.offers.items():
        truth = world.truths[rank]
        if offer.means is Means.AS_IS:
            assert truth.tensors == found.step == world.reports[rank].step
        elif offer.means is Means.REWIND:
            assert truth.tensors == found.step == world.reports[rank].step - 1
        elif offer.means is Means.FINISH_UPDATE:
            assert (truth.tensors, truth.gradients) == (found.step - 1, found.step)
        assert bool(offer) == (rank in trusted and world.shows(rank, found.step)), f"rank {rank}: {offer}"
    assert not found.impossible
    return found


@given(worlds())
@settings(deadline=None)
def test_the_step_is_right_for_every_mixture_of_reports(world: World) -> None:
    judge_step(world)


@given(worlds(), st.data())
@settings(deadline=None)
def test_more_reports_never_prove_less(world: World, data: st.DataObject) -> None:
    fewer = {rank: report for rank, report in world.reports.items() if data.draw(st.booleans())}
    before, after = agree(fewer, world.infos, start=True), agree(world.reports, world.infos, start=True)
    assert before.step <= after.step


@given(worlds(), st.data())
@settings(deadline=None)
def test_the_order_of_reports_and_ranks_does_not_matter(world: World, data: st.DataObject) -> None:
    order = data.draw(st.permutations(sorted(world.reports)))
    shuffled = {rank: world.reports[rank] for rank in order}
    first, second = agree(world.reports, world.infos, start=True), agree(shuffled, [*reversed(world.infos)], start=True)
    assert (first.step, first.reason, dict(first.offers)) == (second.step, second.reason, dict(second.offers))


@given(worlds((HEARD,)), st.data())
@settings(deadline=None)
def test_what_the_dead_said_still_proves_a_step(world: World, data: st.DataObject) -> None:
    """Newcomers stand for some ranks: S is what it was, and newcomers offer nothing."""
    reborn = data.draw(st.sets(st.sampled_from(sorted(world.infos)), max_size=len(world.infos) - 1))
    reports = {r: RankReport(r, 0, N, U, trusted=False) if r in reborn else world.reports[r] for r in world.infos}
    found = agree(reports, world.infos, start=True, departed=[world.reports[rank] for rank in sorted(reborn)])
    assert found.step == agree(world.reports, world.infos, start=True).step
    assert not any(found.offers[rank] for rank in reborn)


# ------------------------------------------------------------------------------------------------ a dump


def judge_dump(world: World) -> DumpPlan | NoPlan:
    """Each part once, each shard of it once, from ranks that are there and really can show S; or there are none."""
    found = judge_step(world)
    plan = plan_dump(world.infos, world.reports, found, world.excluded)
    if not found.provable:
        assert isinstance(plan, NoPlan)
        return plan
    able = {
        rank
        for rank in world.reports
        if world.reports[rank].trusted and rank not in world.excluded and world.shows(rank, found.step)
    }
    files: dict[str, set[str]] = {}
    for info in world.infos.values():
        files.setdefault(info.part, set()).update(info.needs or info.holds)
    orphans = {
        shard
        for shards in files.values()
        for shard in shards
        if not any(rank in able for rank, info in world.infos.items() if shard in info.holds)
    }
    unwritten = {part for part in files if not any(world.infos[rank].part == part for rank in able)}
    if isinstance(plan, NoPlan):
        assert set(plan.missing) == orphans and len(plan.missing) == len(orphans)
        assert orphans or unwritten, plan.reason
        assert all(shard in plan.reason for shard in sorted(orphans)[:1]) or len(orphans) > 1
        return plan
    assert not orphans and not unwritten
    assert sorted(part.part for part in plan.parts) == sorted(files)
    for part in plan.parts:
        assert set(part.sources) == files[part.part]
        assert part.writer in able and world.infos[part.writer].part == part.part
        for shard, source in part.sources.items():
            assert source in able and shard in world.infos[source].holds
            now = found.step if source in plan.finish else world.truths[source].tensors
            assert now == found.step, f"{shard} of rank {source} is of step {now}"
    assert set(plan.finish) <= plan.ranks
    staged = {(rank, shard) for rank, shards in plan.staged.items() for shard in shards}
    needed = {(s, shard) for part in plan.parts for shard, s in part.sources.items() if s != part.writer}
    assert staged == needed
    return plan


@given(worlds())
@settings(max_examples=200, deadline=None)
def test_a_dump_is_complete_and_every_source_is_clean_trusted_and_of_s(world: World) -> None:
    judge_dump(world)


@given(worlds((HEARD, DEAD)), st.dictionaries(st.integers(0, 11), st.integers(1, 4)))
@settings(deadline=None)
def test_doubts_change_who_is_taken_and_never_whether(world: World, doubts: dict[int, int]) -> None:
    found = agree(world.reports, world.infos, start=True)
    plain = plan_dump(world.infos, world.reports, found, world.excluded)
    doubtful = plan_dump(world.infos, world.reports, found, world.excluded, doubts)
    assert isinstance(plain, NoPlan) == isinstance(doubtful, NoPlan)


# ------------------------------------------------------------------------------------------------ a repair


def judge_repair(world: World) -> RepairPlan | NoPlan:
    """After the plan was carried out by the book, every rank has every shard of S."""
    found = judge_step(world)
    newcomers = {rank for rank, fate in world.fates.items() if fate == REBORN}
    plan = plan_repair(world.infos, found, blamed=(), newcomers=newcomers)
    if not found.provable:
        assert isinstance(plan, NoPlan)
        return plan
    able = {rank for rank in world.infos if world.shows(rank, found.step)}
    wanted = {shard for rank, info in world.infos.items() if rank not in able for shard in info.holds}
    orphans = {s for s in wanted if not any(s in world.infos[rank].holds for rank in able)}
    if isinstance(plan, NoPlan):
        bereft = {world.infos[r].part for r in newcomers} - {world.infos[r].part for r in able}
        assert set(plan.missing) == orphans
        assert orphans or bereft, plan.reason
        return plan
    assert not orphans
    state = {
        (rank, shard): found.step if rank in plan.finish else world.truths[rank].tensors
        for rank, info in world.infos.items()
        for shard in info.holds
    }
    smalls = [transfer for transfer in plan.transfers if transfer.shard.endswith("/small")]
    shards = [transfer for transfer in plan.transfers if not transfer.shard.endswith("/small")]
    before = dict(state)
    for transfer in shards:
        assert (transfer.target, transfer.shard) in state and transfer.source != transfer.target
        state[transfer.target, transfer.shard] = before[transfer.source, transfer.shard]
    assert set(state.values()) == {found.step}
    assert len({(t.shard, t.target) for t in shards}) == len(shards), "each shard once"
    assert {t.target for t in shards} == set(plan.damaged) == set(world.infos) - able
    assert sorted(t.target for t in smalls) == sorted(newcomers)
    for transfer in smalls:
        assert transfer.source in able and world.infos[transfer.source].part == world.infos[transfer.target].part
    return plan


@given(worlds((HEARD, DAMAGED, REBORN)))
@settings(max_examples=200, deadline=None)
def test_after_a_repair_everybody_has_all_of_s(world: World) -> None:
    judge_repair(world)


@given(worlds((HEARD, DAMAGED)))
@settings(deadline=None)
def test_what_no_checkpoint_holds_comes_from_a_healthy_rank_of_the_part(world: World) -> None:
    damaged = {rank for rank, fate in world.fates.items() if fate == DAMAGED}
    plan = plan_unowned(world.infos, damaged, blamed=())
    healthy = {info.part for rank, info in world.infos.items() if rank not in damaged}
    if isinstance(plan, NoPlan):
        assert {world.infos[rank].part for rank in damaged} - healthy
        return
    assert sorted(transfer.target for transfer in plan) == sorted(damaged)
    for transfer in plan:
        assert transfer.source not in damaged
        assert world.infos[transfer.source].part == world.infos[transfer.target].part


@given(worlds((HEARD,)), st.data())
@settings(deadline=None)
def test_no_checkpoint_is_called_good_that_wrong_numbers_reached(world: World, data: st.DataObject) -> None:
    """Whichever rank made them in its last update, and whoever heard of it: a checkpoint is written after the update of
    its step, so that of the step before the broken update is the newest that is good."""
    broken = data.draw(st.sampled_from(sorted(world.infos)))
    report = world.reports[broken]
    begun = report.step if report.update is not U else report.step - 1
    found = agree(world.reports, world.infos, start=True)
    safe = planning.unspoiled(world.reports.values(), found.step)
    assert safe <= begun - 1
    assert safe >= found.step - 2


@given(st.lists(st.lists(st.integers(0, 9), unique=True), max_size=4), st.integers(0, 9))
@settings(deadline=None)
def test_a_checkpoint_is_loaded_only_where_all_have_it(lists: list[list[int]], most: int) -> None:
    reports = [RankReport(rank, 9, P, D, checkpoints=tuple(sorted(steps))) for rank, steps in enumerate(lists)]
    found = planning.loadable(reports, most)
    assert list(found) == [s for s in range(10) if lists and s <= most and all(s in steps for steps in lists)]


# ------------------------------------------------------------------------------------------------ controls


def test_the_worlds_are_worth_judging() -> None:
    """All ends come about: updates to finish and shards to stage, missing shards, a repair of several newcomers."""
    several: list[tuple[Any, Any]] = [
        (worlds(), lambda w: isinstance(p := judge_dump(w), DumpPlan) and p.finish and p.staged and len(p.parts) > 1),
        (worlds(), lambda w: isinstance(p := judge_dump(w), NoPlan) and len(p.missing) > 1),
        (worlds((HEARD, REBORN)), lambda w: isinstance(p := judge_repair(w), RepairPlan) and len(p.damaged) > 1),
        (worlds((HEARD, DAMAGED)), lambda w: isinstance(p := judge_repair(w), NoPlan) and p.missing),
    ]
    for strategy, wanted in several:
        assert find(strategy, lambda world, wanted=wanted: bool(wanted(world)), settings=SEARCH) is not None


SEARCH = settings(
    max_examples=3000,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

_offer_at, _share, _writers_of = agreement._offer_at, planning._share, planning._Chooser.writers_of


def dirty_will_do(report: RankReport, where: str) -> agreement.Offer:
    return agreement.Offer(Means.AS_IS, where) if report.update is X else _offer_at(report, where)


def nothing_to_finish(report: RankReport, where: str) -> agreement.Offer:
    offer = _offer_at(report, where)
    return agreement.Offer(Means.AS_IS, where) if offer.means is Means.FINISH_UPDATE else offer


def finished_ones_only(report: RankReport, where: str) -> agreement.Offer:
    offer = _offer_at(report, where)
    return agreement.Offer(Means.NONE, where) if offer.means is Means.FINISH_UPDATE else offer


def everybody_is_trusted(report: RankReport, step: int) -> agreement.Offer:
    return _offer_of(RankReport(report.rank, report.step, report.commit, report.update), step)


def the_target_gives(*args: Any) -> tuple[planning.Transfer, ...]:
    return tuple(planning.Transfer(t.shard, t.target, t.target) for t in _share(*args))


def without_the_last(*args: Any) -> tuple[planning.Transfer, ...]:
    return _share(*args)[:-1]


_offer_of = agreement.offer_of

BROKEN: dict[str, tuple[Any, str, Any, Any, Any]] = {
    "a passed commit proves nothing": (
        agreement,
        "completed",
        lambda report: max(0, report.step - 1),
        worlds(),
        judge_step,
    ),
    "an entered commit proves a step": (
        agreement,
        "completed",
        lambda report: report.step - (report.commit is N),
        worlds(),
        judge_step,
    ),
    "a dirty shard will do": (agreement, "_offer_at", dirty_will_do, worlds(), judge_dump),
    "an older shard will do": (agreement, "_offer_at", nothing_to_finish, worlds(), judge_dump),
    "who could finish is overlooked": (agreement, "_offer_at", finished_ones_only, worlds(), judge_dump),
    "everybody is trusted": (agreement, "offer_of", everybody_is_trusted, worlds(), judge_dump),
    "the dead may write": (
        planning._Chooser,
        "writers_of",
        lambda self, part: self._members[part],
        worlds((HEARD, DEAD)),
        judge_dump,
    ),
    "a part's own ranks have all its shards": (
        planning._Chooser,
        "sources_of",
        lambda self, shard: [r for r in self._able if self._infos[r].part == shard.split("/")[0]],
        worlds((HEARD, DEAD)),
        judge_dump,
    ),
    "the damaged give": (planning, "_share", the_target_gives, worlds((HEARD, DAMAGED)), judge_repair),
    "one transfer is left out": (planning, "_share", without_the_last, worlds((HEARD, DAMAGED)), judge_repair),
    "newcomers get no small state": (planning, "_plan_smalls", lambda *_: (), worlds((HEARD, REBORN)), judge_repair),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_caught(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, strategy, judge = BROKEN[rule]
    monkeypatch.setattr(where, name, broken)

    def fails(world: World) -> bool:
        try:
            judge(world)
        except (AssertionError, KeyError, ValueError):
            return True
        return False

    try:
        find(strategy, fails, settings=SEARCH)
    except NoSuchExample:
        pytest.fail("3000 worlds did not show the broken rule")
