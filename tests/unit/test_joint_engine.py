"""The engine of jobs whose ranks save together: one order to all that give a shard, nobody finishes an update, and no
operator's wish is taken that could not be carried out."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from engine_job import DEADLINES, E, EngineJob, U, notes, orders
from hypothesis import given, settings

from mindspeed_tft.engine.joint import JointEngine, joint_groups
from mindspeed_tft.engine.planning import NEWEST, DumpPlan, PartPlan
from mindspeed_tft.engine.repair import INTACT, LOADED
from mindspeed_tft.engine.states import State
from mindspeed_tft.engine.types import (
    Action,
    Answer,
    Asked,
    FaultSeen,
    Held,
    Order,
    OrderKind,
    RankInfo,
    RankLost,
    RankReport,
    Recovered,
    Released,
    Reported,
    Tell,
    Wish,
)


class Joint(EngineJob):
    """Four ranks, a list of two slices in two replicas. Between updates a rank stands uncommitted at the next step."""

    def __init__(self, *strategies: str) -> None:
        super().__init__(JointEngine(DEADLINES, 4, strategies=frozenset({"dump", *strategies})))

    def info(self, rank: int, pid: int = 0) -> RankInfo:
        return RankInfo(rank, f"h{rank}", pid or 1000 + rank, "ranks0", rank, (f"ranks0/dense/{rank % 2}",))

    def report(self, rank: int, completed: int, trusted: bool = True) -> None:
        epoch = self.engine.status()["epoch"]
        assert isinstance(epoch, int)
        self.feed(Reported(0, RankReport(rank, completed + 1, E, U, trusted=trusted, epoch=epoch)))

    def open(self) -> list[Order]:
        return [order for order in orders(self.actions) if order.id not in self.answered]


def payloads(job: Joint, kind: OrderKind) -> dict[int, Any]:
    return {order.rank: order.payload for order in job.open() if order.kind is kind}


def test_all_that_give_a_shard_save_at_once_and_one_renames() -> None:
    job = Joint()
    job.feed(RankLost(0, 3, "killed"))
    for rank in range(3):
        job.report(rank, completed=4)
    found = payloads(job, OrderKind.WRITE_PART)
    assert {rank: (one["step"], one["groups"]) for rank, one in found.items()} == {
        0: (4, ["ranks0/dense|0,1"]),
        1: (4, ["ranks0/dense|0,1"]),
    }
    assert not orders(job.actions, OrderKind.STAGE_SHARDS)
    job.answer(*job.open())
    (publish,) = job.open()
    assert publish.kind is OrderKind.PUBLISH
    job.answer(publish, path="", resume="")
    assert job.engine.state is State.EXITING and {order.payload["code"] for order in job.open()} == {75}


def test_who_did_not_come_to_an_update_of_others_gives_nothing() -> None:
    """Rank 1 was stopped before its update of step 5, which ranks 0 and 2 have completed: its slice is on rank 3."""
    job = Joint()
    job.feed(FaultSeen(0, 1, "exception", "an error", own=True))
    for rank, completed in ((0, 5), (1, 4), (2, 5), (3, 5)):
        job.report(rank, completed)
    assert "rank 1 did not come to its update of step 5" in notes(job.actions, warn=True)
    assert not orders(job.actions, OrderKind.FINISH_UPDATE)
    assert payloads(job, OrderKind.WRITE_PART)[3]["groups"] == ["ranks0/dense|0,3"]


def test_it_is_repaired_where_that_is_wanted() -> None:
    job = Joint("retry")
    job.feed(FaultSeen(0, 1, "link", "a link", own=True))
    for rank, completed in ((0, 5), (1, 4), (2, 5), (3, 5)):
        job.report(rank, completed)
    job.answer(*job.until(OrderKind.REGROUP))
    assert payloads(job, OrderKind.REPAIR)[1]["transfers"] == ["ranks0/dense/1|3|1"]


def test_a_rank_that_turns_out_intact_is_given_nothing() -> None:
    job = Joint("retry")
    job.feed(FaultSeen(0, 1, "memory", "UCE ERROR", own=True))
    for rank in range(4):
        job.report(rank, completed=4, trusted=rank != 1)
    for order in job.until(OrderKind.REGROUP):
        job.answer(order, **({INTACT: "no live tensor was hit"} if order.rank == 1 else {}))
    assert not orders(job.actions, OrderKind.REPAIR)
    assert payloads(job, OrderKind.ROLLBACK).keys() == {0, 1, 2, 3}


def test_shards_in_the_order_of_their_numbers_and_experts_once() -> None:
    dense = {f"ranks0/dense/{number}": 100 - number for number in range(12)}
    parts = (
        PartPlan("ranks0", 100, {**dense, "ranks4/expert/0": 7}),
        PartPlan("ranks1", 8, {"ranks1/dense/0": 8, "ranks4/expert/0": 9}),
    )
    assert joint_groups(DumpPlan(3, parts, ())) == {
        "ranks0/dense": tuple(100 - number for number in range(12)),
        "ranks1/dense": (8,),
        "ranks4/expert": (7,),
    }


def test_what_no_callback_does_is_refused_at_once() -> None:
    job = Joint("retry")
    for kind in ("dump", "switch-link", "switch-back"):
        (answer,) = job.feed(Asked(0, kind, kind))
        assert isinstance(answer, Answer) and not answer.ok and f"{kind} is not possible here" in answer.text


def wishes(actions: list[Action]) -> list[Wish]:
    return [action.wish for action in actions if isinstance(action, Tell)]


def test_ranks_that_are_held_apart_meet_one_step_later() -> None:
    """Rank 3 did not know of the pause at the end of step 7, and waits for the others in step 8."""
    job = Joint()
    (first,) = wishes(job.feed(Asked(0, "p", "pause")))
    job.feed(*(Held(0, rank, first.hold, 7) for rank in range(3)))
    (second,) = wishes(job.wait(DEADLINES.heartbeat_lost))
    assert second.hold > first.hold and second.hold_from == 8
    job.feed(*(Released(0, rank, first.hold) for rank in range(3)))
    assert not [one for one in job.actions if isinstance(one, Answer)]
    found = job.feed(*(Held(0, rank, second.hold, 8) for rank in range(4)))
    (answer,) = [one for one in found if isinstance(one, Answer)]
    assert answer.ok and answer.data["step"] == 8
    assert not wishes(job.wait(2 * DEADLINES.heartbeat_lost))  # nobody is sent on
    (over,) = wishes(job.feed(Asked(0, "r", "resume")))
    assert over.hold == 0
    found = job.feed(*(Released(0, rank, second.hold) for rank in range(4)))
    assert [one.ok for one in found if isinstance(one, Answer)] == [True]


def test_all_held_is_no_pause_where_two_steps_are_told() -> None:
    job = Joint()
    (first,) = wishes(job.feed(Asked(0, "p", "pause")))
    job.feed(*(Held(0, rank, first.hold, 7 + (rank == 3)) for rank in range(4)))
    assert not [one for one in job.actions if isinstance(one, Answer)]
    (second,) = wishes(job.wait(DEADLINES.heartbeat_lost))
    assert second.hold_from == 9


@settings(max_examples=200, deadline=None)
@given(
    completed=st.lists(st.sampled_from([4, 5]), min_size=4, max_size=4),
    trusted=st.lists(st.booleans(), min_size=4, max_size=4),
    dead=st.sets(st.integers(0, 3), max_size=3),
)
def test_what_is_saved_is_of_one_step_and_whole_or_nothing_is(
    completed: list[int], trusted: list[bool], dead: set[int]
) -> None:
    """S is the last step that a trusted rank has told; each slice comes from a rank that has told it. Where a slice has
    none, nothing is saved."""
    job = Joint()
    job.feed(*(RankLost(0, rank, "killed") for rank in sorted(dead)))
    job.feed(FaultSeen(0, min({0, 1, 2, 3} - dead), "exception", "an error", own=True))
    alive = [rank for rank in range(4) if rank not in dead]
    for rank in alive:
        job.report(rank, completed[rank], trusted[rank])
    said = [completed[rank] for rank in alive if trusted[rank]]
    able = [rank for rank in alive if trusted[rank] and completed[rank] == max(said, default=0)]
    found = payloads(job, OrderKind.WRITE_PART)
    if {rank % 2 for rank in able} != {0, 1}:
        assert not found and {order.payload["code"] for order in job.open()} == {76}
        return
    ((step, groups),) = {(one["step"], tuple(one["groups"])) for one in found.values()}
    (group,) = groups
    ranks = [int(rank) for rank in group.partition("|")[2].split(",")]
    assert step == max(said) and set(ranks) == found.keys() <= set(able)
    assert [rank % 2 for rank in ranks] == [0, 1]


def loaded(job: Joint, *steps: int) -> list[Action]:
    """Up to the answers to LOAD: which checkpoint each rank has found."""
    job.feed(FaultSeen(0, 1, "precision", "wrong numbers", own=True))
    for rank in range(4):
        job.feed(Reported(0, RankReport(rank, 7, E, U, epoch=1, checkpoints=(NEWEST,))))
    orders_ = job.until(OrderKind.LOAD)
    assert {order.payload["step"] for order in orders_} == {NEWEST}
    found: list[Action] = []
    for order, step in zip(orders_, steps, strict=True):
        found += job.answer(order, **{LOADED: str(step)})
    return found


def test_the_newest_checkpoint_is_whichever_all_ranks_find() -> None:
    job = Joint("retry")
    resumed = orders(loaded(job, 3, 3, 3, 3), OrderKind.RESUME)
    assert {order.rank: order.payload["step"] for order in resumed} == dict.fromkeys(range(4), 3)
    (recovered,) = [one for one in job.answer(*resumed) if isinstance(one, Recovered)]
    assert (recovered.outcome, recovered.step) == ("rewound", 3) and "checkpoint of step 3" in recovered.summary
    assert "newest checkpoint that they find" in notes(job.actions) and "step 0" not in notes(job.actions)


@pytest.mark.parametrize(
    ("steps", "why"),
    [((3, 3, 3, 2), "rank 3 loaded the checkpoint of step 2, and others that of step 3"),
     ((6, 6, 6, 6), "where no later one than that of step 5 can be right")],
)  # fmt: skip
def test_a_checkpoint_that_cannot_count_is_not_trained_on(steps: tuple[int, ...], why: str) -> None:
    job = Joint("retry")
    found = loaded(job, *steps)
    assert why in notes(found, warn=True) and not orders(found, OrderKind.RESUME)
