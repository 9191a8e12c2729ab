"""Online repair by hand: what is repairable, who gives what to whom, each stage, further faults, and the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from engine_job import DEADLINES, D, E, EngineJob, N, P, U, X, notes, orders, stops
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_tft.engine.agreement import agree
from mindspeed_tft.engine.machine import Engine, State
from mindspeed_tft.engine.planning import NoPlan, RepairPlan, plan_repair, plan_unowned
from mindspeed_tft.engine.repair import MAX_TRIES_AT_STEP
from mindspeed_tft.engine.types import (
    Action,
    Closed,
    Commit,
    Event,
    FaultSeen,
    Heartbeat,
    Order,
    OrderDone,
    OrderKind,
    RankFinished,
    RankInfo,
    RankLost,
    RankReport,
    Recovered,
    Registered,
    Reported,
    Stop,
    Tick,
    Update,
)

FINISH, REGROUP, REPAIR = OrderKind.FINISH_UPDATE, OrderKind.REGROUP, OrderKind.REPAIR
ROLLBACK, RESUME, EXIT = OrderKind.ROLLBACK, OrderKind.RESUME, OrderKind.EXIT
DUMPING = (OrderKind.STAGE_SHARDS, OrderKind.WRITE_PART, OrderKind.PUBLISH)
ECC = "ECC at 0x7f"


class Job(EngineJob):
    """An engine that may repair, four ranks: one part, two shards, rank r holds shard r % 2."""

    def __init__(self, world: int = 4, strategies: frozenset[str] = frozenset({"dump", "retry"})) -> None:
        super().__init__(Engine(DEADLINES, world, strategies=strategies), world)

    @property
    def epoch(self) -> int:
        return int(str(self.engine._desk.epoch))

    def fault(self, rank: int, kind: str = "memory", message: str = ECC, own: bool = True) -> list[Action]:
        return self.feed(FaultSeen(0, rank, kind, message, own))

    def report(self, *ranks: int, step: int = 7, commit: Commit = N, update: Update = U, **more: Any) -> list[Action]:
        more.setdefault("epoch", self.epoch)
        return self.feed(*(Reported(0, RankReport(rank, step, commit, update, **more)) for rank in ranks))

    def report_all(self, *untrusted: int, **more: Any) -> list[Action]:
        found = []
        for rank in range(self.world):
            found += self.report(rank, trusted=rank not in untrusted, **more)
        return found

    def open(self) -> list[Order]:
        """Orders of the last stop that are not answered."""
        since = next(index for index, a in enumerate(self.actions) if isinstance(a, Stop) and a.epoch == self.epoch)
        return [order for order in orders(self.actions[since:]) if order.id not in self.answered]

    def resume(self) -> Recovered:
        """Everything succeeds from here."""
        self.answer(*self.until(RESUME))
        assert self.engine.state is State.TRAINING
        return [action for action in self.actions if isinstance(action, Recovered)][-1]

    def dumped(self) -> Closed:
        self.answer(*self.until(OrderKind.PUBLISH), path="/c")
        self.answer(*orders(self.actions, EXIT))
        (closed,) = [action for action in self.actions if isinstance(action, Closed)]
        assert closed.outcome == "dumped"
        return closed


def said(found: list[Order]) -> list[tuple[int, OrderKind, dict[str, Any]]]:
    return [(order.rank, order.kind, dict(order.payload)) for order in found]


def to_all(kind: OrderKind, world: int = 4, **payload: Any) -> list[tuple[int, OrderKind, dict[str, Any]]]:
    if kind in (ROLLBACK, LOAD):
        payload.setdefault("newcomers", [])
    return [(rank, kind, payload) for rank in range(world)]


# ------------------------------------------------------------------------------------------------ undisturbed


def test_a_memory_fault_from_stop_to_resume() -> None:
    job = Job()
    (stop,) = stops(job.fault(1))
    assert (stop.epoch, stop.ranks) == (1, (0, 1, 2, 3))
    job.report(1, trusted=False, fault=ECC, epoch=0)  # of its own accord
    job.report(0, 2)
    found = orders(job.report(3))
    assert said(found) == to_all(REGROUP, step=6, epoch=1)
    assert (job.engine.state, job.engine.step) == (State.REGROUPING, 6)
    assert not orders(job.answer(*found[:3]))
    found = orders(job.answer(found[3]))
    assert said(found) == [(rank, REPAIR, {"step": 6, "epoch": 1, "transfers": ["p0/1|3|1"]}) for rank in (1, 3)]
    assert job.engine.state is State.REPAIRING
    found = orders(job.answer(*found))
    assert said(found) == to_all(ROLLBACK, step=6, epoch=1)
    assert job.engine.state is State.ROLLING_BACK
    found = orders(job.answer(*found))
    assert said(found) == to_all(RESUME, step=6, epoch=1)
    assert job.engine.state is State.RESUMING
    (done,) = [action for action in job.answer(*found) if isinstance(action, Recovered)]
    assert (done.outcome, done.step, done.tries, done.epoch) == ("retried", 6, 1, 1)
    for words in (f"rank 1 memory: {ECC}", "after step 6", "0 completed steps lost"):
        assert words in done.summary
    assert job.engine.state is State.TRAINING
    assert not [action for action in job.actions if isinstance(action, Closed)]
    assert len(stops(job.actions)) == 1


def test_everybody_finishes_the_update_not_only_who_gives() -> None:
    job = Job()
    job.fault(1)
    job.report(0, commit=P, update=D)
    job.report(1, trusted=False)
    found = orders(job.report(2, 3, commit=E))
    assert said(found) == [(rank, FINISH, {"step": 7, "epoch": 1}) for rank in (2, 3)]
    assert job.engine.state is State.FINISHING
    job.answer(*found)
    assert job.until(REPAIR)[0].payload["transfers"] == ["p0/1|3|1"]
    assert job.resume().step == 7


def test_a_link_fault_moves_nothing() -> None:
    job = Job()
    job.fault(2, "link", "LINK ERROR")
    job.report_all()
    job.resume()
    assert not orders(job.actions, REPAIR)


def test_a_fault_that_only_peers_noticed_is_a_broken_link() -> None:
    job = Job()
    job.fault(0, "peer", "connection reset", own=False)
    job.fault(3, "communication", "timeout", own=False)
    job.report_all()
    assert job.resume().step == 6


def test_a_fault_in_the_first_step_goes_back_to_the_start() -> None:
    job = Job()
    job.fault(1)
    job.report_all(1, step=1, commit=E)
    assert job.until(REPAIR)[0].payload == {"step": 0, "epoch": 1, "transfers": ["p0/1|3|1"]}
    assert job.resume().step == 0


def test_a_dirty_shard_of_a_trusted_rank_is_repaired() -> None:
    job = Job()
    job.fault(2, "link", "FORCE STOP")
    job.report(0, 1, 3, commit=P, update=D)
    job.report(2, commit=P, update=X)
    assert job.until(REPAIR)[0].payload["transfers"] == ["p0/0|0|2"]
    assert job.resume().step == 7


def test_random_states_are_not_compared() -> None:
    job = Job()
    job.fault(2, "link", "x")
    for rank in range(4):
        job.report(rank, commit=P, update=D, rng_end=f"digest {rank}")
    assert job.resume().step == 7


# ------------------------------------------------------------------------------------------------ planning


def plan(infos: list[RankInfo], damaged: set[int], blamed: set[int] = frozenset()) -> RepairPlan | NoPlan:  # type: ignore[assignment]
    reports = {info.rank: RankReport(info.rank, 7, N, U, trusted=info.rank not in damaged) for info in infos}
    return plan_repair({info.rank: info for info in infos}, agree(reports, reports, start=True), blamed | damaged)


def sources(found: RepairPlan | NoPlan) -> list[str]:
    assert isinstance(found, RepairPlan), found
    return [str(transfer) for transfer in found.transfers]


def holders_of(*holds: str, hosts: str = "") -> list[RankInfo]:
    names = hosts or "abcdefgh"
    return [RankInfo(rank, names[rank], rank, "p", rank, tuple(held)) for rank, held in enumerate(holds)]


def test_several_sources_share_the_work() -> None:
    assert sources(plan(holders_of("xyz", "xyz", "xyz", "xyz"), {0})) == ["x|1|0", "y|2|0", "z|3|0"]
    assert sources(plan(holders_of("x", "x", "x", "x"), {0, 1})) == ["x|2|0", "x|3|1"]


def test_a_blamed_rank_is_the_last_source_and_another_host_a_better_one() -> None:
    assert sources(plan(holders_of("x", "x", "x"), {0}, {1})) == ["x|2|0"]
    assert sources(plan(holders_of("x", "x"), {0}, {1})) == ["x|1|0"]
    assert sources(plan(holders_of("x", "x", "x", hosts="aab"), {0})) == ["x|2|0"]


def test_a_shard_without_a_healthy_holder_is_named() -> None:
    found = plan(holders_of("x", "y", "x", "y"), {0, 2})
    assert isinstance(found, NoPlan)
    assert found.missing == ("x",)
    assert "no healthy holder of shard x (rank 0: its memory may be damaged; rank 2" in found.reason


def test_a_plan_for_many_ranks_is_cheap_and_covers_all() -> None:
    infos = [RankInfo(rank, f"h{rank // 8}", rank, "p", rank, (f"s{rank % 512}", "c")) for rank in range(4096)]
    found = plan(infos, set(range(0, 4096, 65)))
    assert len(sources(found)) == 128


# ------------------------------------------------------------------------------------------------ not repairable


@pytest.mark.parametrize("kind", ["exception", "terminated", "handler", "lost", "stopped", "oom", "communication", ""])
def test_own_faults_of_other_kinds_lead_to_a_dump(kind: str) -> None:
    job = Job()
    job.fault(1, kind, "x")
    job.report_all()
    assert "no repair, a dump instead: a fault of kind" in notes(job.actions, warn=True)
    assert not orders(job.actions, REGROUP)
    assert "It was not repaired online" in job.dumped().summary


def trouble(name: str, job: Job) -> None:
    """A memory fault of rank 1, and something else."""
    job.fault(1)
    if name == "another kind beside it":
        job.fault(2, "exception", "x")
    elif name == "an unknown notice":
        job.fault(2, "riddle", "x", own=False)
    elif name == "a loss":
        job.feed(RankLost(0, 2, "killed"))
    elif name == "a finished rank":
        job.feed(RankFinished(0, 2))
    elif name == "a report with a fault that nobody told":
        job.report(2, fault="ValueError")
    for rank in (0, 2, 3):
        if rank != 2 or name != "a silent rank":
            job.report(rank, step=5 if rank == 3 and name == "an impossible report" else 7, commit=P, update=D)
    job.report(1, trusted=False, commit=P, update=D)
    if name == "a silent rank":
        job.wait(10)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("another kind beside it", "'exception'"),
        ("an unknown notice", "'riddle'"),
        ("a loss", "rank 2 was lost"),
        ("a finished rank", "rank 2 finished training"),
        ("a silent rank", "rank 2 did not report"),
        ("a report with a fault that nobody told", "'stopped'"),
        ("an impossible report", "impossible reports"),
    ],
)
def test_what_is_not_repairable_is_saved(name: str, reason: str) -> None:
    job = Job()
    trouble(name, job)
    assert not orders(job.actions, REGROUP)
    assert reason in notes(job.actions, warn=True).split("no repair, a dump instead: ")[1]
    if name in ("an impossible report",):
        assert job.engine.step == 7
    else:
        job.dumped()


def test_a_report_before_its_event_does_not_hide_the_kind() -> None:
    job = Job()
    job.report(1, trusted=False, fault=ECC, epoch=0)
    job.fault(1)
    job.report(0, 2, 3)
    job.resume()


def test_two_holders_of_one_shard_damaged() -> None:
    job = Job()
    job.fault(1)
    job.fault(3)
    job.report_all(1, 3)
    assert "no healthy holder of shard p0/1" in notes(job.actions)
    assert job.engine.state is State.EXITING
    assert "no holder left of shard p0/1" in str(orders(job.actions, EXIT)[0].payload["summary"])


def test_without_retry_nothing_changes() -> None:
    job = Job(strategies=frozenset({"dump"}))
    job.fault(1)
    job.report_all(1)
    assert "repair" not in notes(job.actions)
    assert "repaired" not in job.dumped().summary


# ------------------------------------------------------------------------------------------------ further faults

FURTHER: dict[str, Callable[[Job, list[Order]], list[Action]]] = {
    "an order fails": lambda job, found: job.answer(found[0], ok=False, message="no route"),
    "a memory fault": lambda job, found: job.fault(2),
    "the same memory fault": lambda job, found: job.fault(1),
    "a link fault": lambda job, found: job.fault(0, "link", "LINK ERROR"),
    "a notice": lambda job, found: job.fault(0, "peer", "reset", own=False),
    "a deadline": lambda job, found: job.wait(8),
    "an exception": lambda job, found: job.fault(2, "exception", "x"),
    "a loss": lambda job, found: job.feed(RankLost(0, 2, "killed")),
    "another process": lambda job, found: job.feed(Registered(0, job.info(2, pid=5))),
}


@pytest.mark.parametrize("kind", [FINISH, REGROUP, REPAIR, ROLLBACK, RESUME])
@pytest.mark.parametrize("name", FURTHER)
def test_a_further_fault_at_every_stage_stops_everybody_once_more(kind: OrderKind, name: str) -> None:
    job = Job()
    job.fault(1)
    job.report(0, commit=P, update=D)
    job.report(1, trusted=False)
    job.report(2, 3, commit=E)
    found = job.until(kind)
    actions = FURTHER[name](job, found)
    gone = name in ("a loss", "another process")
    stop = stops(actions)[0]
    assert (stop.epoch, stop.ranks) == (2, (0, 1, 3) if name == "a loss" else (0, 1, 2, 3))
    assert job.engine.state is State.STOPPING

    assert not orders(job.answer(*found))  # of an older epoch: says nothing
    job.report(0, 1, 2, 3, epoch=1)
    job.report(0, 1, 2, 3, epoch=0)
    assert job.engine.state is State.STOPPING
    memory = 2 if name == "a memory fault" else 1
    for rank in range(4):
        job.report(rank, commit=P, update=D, trusted=rank != memory or name == "a loss", epoch=2)
    if gone or name == "an exception":
        job.dumped()
        return
    assert said(job.open()) == to_all(REGROUP, step=7, epoch=2)
    assert job.until(REPAIR)[0].payload["transfers"] == [f"p0/{memory % 2}|{0 if memory == 2 else 3}|{memory}"]
    done = job.resume()
    assert (done.step, done.tries, done.epoch) == (7, 2, 2)


def test_a_rank_that_fails_to_finish_is_repaired_by_the_next_try() -> None:
    job = Job()
    job.fault(1, "link", "x")
    job.report(0, commit=P, update=D)
    job.report(1, 2, 3, commit=E)
    found = job.until(FINISH)
    job.answer(found[1], ok=False, message="NaN")
    job.report(0, 1, 3, commit=P, update=D)
    job.report(2, commit=P, update=X)
    assert job.until(REPAIR)[0].payload["transfers"] == ["p0/0|0|2"]
    assert job.resume().tries == 2


def test_a_source_that_failed_is_used_last() -> None:
    job = Job(world=6)
    job.fault(1)
    job.report_all(1)
    found = job.until(REPAIR)
    assert [order.rank for order in found] == [1, 3]
    job.answer(found[1], ok=False)
    job.report_all(1)
    assert job.until(REPAIR)[0].payload["transfers"] == ["p0/1|5|1"]


def test_losses_after_the_second_stop_are_waited_out() -> None:
    job = Job()
    job.fault(2, "link", "x")
    job.report_all()
    job.until(ROLLBACK)
    job.feed(RankLost(0, 3, "killed"), RankLost(0, 2, "killed"))
    assert len(stops(job.actions)) == 2
    job.report(0, step=6, commit=P, update=D)  # rolled back already
    job.report(1)
    closed = job.dumped()
    assert closed.step == 6


def test_ranks_that_resumed_before_the_further_fault_have_only_begun() -> None:
    job = Job()
    job.fault(1)
    job.report_all(1)
    found = job.until(RESUME)
    job.answer(found[0])
    job.fault(0, "link", "x")
    job.report(0)
    job.report(1, 2, 3, step=6, commit=P, update=D)
    assert not orders(job.actions[-20:], REPAIR)
    assert job.resume().step == 6


def test_a_rank_that_resumed_tells_of_a_broken_link_in_the_words_of_the_stop() -> None:
    """Those words are news: nobody else may tell that the new step is broken, and all others would wait for ever."""
    job = Job()
    job.fault(1, "link", "LINK ERROR")
    job.fault(0, "peer", "connection reset", own=False)
    job.report_all()
    found = job.until(RESUME)
    assert not stops(job.fault(0, "peer", "connection reset", own=False)), "it has not trained since"
    job.answer(found[0], found[2])
    (stop,) = stops(job.fault(0, "peer", "connection reset", own=False))
    assert stop.epoch == 2
    job.report_all()
    assert job.resume().tries == 2


def test_a_memory_fault_after_the_second_report() -> None:
    job = Job()
    job.fault(1)
    job.report_all(1)
    job.answer(job.until(ROLLBACK)[0], ok=False)
    job.report(0, 1, step=6, commit=P, update=D)
    job.fault(1)  # the very same words
    job.report(2, 3, step=6, commit=P, update=D)
    assert job.until(REPAIR)[0].payload["transfers"] == ["p0/1|3|1"]


def test_a_rank_that_reconnects_gets_its_open_order_again() -> None:
    job = Job()
    job.fault(1)
    job.report_all(1)
    for kind in (REGROUP, REPAIR, ROLLBACK, RESUME):
        found = job.until(kind)
        actions = job.feed(Registered(0, job.info(1)))
        assert orders(actions) == [order for order in found if order.rank == 1]
        assert stops(actions)[0].epoch == 1
    job.resume()
    actions = job.feed(Registered(0, job.info(1)))
    assert not orders(actions) and not stops(actions)


# ------------------------------------------------------------------------------------------------ giving up


def test_the_third_failure_of_the_same_try_ends_in_a_dump() -> None:
    job = Job()
    job.fault(1)
    for _ in range(3):
        job.report_all(1)
        job.answer(job.until(REPAIR)[0], ok=False, message="no route")
    assert job.epoch == 4
    job.report_all(1)
    summary = job.dumped().summary
    for words in ("3 repairs after step 6 did not help", "memory of rank 1", "no route"):
        assert words in summary


def again(job: Job, rank: int, kind: str = "memory", step: int = 7) -> bool:
    """One more incident at this step; whether it was repaired."""
    job.fault(rank, kind, "x")
    job.report_all(*([rank] if kind == "memory" else []), step=step)
    if job.engine.state is State.REGROUPING:
        job.resume()
        return True
    return False


def test_the_same_fault_after_each_resume_is_given_up_after_three_repairs() -> None:
    job = Job()
    assert [again(job, 1) for _ in range(4)] == [True, True, True, False]
    assert "each time the fault came again" in job.dumped().summary


def test_tries_are_forgotten_when_training_got_beyond_the_step() -> None:
    job = Job()
    for step in range(7, 30):
        assert again(job, 1, step=step)
        assert again(job, 1, step=step)
        job.feed(Heartbeat(0, 0, step + 1, "forward"))  # S is step - 1
    job.feed(Heartbeat(0, 0, 31, "forward"))
    assert not job.engine._repairs._count  # type: ignore[union-attr]


def test_a_step_that_breaks_in_ever_new_ways_is_given_up_too() -> None:
    job = Job(world=16)
    repaired = [again(job, number, kind) for number in range(8) for kind in ("memory", "link")]
    assert repaired.count(True) == MAX_TRIES_AT_STEP


def test_all_tries_together_end_at_the_deadline_of_a_dump() -> None:
    job = Job()
    job.fault(1)
    begun = job.now
    job.report_all(1)
    for rank in (0, 2, 3):  # a new signature each time
        job.wait(7.5)
        job.fault(rank, "link", "x")
        job.report_all(1)
        assert job.engine.state is State.REGROUPING
    job.wait(7.5)
    assert job.now == begun + 30
    assert job.engine.state is State.STOPPING
    job.report_all(1)
    assert "did not end within 30 s" in job.dumped().summary


# ------------------------------------------------------------------------------------------------ afterwards


def test_after_a_repair_the_next_incident_starts_from_nothing() -> None:
    job = Job()
    job.feed(*(Heartbeat(0, rank, 7, "forward") for rank in range(4)))
    job.now += 2
    job.fault(1)
    job.now += 1
    job.report_all(1)
    for kind in (REGROUP, REPAIR, ROLLBACK, RESUME):
        found = job.until(kind)
        job.now += 1
        job.answer(*found)
    first = job.engine.incident()
    json.dumps(first)
    assert (first["number"], first["outcome"], first["step"], first["epoch"]) == (1, "retried", 6, 1)
    assert [repair["transfers"] for repair in first["repairs"]] == [["p0/1|3|1"]]  # type: ignore[attr-defined]
    assert job.engine.timings == {
        "detect": 2, "stop": 1, "decide": 0, "finish": 0, "stage": 0, "write": 0, "publish": 0, "exit": 0,
        "regroup": 1, "repair": 1, "rollback": 1, "resume": 1,
    }  # fmt: skip

    job.report(2, epoch=1, fault="late")  # a late word about what is over
    assert job.engine.state is State.TRAINING
    job.now += 5
    job.feed(*(Heartbeat(0, rank, 9, "forward") for rank in range(4)))
    job.now += 0.5
    (stop,) = stops(job.feed(RankLost(0, 2, "killed")))
    assert (stop.epoch, stop.ranks) == (2, (0, 1, 3))
    assert job.engine.state is State.STOPPING
    assert job.engine.timings["detect"] == 0.5 and "regroup" not in job.engine.timings
    job.report(0, 1, 3, step=9, commit=P, update=D)
    closed = job.dumped()
    assert closed.step == 9 and ECC not in closed.summary
    assert job.engine.incident()["number"] == 2


def test_many_repairs_in_one_job_leave_nothing_behind() -> None:
    job = Job()
    for step in range(1, 300):
        assert again(job, step % 4, "memory" if step % 3 else "link", step)
    found = [action for action in job.actions if isinstance(action, Recovered)]
    assert [(done.step, done.epoch) for done in found] == [(step - 1, step) for step in range(1, 300)]
    assert job.engine.incident()["number"] == 299
    assert not job.engine._desk._orders and not job.engine._desk._answered
    assert len(job.engine._repairs._count) < 5  # type: ignore[union-attr]


def test_ranks_that_finish_before_the_last_word_of_a_resume() -> None:
    job = Job(world=2)
    job.fault(0, "link", "x")
    job.report_all()
    found = job.until(RESUME)
    job.answer(found[1])
    job.feed(RankFinished(0, 0), RankFinished(0, 1))  # the answer of rank 0 is late
    outcomes = [a.outcome for a in job.actions if isinstance(a, (Recovered, Closed))]
    assert outcomes == ["retried", "finished"]
    assert not job.answer(found[0])


# ------------------------------------------------------------------------------------------------ anything at any time

ranks = st.integers(-1, 4)
reports = st.builds(
    RankReport, rank=ranks, step=st.integers(0, 3), commit=st.sampled_from(Commit), update=st.sampled_from(Update),
    trusted=st.booleans(), epoch=st.integers(0, 3),
)  # fmt: skip
events = st.one_of(
    st.builds(Registered, at=st.just(0.0), info=st.builds(Job.info, st.none(), ranks, st.sampled_from([0, 7]))),
    st.builds(Heartbeat, at=st.just(0.0), rank=ranks, step=st.integers(0, 3), phase=st.just("x")),
    st.builds(FaultSeen, at=st.just(0.0), rank=ranks, kind=st.sampled_from(["peer", "memory", "link", "riddle"]),
              message=st.just("x"), own=st.booleans()),
    st.builds(RankLost, at=st.just(0.0), rank=ranks, message=st.just("x"), pid=st.sampled_from([0, 1001])),
    st.builds(RankFinished, at=st.just(0.0), rank=ranks),
    st.builds(Reported, at=st.just(0.0), report=reports),
    st.builds(OrderDone, at=st.just(0.0), rank=ranks, order=st.integers(0, 30), ok=st.booleans()),
    st.builds(Tick, at=st.just(0.0)),
    st.sampled_from(["report", "report", "answer", "answer", "answer"]),  # everybody does what it should
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(events, st.sampled_from([0.0, 0.1, 5.0])), max_size=40))
def test_any_events_in_any_order_end_within_the_deadlines(drawn: list[tuple[Event | str, float]]) -> None:
    job = Job()
    job.fault(1)
    for event, pause in drawn:
        job.now += pause
        if event == "report":
            job.report_all(1)
        elif event == "answer":
            job.answer(*job.open())
        elif not isinstance(event, str):
            job.feed(event)
    job.wait(2 * (DEADLINES.stop + DEADLINES.dump) + DEADLINES.exit + 4)
    assert job.engine.state in (State.CLOSED, State.TRAINING)
    closed = [action for action in job.actions if isinstance(action, Closed)]
    assert len(closed) == (job.engine.state is State.CLOSED)
    issued = [order.id for order in orders(job.actions)]
    assert set(issued) == set(range(1, len(set(issued)) + 1))
    epochs = [stop.epoch for stop in stops(job.actions)]
    assert epochs == sorted(epochs)
    json.dumps(job.engine.incident())


# ------------------------------------------------------------------------------------------------ rewinds

LOAD = OrderKind.LOAD


def test_without_a_holder_all_ranks_load_the_newest_checkpoint_that_all_have() -> None:
    job = Job()
    job.feed(*(Heartbeat(0, rank, 7, "forward") for rank in range(4)))
    job.fault(1, "memory", "a")
    job.fault(3, "memory", "b")
    job.report(1, 3, trusted=False, checkpoints=(2, 4, 6))
    job.report(0, checkpoints=(2, 4))
    found = orders(job.report(2, checkpoints=(2, 4, 6)))
    assert said(found) == to_all(REGROUP, step=4, epoch=1)
    found = orders(job.answer(*found))
    moved = ["p0/unowned|0|1", "p0/unowned|2|3"]
    assert said(found) == [(rank, REPAIR, {"step": 4, "epoch": 1, "transfers": moved}) for rank in range(4)]
    found = orders(job.answer(*found))
    assert said(found) == to_all(LOAD, step=4, epoch=1)
    assert (job.engine.state, job.engine.step) == (State.LOADING, 6)
    found = orders(job.answer(*found))
    assert said(found) == to_all(RESUME, step=4, epoch=1)
    (done,) = [action for action in job.answer(*found) if isinstance(action, Recovered)]
    assert (done.outcome, done.step, done.tries) == ("rewound", 4, 1)
    for words in ("checkpoint of step 4", "no healthy holder of shard p0/1", "2 completed steps lost"):
        assert words in done.summary
    incident = job.engine.incident()
    assert (incident["outcome"], incident["step"]) == ("rewound", 6)
    assert "load" in job.engine.timings and not orders(job.actions, ROLLBACK)

    job.fault(0, "link", "x")  # the steps that were lost are not lost again
    job.report_all(step=5)
    assert "0 completed steps lost" in job.resume().summary


def spoil(
    job: Job, rank: int = 1, kind: str = "precision", *, steps: tuple[int, ...] = (2, 4, 6), step: int = 7
) -> None:
    job.fault(rank, kind, "bad")
    job.report_all(*([rank] if kind == "corrupted" else []), step=step, checkpoints=steps)


@pytest.mark.parametrize("kind", ["corrupted", "precision"])
def test_after_wrong_numbers_the_checkpoint_of_s_is_not_believed(kind: str) -> None:
    job = Job()
    spoil(job, kind=kind)
    found = job.until(LOAD)
    assert said(found) == to_all(LOAD, step=4, epoch=1)
    moved = orders(job.actions, REPAIR)
    assert bool(moved) is (kind == "corrupted")
    assert all(order.payload["transfers"] == ["p0/unowned|0|1"] for order in moved)
    assert job.resume().outcome == "rewound"


def test_who_is_behind_may_have_spread_wrong_numbers_with_the_update_before() -> None:
    job = Job()
    job.fault(1, "precision", "bad")
    for rank in range(4):
        job.report(rank, commit=E if rank == 1 else P, update=U if rank == 1 else D, checkpoints=(5, 6))
    assert job.until(LOAD)[0].payload["step"] == 5  # S = 7, but rank 1 saw it after its update of 6


def test_the_same_wrong_numbers_again_lead_to_older_checkpoints_and_then_to_the_end() -> None:
    job = Job()
    found = []
    for _ in range(3):
        spoil(job)
        found.append(job.resume().step)
        job.feed(Heartbeat(0, 0, found[-1] + 1, "forward"))  # computed again: the tries still count
    assert found == [4, 2, 2]
    spoil(job)
    (order, *_) = orders(job.actions, EXIT)
    assert "3 repairs after step 6 did not help" in str(order.payload["summary"])
    assert not job.engine.incident()["attempts"]


def test_beyond_the_step_the_newest_checkpoint_is_good_again() -> None:
    job = Job()
    for step in (7, 9, 11):
        spoil(job, steps=(2, 4, 6, 8), step=step)
        assert job.resume().step == {7: 4, 9: 6, 11: 8}[step]
        job.feed(Heartbeat(0, 0, step + 1, "forward"))
    assert not job.engine._repairs._used  # type: ignore[union-attr]


@pytest.mark.parametrize("steps", [(), (6,), (6, 7)])
def test_without_a_good_checkpoint_nothing_is_saved_and_the_reason_is_told(steps: tuple[int, ...]) -> None:
    job = Job()
    spoil(job, steps=steps)
    summary = str(orders(job.actions, EXIT)[0].payload["summary"])
    assert "no checkpoint that could be loaded online is known good (of step 5 or before)" in summary
    assert not orders(job.actions, REGROUP)


def test_without_any_checkpoint_the_dump_says_what_is_missing() -> None:
    job = Job()
    job.fault(1)
    job.fault(3)
    job.report_all(1, 3)
    summary = str(orders(job.actions, EXIT)[0].payload["summary"])
    assert "and no checkpoint that could be loaded online" in summary and "no holder left of shard p0/1" in summary


def test_a_part_without_an_undamaged_rank_is_named() -> None:
    job = Job(world=2)
    job.fault(0, "corrupted", "a")
    job.fault(1, "memory", "b")
    job.report(0, 1, trusted=False, checkpoints=(1,))
    assert not orders(job.actions, LOAD)
    infos = {info.rank: info for info in holders_of("x", "y")}
    found = plan_unowned(infos, [0, 1], ())
    assert isinstance(found, NoPlan) and "no rank of part p is left" in found.reason


@pytest.mark.parametrize("kind", ["memory", "precision"])
def test_a_load_that_is_broken_off_can_only_be_followed_by_a_load(kind: str) -> None:
    """Nobody can tell S any more, and everybody distrusts itself: that says nothing of what no checkpoint holds."""
    job = Job()
    job.fault(1, kind, "a")
    job.fault(3, kind, "b")
    damaged = (1, 3) if kind == "memory" else ()
    job.report_all(*damaged, checkpoints=(2, 5))
    job.answer(job.until(LOAD)[2], ok=False, message="input/output error")
    assert job.epoch == 2
    job.report(0, step=5, commit=P, update=D, checkpoints=(2, 5))  # it came to the end
    job.report(1, 2, 3, trusted=False, checkpoints=(2, 5))
    found = job.until(LOAD)
    assert said(found) == to_all(LOAD, step=5, epoch=2)
    assert job.engine.step == 6
    targets = {str(move).split("|")[-1] for order in orders(job.actions, REPAIR) for move in order.payload["transfers"]}
    assert targets == {str(rank) for rank in damaged}
    job.answer(found[0], ok=False, message="input/output error")
    job.report_all(0, 1, 2, 3, checkpoints=(2, 5))  # no trusted rank is left
    done = job.resume()
    assert (done.outcome, done.step, done.tries) == ("rewound", 5, 3)
    assert "1 completed step lost" in done.summary


def test_wrong_numbers_while_the_checkpoint_of_s_is_loaded() -> None:
    job = Job()
    job.fault(1)
    job.fault(3)
    job.report_all(1, 3, checkpoints=(3, 6))
    assert job.until(LOAD)[0].payload["step"] == 6
    job.fault(0, "precision", "bad")
    job.report_all(0, 1, 2, 3, checkpoints=(3, 6))
    assert job.until(LOAD)[0].payload == {"step": 3, "epoch": 2, "newcomers": []}


def test_a_loss_in_a_rewind_ends_it() -> None:
    job = Job()
    spoil(job)
    job.until(LOAD)
    job.feed(RankLost(0, 2, "killed"))
    job.report(0, 1, 3, trusted=False)
    summary = str(orders(job.actions, EXIT)[0].payload["summary"])
    assert "rank 2 was lost" in summary and "may be wrong" in summary
    assert not orders(job.actions, OrderKind.WRITE_PART)


def test_steps_of_ranks_that_train_on_already_are_not_lost() -> None:
    job = Job()
    job.feed(Heartbeat(0, 0, 7, "forward"))
    job.fault(2, "link", "x")
    job.report_all()
    found = job.until(RESUME)
    job.answer(*found[1:])
    job.feed(Heartbeat(0, 1, 9, "forward"))  # the answer of rank 0 is late
    (done,) = [action for action in job.answer(found[0]) if isinstance(action, Recovered)]
    assert "0 completed steps lost" in done.summary
