"""Worker reboot by hand: who is waited for, and how long, who is sent to come back, what a newcomer gets, the end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from engine_job import D, E, N, P, U, notes, orders, stops
from test_repair import EXIT, FINISH, LOAD, REGROUP, REPAIR, RESUME, ROLLBACK, Job, said, to_all

from mindspeed_tft.engine.agreement import agree
from mindspeed_tft.engine.incident import EXIT_REBORN, EXIT_SAVED
from mindspeed_tft.engine.machine import State
from mindspeed_tft.engine.planning import NoPlan, RepairPlan, plan_repair
from mindspeed_tft.engine.repair import MAX_TRIES
from mindspeed_tft.engine.types import (
    Action,
    Closed,
    Heartbeat,
    Order,
    RankFinished,
    RankInfo,
    RankLost,
    RankReport,
    Recovered,
    Registered,
    Reported,
    Stop,
)

KILLED = "killed by signal 9"
WAIT = 60.0  # Deadlines.reboot


class Reborn(Job):
    """An engine that may wait for newcomers."""

    def __init__(self, *also: str) -> None:
        super().__init__(strategies=frozenset({"dump", "recover", *also}))

    def lose(self, rank: int, pid: int = 0) -> list[Action]:
        return self.feed(RankLost(0, rank, KILLED, pid or 1000 + rank))

    def comes(self, rank: int, pid: int = 0, **other: Any) -> list[Action]:
        return self.feed(Registered(0, replace(self.info(rank, pid or 5000 + rank), **other)))

    def ready(self, rank: int, **more: Any) -> list[Action]:
        more.setdefault("epoch", self.epoch)
        return self.feed(Reported(0, RankReport(rank, 0, N, U, trusted=False, **more)))

    def joins(self, rank: int, pid: int = 0) -> list[Action]:
        return [*self.comes(rank, pid), *self.ready(rank)]

    def report_without(self, *gone: int, **more: Any) -> None:
        for rank in range(self.world):
            if rank not in gone:
                self.report(rank, **more)

    def killed(self, rank: int = 1, **more: Any) -> None:
        """Up to the wait."""
        self.lose(rank)
        self.report_without(rank, **more)
        assert self.engine.state is State.WAITING


def closed(job: Job) -> Closed:
    (found,) = [action for action in job.actions if isinstance(action, Closed)]
    return found


# ------------------------------------------------------------------------------------------------ undisturbed


def test_a_killed_rank_from_stop_to_resume() -> None:
    job = Reborn()
    job.lose(1)
    job.report_without(1)
    assert job.engine.state is State.WAITING
    assert not orders(job.actions)
    assert "waiting for newcomers for rank 1, for 60.0 s" in notes(job.actions)
    job.wait(20)
    assert stops(job.comes(1)) == [Stop(1, (1,), f"rank 1 lost: {KILLED}")]
    job.wait(30)  # it starts up; its heartbeats change nothing
    job.feed(Heartbeat(0, 1, 0, "starting"))
    assert job.engine.state is State.WAITING
    found = job.ready(1)
    assert said(orders(found)) == to_all(REGROUP, step=6, epoch=1, newcomers=["1"])
    found = job.answer(*orders(found))
    transfers = ["p0/1|3|1", "p0/small|0|1"]
    assert said(orders(found)) == [(r, REPAIR, {"step": 6, "epoch": 1, "transfers": transfers}) for r in (0, 1, 3)]
    found = job.answer(*orders(found))
    assert said(orders(found)) == to_all(ROLLBACK, step=6, epoch=1, newcomers=["1"])
    assert job.engine.incident()["repairs"][0]["damaged"] == {"1": "its state is gone with its process"}  # type: ignore[index]
    done = job.resume()
    assert (done.outcome, done.step, done.tries) == ("rebooted", 6, 1)
    assert done.summary == (
        f"Repaired online: rank 1 lost: {KILLED}. Rank 1 (pid 1001 on host h1) was replaced by pid 5001. "
        "Training goes on after step 6; 0 completed steps lost."
    )
    incident = job.engine.incident()
    assert incident["replaced"] == {"1": {"old_pid": 1001, "new_pid": 5001, "host": "h1"}}
    assert incident["lost"] == {}
    assert incident["timings"]["reboot"] == 50.0  # type: ignore[index]
    assert json.loads(json.dumps(incident)) == incident


def test_the_next_incident_knows_nothing_of_it() -> None:
    job = Reborn()
    job.killed(1)
    job.joins(1)
    job.resume()
    job.feed(*(Heartbeat(0, rank, 9, "step") for rank in range(4)))
    job.lose(1, pid=5001)
    assert job.epoch == 2
    job.report_without(1, step=9)
    assert job.engine.state is State.WAITING
    job.joins(1, pid=6001)
    assert [order.payload["newcomers"] for order in job.until(ROLLBACK)] == [["1"]] * 4
    job.resume()
    assert job.engine.incident()["replaced"] == {"1": {"old_pid": 5001, "new_pid": 6001, "host": "h1"}}
    job.feed(*(Heartbeat(0, rank, 12, "step") for rank in range(4)))
    job.fault(2)
    job.report_all(2, step=12)
    assert [order.payload["newcomers"] for order in job.until(ROLLBACK)] == [[]] * 4
    assert job.resume().outcome == "retried"


def test_the_newcomer_may_be_faster_than_the_survivors() -> None:
    job = Reborn()
    job.lose(1)
    job.joins(1)
    assert job.engine.state is State.STOPPING
    job.report_without(1)
    assert job.engine.state is State.REGROUPING
    assert job.engine.incident()["timings"]["reboot"] == 0.0  # type: ignore[index]


def test_a_newcomer_may_be_the_first_sign_of_the_loss() -> None:
    job = Reborn()
    found = job.comes(1)
    assert stops(found)[-1].ranks == (1,)
    assert job.lose(1) == []  # of the process before it
    job.ready(1)
    job.report_without(1)
    assert job.resume().outcome == "rebooted"


def test_several_ranks_on_another_host() -> None:
    job = Reborn()
    job.lose(1)
    job.lose(2)
    job.report_without(1, 2)
    job.comes(1, host="spare")
    job.comes(2, host="spare")
    job.ready(2)
    assert "newcomer for rank 2 is ready, rank 1 still missing" in notes(job.actions)
    job.ready(1)
    transfers = ["p0/1|3|1", "p0/0|0|2", "p0/small|0|1", "p0/small|3|2"]
    assert job.until(REPAIR)[0].payload["transfers"] == transfers
    summary = job.resume().summary
    assert "Rank 1 (pid 1001 on host h1) was replaced by pid 5001 on host spare; rank 2 (pid 1002 " in summary


def test_what_the_dead_rank_had_said_still_proves_the_step() -> None:
    job = Reborn()
    job.fault(1, "peer", "reset", own=False)
    job.report(1, step=7, commit=P, update=D)
    job.lose(1)
    job.report_without(1, step=7, commit=E)
    job.joins(1)
    assert said(job.until(FINISH)) == [(rank, FINISH, {"step": 7, "epoch": 1}) for rank in (0, 2, 3)]
    assert job.resume().step == 7


def test_a_damaged_survivor_is_repaired_in_the_same_go() -> None:
    job = Reborn()
    job.killed(1)
    job.fault(2)
    job.wait(1)
    assert job.engine.state is State.WAITING
    job.joins(1)
    assert job.until(REPAIR)[0].payload["transfers"] == ["p0/1|3|1", "p0/0|0|2", "p0/small|0|1"]
    assert job.resume().outcome == "rebooted"


@pytest.mark.parametrize("strategies", [(), ("retry",)])
def test_faults_that_need_no_newcomer_are_repaired_as_ever(strategies: tuple[str, ...]) -> None:
    job = Reborn(*strategies)
    job.fault(1)
    job.report_all(1)
    assert job.engine.state is State.REGROUPING
    assert job.resume().outcome == "retried"


def test_without_the_strategy_a_loss_is_a_dump_and_a_newcomer_is_told_to_leave() -> None:
    job = Job()
    job.feed(RankLost(0, 1, KILLED))
    for rank in (0, 2, 3):
        job.report(rank)
    job.feed(Registered(0, job.info(1, 5001)))
    assert "rank 1 was lost" in job.dumped().summary
    assert orders(job.actions, EXIT)[-1].payload["code"] == EXIT_SAVED
    assert {order.rank for order in orders(job.actions, EXIT)} == {0, 1, 2, 3}


# ------------------------------------------------------------------------------------------------ sent away


@pytest.mark.parametrize("kind", ["exception", "device", "handler"])
def test_a_process_that_cannot_go_on_is_sent_to_come_back(kind: str) -> None:
    job = Reborn()
    job.fault(1, kind, "broken")
    job.report(1, fault="broken")
    job.report_without(1)
    (order,) = orders(job.actions)
    assert (order.rank, order.kind, order.payload["code"]) == (1, EXIT, EXIT_REBORN)
    assert f"rank 1 {kind}: broken" in str(order.payload["summary"])
    job.answer(order)
    assert job.lose(1) == []
    assert job.engine.state is State.WAITING
    job.joins(1)
    assert job.resume().outcome == "rebooted"
    assert [fault["kind"] for fault in job.engine.incident()["faults"]] == [kind]  # type: ignore[index,attr-defined]


def test_a_rank_that_stopped_by_itself_is_sent_to_come_back() -> None:
    job = Reborn()
    job.report(1, fault="ValueError: bad", epoch=0)
    job.report_without(1)
    assert [(order.rank, order.kind) for order in orders(job.actions)] == [(1, EXIT)]


def test_who_was_sent_away_gets_the_order_again_and_is_no_newcomer() -> None:
    job = Reborn()
    job.fault(1, "exception", "broken")
    job.report_all()
    (order,) = orders(job.actions)
    assert job.feed(Registered(0, job.info(1))) == [order]
    job.report(1)
    assert job.engine.state is State.WAITING
    job.joins(1)
    assert job.engine.state is State.REGROUPING


def test_a_newcomer_with_the_number_of_its_predecessor_is_a_newcomer() -> None:
    """In a pod that was made anew host and process have the same names: the end that was heard in between counts."""
    job = Reborn()
    job.fault(1, "exception", "broken")
    job.report_all()
    assert len(orders(job.actions)) == 1
    job.feed(RankLost(0, 1, "process ended", job.info(1).pid))
    assert not orders(job.feed(Registered(0, job.info(1), bare=True)))
    assert 1 in job.engine._roster.newcomers


def test_nobody_is_sent_away_who_holds_what_no_other_has() -> None:
    job = Reborn()
    job.fault(1, "exception", "broken")
    job.fault(3, "exception", "broken")
    job.report_all(checkpoints=(4,))
    assert not orders(job.actions, EXIT)
    assert "with ranks 1, 3 completed steps would be lost, of which a dump loses none" in job.dumped().summary


def test_a_signal_that_asks_to_end_is_a_dump() -> None:
    job = Reborn()
    job.fault(1, "terminated", "received SIGTERM")
    job.report_all()
    assert "a rank was asked to end (rank 1 terminated: received SIGTERM)" in job.dumped().summary


def test_a_newcomer_that_cannot_start_is_sent_back_once_more() -> None:
    job = Reborn()
    job.killed(1)
    job.comes(1)
    job.fault(1, "exception", "no device")
    (order,) = orders(job.wait(1))
    assert (order.rank, order.payload["code"]) == (1, EXIT_REBORN)
    job.lose(1, pid=5001)
    job.joins(1, pid=6001)
    job.resume()
    assert job.engine.incident()["replaced"] == {"1": {"old_pid": 1001, "new_pid": 6001, "host": "h1"}}


# ------------------------------------------------------------------------------------------------ not worth waiting


def test_nobody_is_waited_for_beside_a_silent_rank() -> None:
    job = Reborn()
    job.lose(1)
    job.report_without(1, 2)
    job.wait(11)
    assert "no newcomer is waited for: rank 2 did not report" in job.dumped().summary


def test_nobody_is_waited_for_when_some_have_finished() -> None:
    job = Reborn()
    job.feed(RankFinished(0, 2))
    job.lose(1)
    job.report_without(1, 2)
    assert "no newcomer is waited for: rank 2 finished training" in job.dumped().summary


def test_nobody_is_waited_for_without_a_holder_or_a_checkpoint() -> None:
    job = Reborn()
    job.lose(1)
    job.lose(3)
    job.report_without(1, 3)
    job.answer(*orders(job.actions, EXIT))
    assert "no newcomer is waited for: no healthy holder of shard p0/1" in closed(job).summary


def test_a_newcomer_with_other_settings_is_none() -> None:
    job = Reborn()
    job.killed(1)
    job.comes(1, holds=("p0/7",))
    job.wait(1)
    assert "the newcomer for rank 1 is of part p0 with shards p0/7, which differs" in job.dumped().summary


# ------------------------------------------------------------------------------------------------ rewind


def test_without_a_holder_newcomers_load_the_checkpoint_with_all() -> None:
    job = Reborn()
    job.lose(1)
    job.lose(3)
    job.report_without(1, 3, checkpoints=(2, 4))
    assert job.engine.state is State.WAITING
    job.joins(1)
    job.joins(3)
    assert job.until(REPAIR)[0].payload["transfers"] == ["p0/unowned|0|1", "p0/unowned|2|3"]
    assert said(job.until(LOAD)) == to_all(LOAD, step=4, epoch=1, newcomers=["1", "3"])
    done = job.resume()
    assert (done.outcome, done.step) == ("rebooted", 4)
    assert "Rewound online to the checkpoint of step 4" in done.summary and "2 completed steps lost" in done.summary


def test_wrong_numbers_beside_a_loss() -> None:
    job = Reborn()
    job.fault(2, "precision", "bad")
    job.lose(1)
    job.report_without(1, checkpoints=(3, 4, 5, 6))
    job.joins(1)
    # S is 6. Nobody knows whether the lost rank had begun its update, so a fault may be one step older
    assert job.until(LOAD)[0].payload["step"] == 4
    job.resume()


def test_a_rank_that_is_lost_while_it_loads_makes_all_load_again() -> None:
    job = Reborn()
    job.lose(1)
    job.lose(3)
    job.report_without(1, 3, checkpoints=(4,))
    job.joins(1)
    job.joins(3)
    job.until(LOAD)
    job.lose(2)
    job.report(0, 1, 3, trusted=False, checkpoints=(4,))
    job.joins(2)
    assert job.until(REPAIR)[0].payload["transfers"] == [f"p0/unowned|0|{rank}" for rank in (1, 2, 3)]
    assert job.until(LOAD)[0].payload == {"step": 4, "epoch": 2, "newcomers": ["1", "2", "3"]}
    job.resume()


# ------------------------------------------------------------------------------------------------ time


def test_nobody_comes() -> None:
    job = Reborn()
    job.killed(1)
    found = job.wait(WAIT - 0.5)
    assert not orders(found)
    found = job.wait(1)
    assert "It was not repaired online: no newcomer for rank 1 within 60 s (--tft-reboot-wait)." in job.dumped().summary
    assert notes(found, warn=True).startswith("no repair, a dump instead")


def test_who_comes_but_is_not_ready_is_told_to_leave() -> None:
    job = Reborn()
    job.killed(1)
    job.wait(50)
    job.comes(1)
    job.wait(10.5)
    job.ready(1)
    assert "no newcomer for rank 1" in job.dumped().summary
    assert 1 in {order.rank for order in orders(job.actions, EXIT)}
    assert closed(job).step == 6


def test_the_wait_takes_nothing_of_the_time_to_repair() -> None:
    job = Reborn()
    job.killed(1)
    job.wait(55)
    job.joins(1)
    job.wait(7.5)
    assert job.engine.state is State.REGROUPING
    assert job.resume().tries == 1


def test_a_newcomer_that_dies_is_missing_again_and_the_time_begins_anew() -> None:
    job = Reborn()
    job.killed(1)
    for life in range(MAX_TRIES + 1):
        job.wait(50)
        job.comes(1, pid=5000 + life)
        job.lose(1, pid=5000 + life)
        assert job.engine.state is State.WAITING
    job.wait(10.5)  # the last time nothing was renewed
    assert job.engine.state is not State.WAITING
    assert "no newcomer for rank 1" in job.dumped().summary


def test_a_newcomer_that_dies_after_it_was_ready_is_missing_again() -> None:
    job = Reborn()
    job.lose(1)
    job.lose(2)
    job.report_without(1, 2)
    job.joins(1)
    job.lose(1, pid=5001)
    job.joins(2)
    job.wait(1)
    assert job.engine.state is State.WAITING
    job.joins(1, pid=6001)
    job.resume()


def test_another_newcomer_in_the_place_of_one() -> None:
    job = Reborn()
    job.killed(1)
    job.comes(1)
    job.comes(1, pid=6001)
    assert job.lose(1, pid=5001) == []  # late
    job.wait(1)
    job.ready(1)
    job.resume()
    assert job.engine.incident()["replaced"]["1"]["new_pid"] == 6001  # type: ignore[index]


def test_another_loss_while_waiting_is_waited_for_as_well() -> None:
    job = Reborn()
    job.killed(1)
    job.wait(50)
    job.lose(2)
    job.wait(50)
    assert job.engine.state is State.WAITING
    job.joins(1)
    job.joins(2)
    assert job.until(ROLLBACK)[0].payload["newcomers"] == ["1", "2"]
    job.resume()


def test_the_last_holder_is_lost_while_waiting() -> None:
    job = Reborn()
    job.killed(1)
    job.lose(3)
    job.wait(1)
    job.answer(*orders(job.actions, EXIT))
    assert "no healthy holder of shard p0/1" in closed(job).summary


def test_a_signal_while_waiting_is_a_dump() -> None:
    job = Reborn()
    job.killed(1)
    job.fault(2, "terminated", "received SIGTERM")
    job.wait(1)
    assert "asked to end" in job.dumped().summary


# ------------------------------------------------------------------------------------------------ later tries


@pytest.mark.parametrize("kind", [REGROUP, REPAIR, ROLLBACK, RESUME])
def test_a_newcomer_is_lost_in_the_repair(kind: Any) -> None:
    job = Reborn()
    job.killed(1)
    job.joins(1)
    job.until(kind)
    job.lose(1, pid=5001)
    assert job.epoch == 2
    after = {"step": 6, "commit": P, "update": D} if kind is RESUME else {}
    job.report_without(1, **after)
    assert job.engine.state is State.WAITING
    job.joins(1, pid=6001)
    assert job.until(REPAIR)[0].payload["transfers"] == ["p0/1|3|1", "p0/small|0|1"]
    done = job.resume()
    assert (done.outcome, done.tries, done.step) == ("rebooted", 2, 6)
    assert job.engine.incident()["replaced"] == {"1": {"old_pid": 1001, "new_pid": 6001, "host": "h1"}}


def test_a_newcomer_that_has_its_state_keeps_it_and_is_still_named() -> None:
    job = Reborn()
    job.killed(1)
    job.joins(1)
    job.until(ROLLBACK)
    job.fault(0, "link", "reset")
    job.report_all(step=6, commit=P, update=D)
    found = job.until(ROLLBACK)
    assert not [order for order in orders(job.actions, REPAIR) if order.payload["epoch"] == 2]
    assert found[0].payload["newcomers"] == ["1"]
    assert job.resume().outcome == "rebooted"


def test_the_same_loss_again_and_again_is_given_up_before_anybody_is_waited_for() -> None:
    job = Reborn()
    job.killed(1)
    for life in range(MAX_TRIES):
        assert job.engine.state is State.WAITING
        job.joins(1, pid=5000 + life)
        job.until(REGROUP)
        job.lose(1, pid=5000 + life)
        job.report_without(1)
    assert f"{MAX_TRIES} repairs after step 6 did not help (lost of rank 1)" in job.dumped().summary


def test_a_late_report_of_an_older_stop_makes_no_newcomer_ready() -> None:
    job = Reborn()
    job.killed(1)
    job.joins(1)
    job.until(REGROUP)
    job.lose(1, pid=5001)
    job.report_without(1)
    job.comes(1, pid=6001)
    job.ready(1, epoch=1)
    assert job.engine.state is State.WAITING
    job.ready(1)
    assert job.engine.state is State.REGROUPING


def test_a_newcomer_that_calls_itself_healthy_is_not_believed() -> None:
    job = Reborn()
    job.killed(1)
    job.comes(1)
    job.report(1, step=9, commit=P, update=D)
    assert job.engine.step == 6
    assert job.until(REPAIR)[0].payload["transfers"] == ["p0/1|3|1", "p0/small|0|1"]


# ------------------------------------------------------------------------------------------------ planning


def infos(world: int = 4, parts: int = 1) -> dict[int, RankInfo]:
    return {
        rank: RankInfo(rank, f"h{rank}", 1000 + rank, f"p{rank % parts}", rank // parts, (f"p{rank % parts}/0",))
        for rank in range(world)
    }


def bare(rank: int) -> RankReport:
    return RankReport(rank, 0, N, U, trusted=False)


def test_the_small_state_comes_from_a_healthy_rank_of_the_part() -> None:
    members = infos(6, parts=2)
    reports = {rank: RankReport(rank, 7, N, U) for rank in members}
    reports |= {0: bare(0), 2: bare(2), 3: replace(reports[3], trusted=False)}
    plan = plan_repair(members, agree(reports, members), set(), newcomers={0, 2})
    assert isinstance(plan, RepairPlan)
    small = [str(transfer) for transfer in plan.transfers if transfer.shard.endswith("/small")]
    assert small == ["p0/small|4|0", "p0/small|4|2"]  # and none to rank 3, which has its own
    assert "3 shards to move" in plan.describe()


def test_a_part_without_a_small_state_has_no_repair() -> None:
    members = infos(4, parts=2)
    members = {rank: replace(info, holds=() if info.part == "p1" else info.holds) for rank, info in members.items()}
    reports = {0: RankReport(0, 7, N, U), 1: bare(1), 2: RankReport(2, 7, N, U), 3: bare(3)}
    plan = plan_repair(members, agree(reports, members), set(), newcomers={1, 3})
    assert isinstance(plan, NoPlan) and "part p1" in plan.reason


def test_departed_ranks_are_evidence_and_offer_nothing() -> None:
    reports = {0: RankReport(0, 7, E, U), 1: bare(1)}
    found = agree(reports, reports, departed=[RankReport(1, 7, P, D)])
    assert found.step == 7 and "rank 1 passed the commit" in found.reason
    assert found.offers[0] and not found.offers[1]
    assert agree(reports, reports, departed=[RankReport(1, 7, P, D, trusted=False)]).step == 6


def test_orders_name_newcomers_as_text() -> None:
    """The wire carries lists of text."""
    job = Reborn()
    job.killed(1)
    job.joins(1)
    found: list[Order] = job.until(ROLLBACK)
    assert all(isinstance(rank, str) for order in found for rank in list(order.payload["newcomers"]))  # type: ignore[arg-type]
    assert not [action for action in job.actions if isinstance(action, Recovered)]
