"""Writers and sources: preferences, refusals that name shard, holders and fates, and properties of every plan."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tft.engine.agreement import Means, agree
from mindspeed_tft.engine.planning import DumpPlan, NoPlan, PartPlan, plan_dump
from mindspeed_tft.engine.types import Commit, RankInfo, RankReport, Update
from mindspeed_tft.replica.holders import shard_of

N, E, P = Commit.NONE, Commit.ENTERED, Commit.PASSED
U, X, D = Update.UNTOUCHED, Update.DIRTY, Update.DONE


def job(parts: int = 1, d: int = 4, n: int = 2) -> dict[int, RankInfo]:
    """Rank = position * parts + part."""
    return {
        position * parts + part: RankInfo(
            position * parts + part, f"h{position}", 1, f"p{part}", position, (f"p{part}/{shard_of(position, d, n)}",)
        )
        for part in range(parts)
        for position in range(d)
    }


def said(ranks: Mapping[int, RankInfo], **changed: RankReport) -> dict[int, RankReport]:
    plain = {rank: RankReport(rank, 7, P, D, rng_start="s", rng_end="e") for rank in ranks}
    return plain | {int(name[1:]): report for name, report in changed.items()}


def plan(
    infos: Mapping[int, RankInfo],
    reports: Mapping[int, RankReport],
    excluded: Mapping[int, str] | None = None,
    doubts: Mapping[int, int] | None = None,
) -> DumpPlan | NoPlan:
    return plan_dump(infos, reports, agree(reports, infos), excluded or {}, doubts)


def made(found: DumpPlan | NoPlan) -> DumpPlan:
    assert isinstance(found, DumpPlan), found
    return found


def refused(found: DumpPlan | NoPlan) -> NoPlan:
    assert isinstance(found, NoPlan), found
    return found


def test_the_lowest_rank_writes_and_uses_its_own_shard() -> None:
    found = made(plan(job(), said(job())))
    assert found == DumpPlan(7, (PartPlan("p0", 0, {"p0/0": 0, "p0/1": 1}),), ())
    assert found.staged == {1: ("p0/1",)}
    assert (found.publisher, found.ranks, found.writers) == (0, {0, 1}, {"p0": 0})
    assert "1 part, 2 shards" in found.describe()


def test_a_rank_that_is_done_writes_before_one_that_has_to_finish_its_update() -> None:
    """Where nothing aborts a collective, ranks in the middle of a step cannot finish it, and say so one by one."""
    infos = {rank: RankInfo(rank, f"h{rank}", 1, "p0", rank, ("p0/0",)) for rank in range(6)}
    late = {f"r{rank}": RankReport(rank, 7, E, U, rng_start="s") for rank in range(5)}
    found = made(plan(infos, said(infos, **late)))
    assert (found.step, found.writers, found.finish) == (7, {"p0": 5}, ())


def experts() -> dict[int, RankInfo]:
    """Four data-parallel ranks, two replicas, experts divided over two: a part's ranks have one of the dense shards."""
    needs = ("d/0", "d/1")
    return {
        rank: RankInfo(
            rank, "h", 1, f"p-ep{rank % 2}", rank // 2, (f"d/{rank % 2}", f"e{rank % 2}/0"), (*needs, f"e{rank % 2}/0")
        )
        for rank in range(4)
    }


def test_a_part_gets_shards_that_only_ranks_of_other_parts_hold() -> None:
    found = made(plan(experts(), said(experts()), {1: "lost"}))
    assert found.parts == (
        PartPlan("p-ep0", 0, {"d/0": 0, "d/1": 3, "e0/0": 0}),
        PartPlan("p-ep1", 3, {"d/0": 0, "d/1": 3, "e1/0": 3}),
    )
    assert found.staged == {0: ("d/0",), 3: ("d/1",)}
    lost = refused(plan(experts(), said(experts()), {1: "lost", 3: "lost"}))
    assert set(lost.missing) == {"d/1", "e1/0"}


