"""What the engine makes of the hashes of shards: whose shard is believed, whose is not, and when nobody's is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tft.engine.agreement import Agreement, Means, agree, digests_of, revise
from mindspeed_tft.engine.planning import DumpPlan, NoPlan, RepairPlan, loadable, plan_dump, plan_repair
from mindspeed_tft.engine.types import Closed, Commit, Note, Order, OrderKind, RankInfo, RankReport, Recovered, Update
from tests.unit import test_machine, test_repair
from tests.unit.test_machine import orders

N, E, P = Commit.NONE, Commit.ENTERED, Commit.PASSED
U, X, D = Update.UNTOUCHED, Update.DIRTY, Update.DONE
RIGHT, WRONG, OTHER = "aaaa:7", "bbbb:7", "cccc:7"
REPAIR = OrderKind.REPAIR


def infos(world: int = 4, shards: int = 2) -> dict[int, RankInfo]:
    return {rank: RankInfo(rank, f"h{rank}", rank, "p0", rank, (f"p0/{rank % shards}",)) for rank in range(world)}


def said(rank: int, digest: str = "", stamp: str = "", shards: int = 2, **more: Any) -> RankReport:
    shard = f"p0/{rank % shards}"
    state = {"step": 7, "commit": P, "update": D, **more}
    digests, stamps = ({shard: word} if word else {} for word in (digest, stamp))
    return RankReport(rank=rank, digests=digests, stamps=stamps, **state)


def agreed(*reports: RankReport) -> Agreement:
    return agree({report.rank: report for report in reports}, range(len(reports)))


def test_equal_hashes_are_the_hash_of_the_shard() -> None:
    reports = [said(0, RIGHT, RIGHT), said(1, OTHER), said(2, RIGHT, step=8, commit=N, update=U), said(3, OTHER, OTHER)]
    found = agreed(*reports)
    assert [offer.means for _, offer in sorted(found.offers.items())] == [
        Means.AS_IS, Means.AS_IS, Means.REWIND, Means.AS_IS,
    ]  # fmt: skip
    assert digests_of(found, dict(enumerate(reports))) == {"p0/0": RIGHT, "p0/1": OTHER}


def test_who_lies_by_its_own_stamp_is_no_source_but_still_a_witness() -> None:
    """It is the only rank that passed the commit: without its word a completed step would be lost."""
    waiting = {"commit": E, "update": U}
    found = agreed(said(0, WRONG, RIGHT), *(said(rank, "before:6", "before:6", **waiting) for rank in (1, 2, 3)))
    assert found.step == 7
    assert found.corrupt == (0,)
    assert found.offers[2].means is Means.FINISH_UPDATE
    assert found.offers[0].reason == (
        "its shard p0/0 does not have the hash that it had after the update of step 7 (bbbb after 7 updates instead of "
        "aaaa after 7 updates): a bit of its memory flipped"
    )


def test_a_flip_before_the_update_is_seen_by_the_stamp_of_the_step_before() -> None:
    found = agreed(said(0, WRONG, RIGHT, commit=E, update=U), said(1, commit=P, update=D))
    assert found.step == 7
    assert "after the update of step 6" in found.offers[0].reason


@pytest.mark.parametrize(("stamp", "other"), [("", ""), (RIGHT, WRONG), (RIGHT, "")])
def test_two_holders_that_differ_prove_nothing(stamp: str, other: str) -> None:
    """Not even with a hash of each: a bit may have flipped before it was taken, or in the update."""
    found = agreed(said(0, RIGHT, stamp), said(1, OTHER), said(2, WRONG, other), said(3, OTHER))
    assert found.corrupt == (0, 2)
    told = "(aaaa after 7 updates: rank 0, bbbb after 7 updates: rank 2) of shard p0/0"
    assert all(found.offers[rank].reason == f"nothing shows whose hash is right {told}" for rank in (0, 2))
    plan = plan_dump(infos(), {rank: said(rank) for rank in range(4)}, found, {})
    assert isinstance(plan, NoPlan) and plan.missing == ("p0/0",)
    assert "nothing shows whose hash is right" in plan.reason


def test_the_majority_of_three_is_believed() -> None:
    found = agreed(*(said(rank, WRONG if rank == 0 else RIGHT, shards=1) for rank in range(3)))
    assert found.corrupt == (0,)
    assert "another hash than the majority (aaaa after 7 updates: ranks 1, 2, bbbb" in found.offers[0].reason


def test_half_is_no_majority() -> None:
    found = agreed(*(said(rank, WRONG if rank < 2 else RIGHT, shards=1) for rank in range(4)))
    assert found.corrupt == (0, 1, 2, 3)


def test_a_stamp_that_speaks_against_its_rank_leaves_the_other() -> None:
    found = agreed(said(0, WRONG, RIGHT), said(1, OTHER), said(2, RIGHT), said(3, OTHER))
    plan = plan_dump(infos(), {rank: said(rank) for rank in range(4)}, found, {})
    assert isinstance(plan, DumpPlan)
    assert (plan.parts[0].writer, plan.parts[0].sources) == (1, {"p0/0": 2, "p0/1": 1})


def test_ranks_before_and_after_the_update_are_not_compared() -> None:
    found = agreed(said(0, RIGHT), said(1, OTHER), said(2, "before:6", commit=E, update=U), said(3, OTHER))
    assert found.corrupt == ()
    assert found.offers[2].means is Means.FINISH_UPDATE


def test_ranks_before_the_update_are_compared_with_each_other() -> None:
    waiting = {"commit": E, "update": U}
    found = agreed(said(0, "x:6", **waiting), said(1, OTHER), said(2, "y:6", **waiting), said(3, OTHER))
    assert found.corrupt == (0, 2)
    assert (
        "(x after 6 updates: rank 0, y after 6 updates: rank 2) of shard p0/0 before its update"
        in found.offers[0].reason
    )


def test_the_dead_have_a_voice() -> None:
    """What a replaced process said of its shard speaks against the holder that is left."""
    reports = {0: said(0, WRONG), 1: said(1, OTHER), 2: RankReport(2, 0, N, U, trusted=False), 3: said(3, OTHER)}
    assert agree(reports, range(4)).corrupt == ()
    found = agree(reports, range(4), departed=[said(2, RIGHT)])
    assert found.corrupt == (0,)
    assert revise(found, reports, range(4), departed=[said(2, RIGHT)]).corrupt == (0,)
    assert agree(reports, range(4), departed=[said(2, RIGHT, trusted=False)]).corrupt == ()


def test_a_rank_with_a_wrong_shard_gets_the_right_one() -> None:
    found = agreed(said(0, WRONG, RIGHT), said(1, OTHER), said(2, RIGHT), said(3, OTHER))
    plan = plan_repair(infos(), found, blamed=())
    assert isinstance(plan, RepairPlan)
    assert (plan.damaged, [str(transfer) for transfer in plan.transfers]) == ((0,), ["p0/0|2|0"])


def test_a_checkpoint_at_which_holders_differed_is_not_loaded() -> None:
    saved = [{"2|p0/0": RIGHT, "4|p0/0": RIGHT}, {"4|p0/1": OTHER}, {"2|p0/0": RIGHT, "4|p0/0": WRONG}]
    reports = [RankReport(rank, 7, N, U, checkpoints=(2, 4), saved=told) for rank, told in enumerate(saved)]
    assert loadable(reports, 6) == (2,)
    assert loadable(reports[:2], 6) == (2, 4)


# Of each rank: its shard is right; it flipped before its hash was taken, or after; and whether it was taken at all.
FATES = st.sampled_from(["right", "before", "after"])


@given(st.lists(st.tuples(FATES, st.booleans()), min_size=4, max_size=4), st.sampled_from([1, 2]))
def test_whatever_flips_no_wrong_shard_is_used_beside_a_right_one(fates: list[tuple[str, bool]], shards: int) -> None:
    """Only where all holders are wrong, and each hash came after the flip, can nobody know. They differ then, too."""
    reports = {}
    for rank, (fate, hashed) in enumerate(fates):
        wrong = f"wrong{rank}:7"
        digest, stamp = {"right": (RIGHT, RIGHT), "before": (wrong, wrong), "after": (wrong, RIGHT)}[fate]
        reports[rank] = said(rank, digest, stamp if hashed else "", shards=shards)
    agreement = agree(reports, range(4))
    plan = plan_dump(infos(shards=shards), reports, agreement, {})
    holders = {shard: [rank for rank in range(4) if rank % shards == shard] for shard in range(shards)}
    caught = {rank for rank, (fate, hashed) in enumerate(fates) if fate == "after" and hashed}
    voices = [[rank for rank in held if rank not in caught] for held in holders.values()]
    right = [[rank for rank in held if fates[rank][0] == "right"] for held in voices]
    believable = all(
        len(good) * 2 > len(held) or len(held) == 1 for good, held in zip(right, voices, strict=True) if held
    )
    assert isinstance(plan, DumpPlan) is (believable and all(voices))
    if isinstance(plan, DumpPlan):
        for source in plan.parts[0].sources.values():
            alone = any(held == [source] for held in voices)
            assert fates[source][0] == "right" or alone


# ------------------------------------------------------------------------------------------------ whole incidents


class Dumping(test_machine.Job):
    """All ranks hold the same shard."""

    def info(self, rank: int, pid: int = 0) -> RankInfo:
        return RankInfo(rank, f"h{rank}", pid or 1000 + rank, "p0", rank, ("p0/0",))


class Repairing(test_repair.Job):
    """All ranks hold the same shard."""

    def info(self, rank: int, pid: int = 0) -> RankInfo:
        return RankInfo(rank, f"h{rank}", pid or 1000 + rank, "p0", rank, ("p0/0",))


def notes(actions: list[Any]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, Note))


def shard(rank: int, digest: str, stamp: str = "") -> dict[str, dict[str, str]]:
    name = f"p0/{rank % 2}"
    return {"digests": {name: digest}, "stamps": {name: stamp} if stamp else {}}


def test_a_dump_names_the_right_hashes_and_leaves_the_wrong_shard_out() -> None:
    job = test_machine.Job()
    job.lose(3)
    job.report(0, **shard(0, WRONG, RIGHT))
    job.report(1, **shard(1, OTHER, OTHER))
    job.report(2, **shard(2, RIGHT, RIGHT))
    (stage,) = job.until(OrderKind.STAGE_SHARDS)
    assert (stage.rank, stage.payload["digests"]) == (2, {"p0/0": RIGHT})
    (write,) = job.until(OrderKind.WRITE_PART)
    assert (write.rank, write.payload["digests"]) == (1, {"p0/0": RIGHT, "p0/1": OTHER})
    assert "wrong shards, never a source: rank 0: its shard p0/0" in notes(job.actions)


def test_a_rank_whose_finished_update_comes_out_otherwise_is_left_out() -> None:
    """Three holders of one shard: one of them computes something else."""
    job = Dumping(world=3)
    job.feed(test_machine.FaultSeen(0, 2, "exception", "x", True))
    known = {"digests": {"p0/0": RIGHT}, "stamps": {"p0/0": RIGHT}}
    job.report(0, commit=E, update=U, digests={"p0/0": "b:6"}, stamps={"p0/0": "b:6"})
    job.report(1, 2, fault="x", **known)  # so that rank 0 is to write, though it is not done yet
    (finish,) = job.until(OrderKind.FINISH_UPDATE)
    assert finish.rank == 0
    job.answer(finish, **{"digest:p0/0": WRONG})
    job.wait(1)
    (write,) = job.until(OrderKind.WRITE_PART)
    assert write.rank == 1
    assert "another hash than the majority (aaaa after 7 updates: ranks 1, 2, bbbb" in notes(job.actions)


def test_without_a_provable_shard_nothing_is_saved() -> None:
    job = test_machine.Job()
    job.lose(3)
    job.report(0, **shard(0, WRONG))
    job.report(1, **shard(1, OTHER))
    job.report(2, **shard(2, RIGHT))
    closed = job.leave()
    assert closed.outcome == "failed"
    assert (
        "whose hash is right (aaaa after 7 updates: rank 2, bbbb after 7 updates: rank 0) of shard p0/0"
        in closed.summary
    )


def test_a_repair_moves_the_right_shard_and_names_its_hash() -> None:
    job = test_repair.Job()
    job.fault(1, kind="link", message="link down")
    for rank, digest in enumerate([WRONG, OTHER, RIGHT, OTHER]):
        job.report(rank, commit=P, update=D, **shard(rank, digest, RIGHT if rank == 0 else digest))
    found = job.until(REPAIR)
    assert {order.rank for order in found} == {0, 2}
    assert all(order.payload["transfers"] == ["p0/0|2|0"] for order in found)
    assert all(order.payload["digests"] == {"p0/0": RIGHT} for order in found)
    assert isinstance(job.resume(), Recovered)


def test_a_repair_whose_target_got_something_else_takes_another_source() -> None:
    """Three holders: what comes from the first one does not have its hash."""
    job = Repairing(world=3)
    told = {"digests": {"p0/0": RIGHT}, "stamps": {"p0/0": RIGHT}}
    sources = []
    for _ in range(2):
        if not sources:
            job.fault(0)
        job.report(0, trusted=False)
        job.report(1, 2, **told)
        orders_ = job.until(REPAIR)
        (transfer,) = set(map(str, orders_[0].payload["transfers"]))  # type: ignore[arg-type]
        sources.append(transfer)
        if len(sources) == 1:
            (target,) = (order for order in orders_ if order.rank == 0)
            job.answer(target, ok=False, message="DumpError: another hash")
    assert sources == ["p0/0|1|0", "p0/0|2|0"]
    job.resume()


def test_holders_that_differ_are_rewound() -> None:
    job = test_repair.Job()
    job.fault(1, kind="link", message="link down")
    for rank, digest in enumerate([WRONG, OTHER, RIGHT, OTHER]):
        job.report(rank, commit=P, update=D, checkpoints=(4,), **shard(rank, digest, digest))
    assert {order.kind for order in job.until(OrderKind.LOAD)} == {OrderKind.LOAD}
    job.resume()
    assert "nothing shows whose hash is right" in notes(job.actions)
    (recovered,) = [action for action in job.actions if isinstance(action, Recovered)]
    assert (recovered.outcome, recovered.step) == ("rewound", 4)


def test_a_wrong_update_in_a_repair_leads_to_another_try() -> None:
    """Rank 2 finishes its update with another result: everybody is stopped once more, and it gets the shard."""
    job = Repairing(world=3)
    told = {"digests": {"p0/0": RIGHT}, "stamps": {"p0/0": RIGHT}}
    job.fault(1, kind="link", message="link down")
    job.report(2, commit=E, update=U, digests={"p0/0": "b:6"})
    job.report(0, 1, commit=P, update=D, **told)
    (finish,) = job.until(OrderKind.FINISH_UPDATE)
    job.answer(finish, **{"digest:p0/0": WRONG})
    job.report(2, commit=P, update=D, digests={"p0/0": WRONG}, stamps={"p0/0": WRONG})
    job.report(0, 1, commit=P, update=D, **told)
    found = job.until(REPAIR)
    assert found[0].payload["transfers"] == ["p0/0|0|2"]
    assert isinstance(job.resume(), Recovered)
    assert not any(isinstance(action, Closed) for action in job.actions)
    assert all(isinstance(order, Order) for order in orders(job.actions))