def test_a_shard_that_no_registered_rank_holds_is_missing() -> None:
    infos = {rank: info for rank, info in experts().items() if rank % 2 == 0}
    lost = refused(plan(infos, said(infos)))
    assert lost.missing == ("d/1",)
    assert "d/1 (no rank that holds it has registered)" in lost.reason


def test_every_part_has_its_own_writer() -> None:
    found = made(plan(job(parts=3), said(job(parts=3)), {0: "lost"}))
    assert found.writers == {"p0": 3, "p1": 1, "p2": 2}
    assert found.publisher == 1
    assert found.parts[0].sources == {"p0/0": 6, "p0/1": 3}


def test_a_rank_with_a_fault_of_its_own_is_taken_last() -> None:
    reports = said(job(), r0=RankReport(0, 7, P, D, fault="ValueError"))
    found = made(plan(job(), reports))
    assert found.parts[0] == PartPlan("p0", 1, {"p0/0": 2, "p0/1": 1})
    found = made(plan(job(), reports, {2: "lost"}))  # only rank 0 is left with its shard
    assert found.parts[0].sources["p0/0"] == 0
    assert found.writers == {"p0": 1}


def test_the_writer_with_most_shards_is_preferred_then_the_lowest_dp_rank() -> None:
    infos = job()
    infos[3] = RankInfo(3, "h3", 1, "p0", 3, ("p0/1", "p0/extra"))
    found = made(plan(infos, said(infos)))
    assert found.parts[0] == PartPlan("p0", 3, {"p0/0": 0, "p0/1": 3, "p0/extra": 3})
    infos = {rank: RankInfo(rank, "h", 1, "p0", 3 - rank, ("p0/0",)) for rank in range(4)}
    assert made(plan(infos, said(infos))).writers == {"p0": 3}


def test_doubts_weigh_more_than_everything_else_and_less_than_nothing() -> None:
    found = made(plan(job(), said(job()), {}, {0: 2, 1: 1}))
    assert found.parts[0] == PartPlan("p0", 2, {"p0/0": 2, "p0/1": 3})
    found = made(plan(job(), said(job()), {2: "lost", 3: "lost"}, {0: 2, 1: 1}))
    assert found.parts[0] == PartPlan("p0", 1, {"p0/0": 0, "p0/1": 1})


def test_ranks_that_have_to_finish_are_listed_only_where_used() -> None:
    entered = {f"r{rank}": RankReport(rank, 7, E, U, rng_start="s") for rank in (0, 2, 3)}
    found = made(plan(job(), said(job(), **entered)))
    assert found.finish == (0,)  # rank 1 passed and has done it; ranks 2 and 3 are not needed
    assert "finish" in found.describe()


def test_a_dirty_shard_is_taken_from_another_holder() -> None:
    found = made(plan(job(), said(job(), r0=RankReport(0, 7, P, X))))
    assert found.parts[0].sources == {"p0/0": 2, "p0/1": 1}
    assert found.writers == {"p0": 1}


def test_no_source_names_the_shard_its_holders_and_what_became_of_them() -> None:
    reports = said(job(), r3=RankReport(3, 7, P, X))
    found = refused(plan(job(), reports, {1: "lost (killed by signal 9)"}))
    assert found.missing == ("p0/1",)
    for words in ("p0/1", "rank 1: lost (killed by signal 9)", "rank 3: its update of step 7 began and did not end"):
        assert words in found.reason


def test_many_missing_shards_are_counted_not_listed() -> None:
    infos = job(d=64)
    found = refused(plan(infos, said(infos), dict.fromkeys(range(1, 64), "lost")))
    assert len(found.missing) == 31
    assert "and 28 more" in found.reason
    assert len(found.reason) < 600


def test_a_part_without_shards_still_needs_a_writer() -> None:
    infos = job() | {4: RankInfo(4, "h", 1, "empty", 0, ())}
    assert made(plan(infos, said(infos))).writers["empty"] == 4
    found = refused(plan(infos, said(infos), {4: "finished training"}))
    assert "empty" in found.reason and "finished training" in found.reason


def test_an_unproved_step_is_not_planned() -> None:
    found = refused(plan(job(), {}))
    assert "no trusted report" in found.reason


def test_random_states_must_agree_within_a_part() -> None:
    reports = said(job(), r2=RankReport(2, 7, P, D, rng_end="other"))
    found = refused(plan(job(), reports, {0: "lost"}))
    assert "random state of part p0 at step 7 differs" in found.reason
    assert made(plan(job(), reports, {2: "lost"}))  # the dead do not vote
    reports = said(job(parts=2), **{f"r{rank}": RankReport(rank, 7, P, D, rng_end="b") for rank in (1, 3, 5, 7)})
    assert made(plan(job(parts=2), reports))  # parts may differ


def test_where_random_states_differ_the_first_rank_writes_and_its_state_counts() -> None:
    """Megatron saves that rank's state and gives it to all of them."""
    reports = said(job(), r2=RankReport(2, 7, P, D, rng_end="other"), r0=RankReport(0, 7, P, D, "bug", rng_end="e"))
    found = made(plan(job(), reports))
    assert found.writers["p0"] == 0  # although it has a fault of its own
    agreeing = said(job(), r0=RankReport(0, 7, P, D, "bug", rng_end="e"))
    assert made(plan(job(), agreeing)).writers["p0"] != 0


def test_the_digest_that_counts_is_the_one_of_the_end_of_s() -> None:
    gone = {0: "lost"}
    ahead = RankReport(1, 8, N, U, rng_start="e")
    assert made(plan(job(), said(job(), r1=ahead), gone))
    ahead = RankReport(1, 8, N, U, rng_start="x", rng_end="e")
    assert refused(plan(job(), said(job(), r1=ahead), gone))


def test_an_unknown_digest_is_no_conflict() -> None:
    assert made(plan(job(), said(job(), r0=RankReport(0, 7, E, U, rng_start="s"))))


states = st.tuples(st.integers(5, 7), st.sampled_from(Commit), st.sampled_from(Update), st.booleans(), st.booleans())


@given(
    st.lists(states, min_size=12, max_size=12),
    st.sets(st.integers(0, 11)),
    st.dictionaries(st.integers(0, 11), st.integers(1, 4)),
)
def test_whatever_is_said_a_plan_is_complete_and_stands_on_offers(
    drawn: list[tuple[int, Commit, Update, bool, bool]], gone: set[int], doubts: dict[int, int]
) -> None:
    infos = job(parts=2, d=6, n=3)
    reports = {
        rank: RankReport(rank, step, commit, update, fault="f" if fault else "", trusted=trusted)
        for rank, (step, commit, update, trusted, fault) in enumerate(drawn)
    }
    excluded = dict.fromkeys(gone, "lost")
    agreement = agree(reports, infos)
    found = plan_dump(infos, reports, agreement, excluded, doubts)
    able = {rank for rank in infos if rank not in excluded and agreement.offers[rank]}
    coverable = all(any(shard in infos[rank].holds for rank in able) for shard in ("p0/0", "p0/1", "p1/0", "p1/1"))
    assert isinstance(found, DumpPlan) is (agreement.provable and coverable)
    if isinstance(found, NoPlan):
        assert found.reason
        return
    assert [part.part for part in found.parts] == ["p0", "p1"]
    assert found.ranks <= able
    for part in found.parts:
        assert infos[part.writer].part == part.part
        assert set(part.sources) == {f"{part.part}/0", f"{part.part}/1"}
        assert all(shard in infos[rank].holds for shard, rank in part.sources.items())
        assert part.sources[infos[part.writer].holds[0]] == part.writer
    finishing = {rank for rank in found.ranks if agreement.offers[rank].means is Means.FINISH_UPDATE}
    assert set(found.finish) == finishing


@pytest.mark.parametrize("d", [512])
def test_a_large_part_is_planned_quickly(d: int) -> None:
    infos = job(parts=32, d=d)
    found = made(plan(infos, said(infos), dict.fromkeys(range(8), "lost")))
    assert len(found.parts) == 32
    assert sum(len(part.sources) for part in found.parts) == 32 * d // 2
