"""The engine by hand: every state, every kind of event in every state, and words that come late, twice or never."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from engine_job import DEADLINES, D, E, EngineJob, N, P, U, notes, orders, stops
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_tft.engine.machine import Engine, State
from mindspeed_tft.engine.types import (
    Action,
    Closed,
    Commit,
    Event,
    Examined,
    FaultSeen,
    Heartbeat,
    Note,
    Order,
    OrderDone,
    OrderKind,
    RankFinished,
    RankInfo,
    RankLost,
    RankQuiet,
    RankReport,
    Registered,
    Reported,
    Tick,
    Update,
)

FINISH, STAGE, WRITE = OrderKind.FINISH_UPDATE, OrderKind.STAGE_SHARDS, OrderKind.WRITE_PART
PUBLISH, DISCARD, EXIT = OrderKind.PUBLISH, OrderKind.DISCARD, OrderKind.EXIT


class Job(EngineJob):
    """An engine with a clock, four ranks by default: one part, two shards, rank r holds shard r % 2."""

    def __init__(self, world: int = 4, register: bool = True, hang: float = 0.0) -> None:
        super().__init__(Engine(replace(DEADLINES, hang=hang), world), world, register)
        if register:
            assert self.engine.state is State.TRAINING

    def idle(self, seconds: float) -> list[Action]:
        """Time passes, and nobody judges a deadline."""
        found: list[Action] = []
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            found += self.feed(Heartbeat(0, 0, 7, "forward"))
        return found

    def report(self, *ranks: int, step: int = 7, commit: Commit = P, update: Update = D, **more: Any) -> list[Action]:
        return self.feed(*(Reported(0, RankReport(rank, step, commit, update, **more)) for rank in ranks))

    def lose(self, *ranks: int) -> list[Action]:
        return self.feed(*(RankLost(0, rank, "killed by signal 9") for rank in ranks))

    def open(self) -> list[Order]:
        return [order for order in orders(self.actions) if order.id not in self.answered and order.kind is not EXIT]

    def stop(self) -> None:
        """Rank 3 is lost in step 7, whose update everybody else has done."""
        self.lose(3)
        self.report(0, 1, 2)

    def leave(self) -> Closed:
        self.answer(*orders(self.actions, EXIT))
        (closed,) = [action for action in self.actions if isinstance(action, Closed)]
        return closed


# ------------------------------------------------------------------------------------------------ a dump, undisturbed


def test_one_rank_lost_from_stop_to_close() -> None:
    job = Job()
    (stop,) = stops(job.lose(3))
    assert (stop.epoch, stop.ranks) == (1, (0, 1, 2))
    assert "rank 3 lost: killed by signal 9" in stop.reason
    assert job.engine.state is State.STOPPING
    assert not orders(job.report(0, 1))

    (stage,) = orders(job.report(2))
    assert job.engine.state is State.STAGING
    directory = stage.payload["directory"]
    assert stage == Order(1, 1, STAGE, {"step": 7, "directory": directory, "shards": ["p0/1"]})
    assert str(directory).startswith(".tft-dump-") and "/" not in str(directory)

    (write,) = orders(job.answer(stage))
    sources = {"p0/0": "self", "p0/1": "rank:1"}
    assert write == Order(2, 0, WRITE, {"step": 7, "directory": directory, "part": "p0", "sources": sources})
    (publish,) = orders(job.answer(write))
    assert publish == Order(3, 0, PUBLISH, {"step": 7, "directory": directory, "parts": ["p0"]})

    leave = orders(job.answer(publish, path="/c/iter_0000007", resume="torchrun --load /c"))
    assert [(order.rank, order.kind, order.payload["code"]) for order in leave] == [(r, EXIT, 75) for r in (0, 1, 2)]
    summary = str(leave[0].payload["summary"])
    for words in ("rank 3 lost: killed by signal 9", "Step 7", "/c/iter_0000007", "0 completed steps lost", "--load"):
        assert words in summary
    assert job.leave() == Closed("dumped", 7, summary)
    assert job.engine.state is State.CLOSED
    assert not orders(job.actions, DISCARD)


def test_a_checkpoint_that_exists_already_is_a_success() -> None:
    job = Job()
    job.stop()
    job.answer(*job.until(PUBLISH), exists="1", path="/c")
    closed = job.leave()
    assert (closed.outcome, closed.step) == ("exists", 7)
    assert "was on disk already" in closed.summary
    assert orders(job.actions, EXIT)[0].payload["code"] == 75


@pytest.mark.parametrize(
    "event",
    [
        RankLost(0, 2, "gone"),
        FaultSeen(0, 2, "exception", "ValueError", own=True),
        FaultSeen(0, 2, "peer", "connection reset", own=False),
        FaultSeen(0, 2, "terminated", "SIGTERM", own=True),
        Reported(0, RankReport(2, 7, N, U, fault="ValueError")),
    ],
)
def test_the_first_sign_of_a_fault_stops_everybody_at_once(event: Event) -> None:
    job = Job()
    (stop,) = stops(job.feed(event))
    assert set(stop.ranks) == ({0, 1, 3} if isinstance(event, RankLost) else {0, 1, 2, 3})
    assert "rank 2" in stop.reason


def test_epochs_count_on_from_where_the_caller_was() -> None:
    engine = Engine(DEADLINES, 1, epoch=4)
    engine.handle(Registered(0, RankInfo(0, "h", 1, "p", 0, ())))
    assert stops(engine.handle(FaultSeen(0, 0, "exception", "x", own=True)))[0].epoch == 5


def test_order_ids_count_on_from_where_the_caller_was() -> None:
    """A rank carries out an id once, whoever gave it."""
    job = Job()
    job.engine = Engine(DEADLINES, 4, issued=1 << 32)
    job.feed(*(Registered(0, job.info(rank)) for rank in range(4)))
    job.stop()
    assert {order.id for order in orders(job.actions)} == {(1 << 32) + 1}


def test_an_engine_that_takes_over_stops_under_an_epoch_that_all_obey() -> None:
    """Ranks tell with their registration which stop they heard last; reports of that time are the sign of a fault."""
    job = Job(register=False)
    job.feed(*(Registered(0, job.info(rank), epoch) for rank, epoch in enumerate((3, 7, 7, 0))))
    (stop,) = stops(job.report(1, epoch=7))
    assert stop.epoch == 8 and stop.ranks == (0, 1, 2, 3)
    # What was told under an epoch of the engine before this one is asked again: its orders may have changed the rank.
    assert not orders(job.report(0, 2, 3, epoch=7))
    job.lose(3)
    assert not orders(job.report(0, 2, epoch=8))
    assert {order.kind for order in orders(job.report(1, epoch=8))} == {STAGE}


def test_a_stop_that_one_rank_would_not_obey_is_given_again_to_all() -> None:
    job = Job()
    assert [stop.epoch for stop in stops(job.lose(3))] == [1]
    job.report(0, 1, epoch=1)
    found = job.feed(Registered(0, job.info(2), 5))
    (stop,) = [stop for stop in stops(found) if len(stop.ranks) > 1]
    assert (stop.epoch, stop.ranks) == (6, (0, 1, 2))
    assert job.engine.state is State.STOPPING
    assert orders(job.report(0, 1, 2, epoch=6))


def test_a_dump_goes_on_when_somebody_has_heard_of_a_later_epoch() -> None:
    job = Job()
    job.stop()
    assert job.engine.state is State.STAGING
    job.feed(Registered(0, job.info(2), 5))
    assert job.engine.state is State.STAGING
    job.answer(*orders(job.actions, STAGE))
    assert job.engine.state is State.WRITING


def test_names_of_dump_directories_differ_by_tag_step_and_attempt() -> None:
    job = Job()
    job.engine = Engine(DEADLINES, 4, tag="job1")
    job.feed(*(Registered(0, job.info(rank)) for rank in range(4)))
    job.stop()
    assert orders(job.actions)[0].payload["directory"] == ".tft-dump-job1-0000007-1"


# ------------------------------------------------------------------------------------------------ finishing the update


def test_updates_are_finished_by_those_who_are_used_before_anything_is_written() -> None:
    job = Job()
    job.lose(3)
    job.report(0)
    found = orders(job.report(1, 2, commit=E, update=U))
    assert [(order.rank, order.kind, order.payload) for order in found] == [(1, FINISH, {"step": 7})]
    assert job.engine.state is State.FINISHING
    assert [order.kind for order in orders(job.answer(*found))] == [STAGE]


def test_a_rank_that_fails_to_finish_is_no_source_any_more() -> None:
    job = Job()
    job.lose(2)
    job.report(0)
    found = orders(job.report(1, 3, commit=E, update=U))
    assert [order.rank for order in found] == [1]
    assert not orders(job.answer(*found, ok=False, message="out of memory"))
    assert job.engine.state is State.PLANNING
    again = orders(job.wait(0.5))
    assert [(order.rank, order.kind) for order in again] == [(3, FINISH)]
    assert not orders(job.answer(*again, ok=False, message="out of memory"), DISCARD)  # nothing was written
    job.wait(0.5)
    closed = job.leave()
    assert closed.outcome == "failed"
    assert "rank 1: its update of step 7 began and did not end" in closed.summary


def test_all_running_updates_are_waited_for_before_planning_again() -> None:
    job = Job()
    job.lose(3)
    job.report(2)
    first, second = orders(job.report(0, 1, commit=E, update=U))
    job.answer(first, ok=False)
    assert job.engine.state is State.FINISHING
    job.answer(second)
    assert job.engine.state is State.PLANNING
    (stage,) = orders(job.wait(0.5))  # both have the update now, nobody has to finish it
    assert (stage.rank, stage.kind, stage.payload["shards"]) == (2, STAGE, ["p0/0"])


def test_a_rank_that_does_not_say_whether_it_finished_is_used_only_after_it_said_so() -> None:
    job = Job()
    job.lose(3)
    job.report(0)
    job.report(1, 2, commit=E, update=U)
    job.wait(8.5)
    assert "no answer within 8 s to finish_update of rank 1" in notes(job.actions, warn=True)
    assert job.engine.state is State.EXITING  # its shard has no other holder
    assert "did not say whether its update was finished" in job.leave().summary

    job = Job()
    job.lose(3)
    job.report(2)
    first, second = orders(job.report(0, 1, commit=E, update=U))
    job.answer(second)
    job.wait(7.5)
    job.answer(first)  # in time after all
    assert job.engine.state is State.STAGING


def test_a_late_word_about_an_update_brings_the_rank_back() -> None:
    job = Job()
    job.lose(3)
    job.report(2)
    first, second = orders(job.report(0, 1, commit=E, update=U))
    assert (first.rank, second.rank) == (0, 1)
    job.answer(second)
    job.wait(8)  # rank 0 stays silent; attempt 2 goes without it
    job.wait(0.5)
    assert job.engine.state is State.STAGING
    assert {order.rank for order in orders(job.actions, STAGE)} <= {1, 2}
    job.answer(first)
    job.lose(2)  # now only rank 0 holds shard 0
    found = orders(job.wait(0.5))
    assert found and found[0].payload["directory"] == ".tft-dump-0000007-3"


def test_digests_are_compared_again_after_the_updates() -> None:
    job = Job()
    job.lose(0)
    job.report(3, rng_end="a")
    job.report(2, rng_end="a")
    job.report(1, commit=E, update=U)
    job.answer(*orders(job.actions, FINISH), rng_end="b")
    closed = job.leave()
    assert closed.outcome == "failed"
    assert "not provably one state" in closed.summary


@pytest.mark.parametrize("kind", ["corrupted", "precision"])
def test_a_state_that_may_be_wrong_everywhere_is_not_saved(kind: str) -> None:
    job = Job()
    job.feed(FaultSeen(0, 1, kind, "a bad number", True))
    job.report(0, 1, 2, 3)
    assert {order.kind for order in orders(job.actions)} == {EXIT}
    closed = job.leave()
    assert (closed.outcome, closed.step) == ("failed", -1)
    assert "may be wrong" in closed.summary


# ------------------------------------------------------------------------------------------------ nothing to save


@pytest.mark.parametrize("commit", [N, E])
def test_before_the_first_step_is_complete_nothing_is_saved(commit: Commit) -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1, 2, step=1, commit=commit, update=U)
    assert {order.kind for order in orders(job.actions)} == {EXIT}
    closed = job.leave()
    assert (closed.outcome, closed.step) == ("failed", -1)
    assert "no step was completed" in closed.summary
    assert orders(job.actions, EXIT)[0].payload["code"] == 76


def test_a_shard_without_a_holder_is_named() -> None:
    job = Job()
    job.lose(3)
    job.lose(1)
    job.report(0, 2)
    closed = job.leave()
    assert closed.outcome == "failed"
    for words in ("p0/1", "rank 1: lost (killed by signal 9)", "rank 3: lost (killed by signal 9)"):
        assert words in closed.summary


def test_impossible_reports_are_named_and_not_used() -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1)
    job.report(2, step=5, commit=P, update=D)
    assert "impossible reports, never a source: rank 2" in notes(job.actions, warn=True)
    assert job.engine.step == 7
    assert job.engine.incident()["impossible"] == {"2": job.engine._dump.agreement.offers[2].reason}  # type: ignore[union-attr]


def test_nobody_left() -> None:
    job = Job(world=2)
    job.lose(0)
    actions = job.lose(1)
    assert [a.outcome for a in actions if isinstance(a, Closed)] == ["failed"]
    assert "no rank with training state is left" in notes(actions)


# ------------------------------------------------------------------------------------------------ starting


def test_a_loss_in_the_start_sends_everybody_home() -> None:
    job = Job(register=False)
    job.feed(Registered(0, job.info(0)), Registered(0, job.info(1)))
    actions = job.lose(1)
    assert stops(actions)[0].ranks == (0,)
    (leave,) = orders(actions)
    assert (leave.rank, leave.kind, leave.payload["code"]) == (0, EXIT, 76)
    assert "not started training" in str(leave.payload["summary"])
    assert job.engine.state is State.EXITING

    late = job.feed(Registered(0, job.info(2)))
    assert stops(late)[0].ranks == (2,) and orders(late)[0].kind is EXIT
    job.answer(leave, *orders(late))
    assert job.engine.state is State.EXITING  # rank 3 may still come
    late = job.feed(Registered(0, job.info(3)))
    actions = job.answer(*orders(late))
    assert [a.outcome for a in actions if isinstance(a, Closed)] == ["failed"]


@pytest.mark.parametrize(
    "event",
    [
        RankLost(0, 3, "exit code 1"),  # never registered
        FaultSeen(0, 0, "exception", "ImportError", own=True),
        FaultSeen(0, 3, "exception", "ImportError", own=True),
        Reported(0, RankReport(0, 0, N, U, fault="ImportError")),
    ],
)
def test_any_fault_in_the_start(event: Event) -> None:
    job = Job(register=False)
    job.feed(Registered(0, job.info(0)))
    actions = job.feed(event)
    assert stops(actions)[0].ranks == (0,)
    assert [order.kind for order in orders(actions)] == [EXIT]
    job.wait(4.5)
    assert job.engine.state is State.CLOSED


def test_who_registers_after_the_end_is_stopped_and_sent_home() -> None:
    job = Job(register=False)
    job.lose(0)
    job.wait(4.5)
    assert job.engine.state is State.CLOSED
    late = job.feed(Registered(0, job.info(1)))
    assert stops(late)[0].ranks == (1,)
    assert [order.kind for order in orders(late)] == [EXIT]
    assert not [a for a in late if isinstance(a, Closed)]


def test_missing_registrations_are_warned_of_once() -> None:
    job = Job(register=False)
    job.feed(Registered(0, job.info(1)))
    warned = notes(job.wait(120), warn=True)
    assert warned.count("did not register") == 1
    assert "ranks 0, 2, 3" in warned
    assert job.engine.state is State.STARTING


def test_registration_is_noted_by_the_job_not_by_the_rank() -> None:
    assert len([a for a in Job(world=200).actions if isinstance(a, Note)]) == 2


# ------------------------------------------------------------------------------------------------ further faults


@pytest.mark.parametrize(("kind", "victim"), [(STAGE, 1), (WRITE, 0), (PUBLISH, 0)])
def test_a_loss_while_an_order_is_open_leads_to_another_attempt(kind: OrderKind, victim: int) -> None:
    job = Job()
    job.lose(3 - victim)  # rank 3 or 2: of the shard that is not the victim's
    job.report(*(rank for rank in range(4) if rank != 3 - victim))
    job.until(kind)
    actions = job.lose(victim)
    assert job.engine.state is State.PLANNING
    assert "attempt 1 failed" in notes(actions, warn=True)
    assert victim not in {order.rank for order in orders(actions)}
    actions = job.wait(0.5)
    assert all(order.payload["directory"] == ".tft-dump-0000007-2" for order in orders(actions))
    job.answer(*job.until(PUBLISH), path="/c")
    assert job.leave().outcome == "dumped"


@pytest.mark.parametrize("kind", [STAGE, WRITE, PUBLISH])
def test_three_failed_attempts_are_enough(kind: OrderKind) -> None:
    job = Job()
    job.stop()
    for attempt in (1, 2, 3):
        (failing,) = job.until(kind)
        assert failing.payload["directory"] == f".tft-dump-0000007-{attempt}"
        actions = job.answer(failing, ok=False, message="disk full")
        discards = orders(actions, DISCARD)
        assert {order.payload["directory"] for order in discards} == {f".tft-dump-0000007-{attempt}"}
        job.wait(0.5)
    closed = job.leave()
    assert closed.outcome == "failed"
    assert "3 attempts failed" in closed.summary and "disk full" in closed.summary


def test_losses_seen_together_cost_one_attempt() -> None:
    job = Job(world=8)
    job.lose(7)
    job.report(*range(7))
    job.until(WRITE)
    job.lose(0, 2, 1)
    job.wait(0.5)
    assert len(job.engine.incident()["attempts"]) == 2  # type: ignore[arg-type]
    assert job.engine.state is State.STAGING


def test_a_host_that_lost_a_rank_in_the_dump_is_used_last() -> None:
    job = Job(world=6, register=False)
    hosts = ["a", "a", "a", "a", "b", "b"]
    job.feed(*(Registered(0, replace(job.info(rank), host=hosts[rank])) for rank in range(6)))
    job.lose(3)
    job.report(0, 1, 2, 4, 5)
    job.lose(0)
    found = orders(job.wait(0.5))
    assert {order.rank for order in found} <= {4, 5}


def test_a_rank_whose_order_failed_is_used_last_but_still_used() -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1, 2)
    (write,) = job.until(WRITE)
    assert write.rank == 0
    job.answer(write, ok=False, message="quota")
    job.wait(0.5)
    (write,) = job.until(WRITE)
    assert (write.rank, write.payload["sources"]) == (1, {"p0/0": "rank:2", "p0/1": "self"})
    job.answer(write, ok=False, message="quota")
    job.lose(2)  # nobody but rank 0 holds shard 0 now
    job.wait(0.5)
    (write,) = job.until(WRITE)
    assert (write.rank, write.payload["sources"]) == (0, {"p0/0": "self", "p0/1": "rank:1"})


def test_losses_that_do_not_matter_any_more_change_nothing() -> None:
    job = Job()
    job.stop()
    (write,) = job.until(WRITE)
    job.lose(1)  # has staged its shard
    job.lose(2)  # was not needed
    assert job.engine.state is State.WRITING
    (publish,) = orders(job.answer(write))
    assert publish.kind is PUBLISH
    job.answer(publish)
    assert job.leave().outcome == "dumped"


def test_a_writer_lost_before_it_was_asked_ends_the_attempt() -> None:
    job = Job()
    job.stop()
    job.until(STAGE)
    job.lose(0)
    assert job.engine.state is State.PLANNING


def test_while_a_publication_may_run_only_the_publisher_discards() -> None:
    job = Job()
    job.stop()
    (publish,) = job.until(PUBLISH)
    actions = job.wait(8)
    assert [(order.rank, order.kind) for order in orders(actions)] == [(publish.rank, DISCARD)]

    job = Job()
    job.stop()
    (publish,) = job.until(PUBLISH)
    actions = job.answer(publish, ok=False, message="a part is missing")
    assert {order.rank for order in orders(actions, DISCARD)} == {0, 1}

    job = Job()
    job.stop()
    job.until(PUBLISH)
    assert not orders(job.lose(0), DISCARD)  # its process may still be running


def test_a_publication_that_ends_late_counts() -> None:
    job = Job()
    job.stop()
    (publish,) = job.until(PUBLISH)
    job.wait(8)
    job.wait(0.5)
    assert job.engine.state is not State.EXITING
    actions = job.answer(publish, path="/c/iter_0000007")
    assert job.engine.state is State.EXITING
    assert {order.payload["directory"] for order in orders(actions, DISCARD)} == {".tft-dump-0000007-2"}
    assert job.leave().outcome == "dumped"


def test_a_publication_that_ends_while_everybody_leaves_is_told_at_the_close() -> None:
    job = Job()
    job.stop()
    job.until(WRITE)
    job.idle(23)
    (publish,) = orders(job.answer(*orders(job.actions, WRITE)), PUBLISH)
    job.wait(7.5)
    assert job.engine.state is State.EXITING
    assert orders(job.actions, EXIT)[0].payload["code"] == 76
    job.answer(publish, path="/c")
    job.answer(publish, path="/c")
    closed = job.leave()
    assert (closed.outcome, closed.step) == ("dumped", 7)
    assert "Step 7 is saved in /c" in closed.summary


def test_a_memory_fault_after_the_report_ends_the_attempt_and_the_rank_as_a_source() -> None:
    job = Job()
    job.stop()
    job.until(WRITE)
    job.feed(FaultSeen(0, 0, "memory", "ECC", own=True))
    assert job.engine.state is State.PLANNING
    job.wait(0.5)
    assert 0 not in {order.rank for order in orders(job.actions, STAGE)}
    assert not orders(job.feed(FaultSeen(0, 0, "memory", "ECC", own=True)))


def test_a_memory_fault_does_not_call_back_a_publication() -> None:
    job = Job()
    job.stop()
    (publish,) = job.until(PUBLISH)
    job.feed(FaultSeen(0, publish.rank, "memory", "ECC", own=True))
    assert job.engine.state is State.PUBLISHING
    job.answer(publish)
    assert job.leave().outcome == "dumped"


# ------------------------------------------------------------------------------------------------ deadlines


def test_silent_ranks_are_excluded_at_the_stop_deadline_and_not_before() -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1)
    assert not orders(job.wait(9.5))
    actions = job.wait(0.5)
    assert "rank 2 did not report within 10 s of the stop: excluded" in notes(actions, warn=True)
    assert {order.rank for order in orders(actions)} == {1}


def test_deadlines_are_judged_on_ticks_only() -> None:
    job = Job()
    job.lose(3)
    job.idle(1000)
    job.report(0)
    assert job.engine.state is State.STOPPING
    job.feed(Tick(0))
    assert job.engine.state is State.EXITING


def test_a_late_report_can_be_used_by_the_next_attempt() -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1)
    job.wait(10)
    job.report(2)
    job.lose(0)
    found = orders(job.wait(0.5))
    assert {order.rank for order in found} <= {1, 2} and found


def test_the_dump_ends_at_its_deadline() -> None:
    job = Job()
    job.stop()
    job.until(WRITE)
    job.idle(25)
    job.until(PUBLISH)
    assert not orders(job.wait(4.5))
    actions = job.wait(0.5)
    assert job.engine.state is State.EXITING
    assert "did not end within 30 s in publish of rank 0" in notes(actions, warn=True)
    assert [order.rank for order in orders(actions, DISCARD)] == [0]


def test_the_job_closes_at_the_exit_deadline() -> None:
    job = Job()
    job.stop()
    job.answer(*job.until(PUBLISH))
    job.answer(*orders(job.actions, EXIT)[:2])
    assert not [a for a in job.wait(3.5) if isinstance(a, Closed)]
    actions = job.wait(0.5)
    assert [a.outcome for a in actions if isinstance(a, Closed)] == ["dumped"]
    assert "rank 2 did not leave within 4 s" in notes(actions, warn=True)


def test_ranks_that_vanish_after_they_were_told_to_leave_are_no_faults() -> None:
    job = Job()
    job.stop()
    job.answer(*job.until(PUBLISH))
    actions = job.lose(0, 1, 2)
    (closed,) = [a for a in actions if isinstance(a, Closed)]
    assert "rank 0" not in closed.summary


def test_quiet_ranks_are_warned_of_once_and_never_stopped() -> None:
    job = Job()
    job.now += 4
    job.feed(*(Heartbeat(0, rank, 7, "forward") for rank in (0, 1, 2)))
    actions = job.wait(3)
    assert notes(actions, warn=True) == "no heartbeat for 5 s from rank 3"
    assert not stops(actions)
    assert "rank 3 is heard again" in notes(job.feed(Heartbeat(0, 3, 7, "forward")))
    assert job.engine.state is State.TRAINING


# ------------------------------------------------------------------------------------------------ clocks that jump


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_jumps_kills_no_healthy_job(jump: float) -> None:
    job = Job(hang=5.0)
    for _ in range(20):
        job.feed(*(Heartbeat(0, rank, 7, "forward") for rank in range(4)))
        job.wait(1)
    job.now += jump
    actions = job.wait(1)
    for _ in range(20):
        actions += job.feed(*(Heartbeat(0, rank, 7, "forward") for rank in range(4)))
        actions += job.wait(1)
    told = "the clock went back by 3599.5 s" if jump < 0 else "that time counts against nobody"
    assert [a for a in actions if not isinstance(a, Note)] == []
    assert told in notes(actions, warn=True)
    assert len(notes(actions).splitlines()) == 1, "one line, and nobody is missed"
    assert job.engine.state is State.TRAINING


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
@pytest.mark.parametrize("first", ["tick", "report"])
def test_a_clock_that_jumps_while_reports_are_awaited_takes_no_rank_out(jump: float, first: str) -> None:
    job = Job()
    job.lose(3)
    job.report(0)
    job.now += jump
    if first == "tick":
        job.feed(Tick(0))
    job.report(1, 2)
    assert {order.kind for order in orders(job.wait(0.5))} <= {STAGE, WRITE}
    job.answer(*job.until(PUBLISH), path="/c")
    assert job.leave().outcome == "dumped"
    assert not job.engine.incident()["silent"]


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_after_a_jump_every_wait_still_ends(jump: float) -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1)
    job.now += jump
    job.wait(10.5)  # the first half second cannot be told from the jump
    assert job.engine.state is not State.STOPPING
    assert "rank 2 did not report within 10 s" in notes(job.actions, warn=True)


def test_what_is_told_bears_the_time_of_the_caller() -> None:
    job = Job()
    job.now += 3600
    job.lose(3)
    at, _, text = job.engine.timeline[-1]
    assert at == job.now and "stopping" in text
    assert job.engine._desk.incident.faults[0].at == job.now
    assert job.engine._desk.now < 10


def test_an_old_time_stamp_turns_no_time_back() -> None:
    job = Job()
    job.wait(2)
    before = job.engine._desk.now
    job.engine.handle(Heartbeat(job.now - 2, 1, 7, "forward"))
    job.feed(Tick(0))
    assert job.engine._desk.now == before


# ------------------------------------------------------------------------------------------------ late, twice, strange


def test_words_that_come_twice_or_for_nobody_change_nothing() -> None:
    job = Job()
    strange = [
        RankLost(0, 99, "x"),
        RankLost(0, -1, "x"),
        FaultSeen(0, 99, "exception", "x", own=True),
        RankFinished(0, 99),
        Heartbeat(0, 99, 1, "x"),
        Reported(0, RankReport(99, 7, P, D)),
        OrderDone(0, 0, 1, True),
        OrderDone(0, 0, 99, True),
        Registered(0, job.info(99)),
        Registered(0, job.info(2)),
        RankLost(0, 2, "an older process", pid=1),
    ]
    for event in strange:
        actions = job.feed(event)
        assert all(isinstance(action, Note) for action in actions), event
    assert job.engine.state is State.TRAINING

    job.stop()
    (stage,) = orders(job.actions)
    late: list[Event] = [
        *strange,
        RankLost(0, 3, "killed by signal 9"),
        RankLost(0, 3, "again"),
        FaultSeen(0, 0, "peer", "connection reset", own=False),
        FaultSeen(0, 3, "exception", "late", own=True),
        Reported(0, RankReport(0, 7, P, D)),
        Reported(0, RankReport(3, 7, P, D)),
        OrderDone(0, 0, stage.id, True),  # of another rank
    ]
    for event in late:
        if isinstance(event, Registered) and event.info.rank == 2:
            continue  # is answered with the stop
        actions = job.feed(event)
        assert all(isinstance(action, Note) for action in actions), event
    assert job.engine.state is State.STAGING

    (write,) = orders(job.answer(stage))
    assert not job.answer(stage)
    assert not job.answer(stage, ok=False)
    job.answer(*orders(job.answer(write)))
    job.leave()
    for event in (*late, Tick(0)):
        if not isinstance(event, Registered):
            assert not orders(job.feed(event)) and not stops(job.feed(event))


def test_a_rank_that_reconnects_is_told_the_stop_and_its_open_order_again() -> None:
    job = Job()
    job.lose(3)
    actions = job.feed(Registered(0, job.info(1)))
    assert [(stop.epoch, stop.ranks) for stop in stops(actions)] == [(1, (1,))]
    job.report(0, 1, 2)
    (stage,) = orders(job.actions)
    actions = job.feed(Registered(0, job.info(stage.rank)))
    assert orders(actions) == [stage]
    assert stops(actions)[0].epoch == 1
    assert not orders(job.feed(Registered(0, job.info(0))))
    job.answer(*job.until(PUBLISH))
    leave = next(order for order in orders(job.actions, EXIT) if order.rank == 2)
    assert orders(job.feed(Registered(0, job.info(2)))) == [leave]


def test_another_process_in_the_place_of_a_rank_means_that_the_rank_is_lost() -> None:
    job = Job()
    actions = job.feed(Registered(0, job.info(3, pid=5)))
    assert [stop.ranks for stop in stops(actions)] == [(0, 1, 2), (3,)]
    job.report(3)  # what the newcomer says is not the state of rank 3
    job.report(0, 1, 2)
    assert "lost (another process (pid 5 on h3) registered in its place)" in str(job.engine._dump._excluded())  # type: ignore[union-attr]
    job.answer(*job.until(PUBLISH))
    assert {order.rank for order in orders(job.actions, EXIT)} == {0, 1, 2, 3}
    job.answer(*(order for order in orders(job.actions, EXIT) if order.rank != 3))
    assert job.engine.state is State.EXITING
    assert [a.outcome for a in job.lose(3) if isinstance(a, Closed)] == ["dumped"]


def test_a_lost_rank_that_registers_again_is_a_newcomer_even_with_the_same_pid() -> None:
    job = Job()
    job.stop()
    actions = job.feed(Registered(0, job.info(3)))
    assert stops(actions)[0].ranks == (3,)
    assert not orders(actions)


def test_a_second_report_that_differs_costs_the_trust() -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1)
    job.report(0, step=6)
    job.report(2)
    assert "reported twice, and differently" in notes(job.actions, warn=True)
    assert all(order.rank != 0 for order in orders(job.actions))


def test_the_report_of_a_rank_that_died_after_it_spoke_is_evidence_but_no_source() -> None:
    job = Job()
    job.lose(3)
    job.report(0, commit=P, update=U)
    job.lose(0)
    found = orders(job.report(1, 2, commit=E, update=U))
    assert job.engine.step == 7
    assert {order.rank for order in found} == {1, 2}


# ------------------------------------------------------------------------------------------------ the ordinary end


def test_everybody_finishes() -> None:
    job = Job()
    actions = job.feed(*(RankFinished(0, rank) for rank in range(4)))
    assert [a for a in actions if isinstance(a, Closed)] == [Closed("finished", -1, "Training ended on 4 ranks.")]
    assert not stops(job.actions) and not orders(job.actions)
    assert not stops(job.lose(2))


def test_a_finished_rank_that_reconnects_is_left_alone() -> None:
    job = Job()
    job.feed(RankFinished(0, 1))
    assert job.feed(Registered(0, job.info(1))) == []
    job.lose(3)
    assert job.feed(Registered(0, job.info(1))) == []
    job = Job(world=1)
    job.feed(RankFinished(0, 0))
    assert job.feed(Registered(0, job.info(0))) == []
    assert not orders(job.feed(Registered(0, job.info(0, pid=5))))


def test_a_loss_after_some_finished_is_decided_with_those_who_are_left() -> None:
    job = Job()
    job.feed(RankFinished(0, 0))
    (stop,) = stops(job.lose(3))
    assert stop.ranks == (1, 2)
    job.report(1, 2)
    job.answer(*job.until(PUBLISH), exists="1")
    assert job.leave().outcome == "exists"


def test_what_finished_ranks_took_along_is_said() -> None:
    job = Job()
    job.feed(RankFinished(0, 0), RankFinished(0, 2), RankLost(0, 0, "exited"))
    job.lose(3)
    job.report(1)
    closed = job.leave()
    assert closed.outcome == "failed"
    assert "rank 0: finished training" in closed.summary


def test_finishing_after_the_stop() -> None:
    job = Job()
    job.lose(3)
    job.feed(RankFinished(0, 2))
    job.report(0)
    assert job.engine.state is State.STOPPING
    job.report(1)
    assert job.engine.state is State.STAGING
    job.feed(RankFinished(0, 1))
    assert job.engine.state is State.PLANNING


# ------------------------------------------------------------------------------------------------ the record


def test_steps_lost_are_counted_from_what_was_seen() -> None:
    job = Job()
    job.feed(Heartbeat(0, 3, 10, "forward"))  # so it had completed step 9
    job.stop()
    job.answer(*job.until(PUBLISH))
    assert "2 completed steps lost" in job.leave().summary


def test_the_first_fault_comes_first_and_peers_only_where_nobody_knows_more() -> None:
    job = Job()
    job.feed(FaultSeen(0, 0, "peer", "connection reset by rank 3", own=False))
    job.stop()
    summary = str(job.engine._desk.incident.what_happened())
    assert summary == "rank 3 lost: killed by signal 9"
    job = Job(world=2)
    job.feed(FaultSeen(0, 0, "peer", "timeout", own=False))
    assert job.engine._desk.incident.what_happened() == "rank 0 peer: timeout"


def test_a_fault_that_is_told_by_event_and_by_report_is_one_fault() -> None:
    job = Job()
    job.feed(FaultSeen(0, 1, "exception", "ValueError: x", own=True))
    job.report(1, fault="ValueError: x")
    assert job.engine._desk.incident.what_happened() == "rank 1 exception: ValueError: x"


def test_stages_are_timed_and_add_up() -> None:
    job = Job()
    job.now += 2
    job.lose(3)
    for seconds, act in (
        (3, lambda: job.report(0)),
        (1, lambda: job.report(1, 2, commit=E, update=U)),
        (4, lambda: job.answer(*orders(job.actions, FINISH))),
        (2, lambda: job.answer(*orders(job.actions, STAGE))),
        (6, lambda: job.answer(*orders(job.actions, WRITE))),
        (5, lambda: job.answer(*orders(job.actions, PUBLISH))),
        (1, lambda: job.answer(*orders(job.actions, EXIT))),
    ):
        job.now += seconds
        act()
    assert job.engine.state is State.CLOSED
    assert job.engine.timings == {
        "detect": 2, "stop": 4, "decide": 0, "finish": 4, "stage": 2, "write": 6, "publish": 5, "exit": 1,
    }  # fmt: skip
    times = [at for at, _, _ in job.engine.timeline]
    assert times == sorted(times)
    stages = [stage for _, stage, _ in job.engine.timeline]
    assert list(dict.fromkeys(stages)) == [
        "start", "train", "stop", "decide", "finish", "stage", "write", "publish", "exit", "closed",
    ]  # fmt: skip


def test_the_incident_is_plain_data() -> None:
    job = Job()
    json.dumps(job.engine.incident())
    job.stop()
    job.answer(*job.until(PUBLISH), path="/c")
    job.leave()
    incident = json.loads(json.dumps(job.engine.incident()))
    assert (incident["outcome"], incident["step"], incident["lost"]) == ("dumped", 7, {"3": "killed by signal 9"})
    assert incident["attempts"][0]["parts"] == [{"part": "p0", "writer": 0, "sources": {"p0/0": 0, "p0/1": 1}}]
    assert incident["faults"][0]["rank"] == 3


def test_the_same_events_lead_to_the_same_actions() -> None:
    def run() -> list[Action]:
        job = Job()
        job.stop()
        job.answer(*job.until(PUBLISH))
        job.leave()
        return job.actions

    assert run() == run()


def test_weeks_of_reconnects_do_not_fill_the_memory() -> None:
    job = Job(world=1)
    for _ in range(5000):
        job.feed(Registered(0, job.info(0)))
    assert len(job.engine.timeline) <= 1000


def test_a_heartbeat_costs_the_same_in_a_large_job() -> None:
    def seconds(world: int) -> float:
        job = Job(world=world)
        beats = [Heartbeat(job.now, rank % world, 7, "x") for rank in range(4096)]
        start = time.process_time()
        for beat in beats:
            job.engine.handle(beat)
        return time.process_time() - start

    gc.collect()  # what other tests have left is no cost of a heartbeat
    assert min(seconds(4096) for _ in range(3)) < 20 * min(seconds(16) for _ in range(3)) + 0.05


# ------------------------------------------------------------------------------------------------ anything at any time

ranks = st.integers(-1, 4)
reports = st.builds(
    RankReport,
    rank=ranks,
    step=st.integers(0, 3),
    commit=st.sampled_from(Commit),
    update=st.sampled_from(Update),
    trusted=st.booleans(),
    rng_end=st.sampled_from(["", "a", "b"]),
)
events = st.one_of(
    st.builds(Registered, at=st.just(0.0), info=st.builds(Job.info, st.none(), ranks, st.sampled_from([0, 7]))),
    st.builds(Heartbeat, at=st.just(0.0), rank=ranks, step=st.integers(0, 30), waiting=st.booleans(),
              phase=st.sampled_from(["x", "forward-backward"])),
    st.builds(RankQuiet, at=st.just(0.0), rank=ranks, seconds=st.sampled_from([5.0, 500.0]),
              state=st.sampled_from("TS")),
    st.builds(Examined, at=st.just(0.0), rank=ranks, pid=st.sampled_from([1001, 7]), spare=st.sampled_from(["", "x"])),
    st.builds(FaultSeen, at=st.just(0.0), rank=ranks, kind=st.sampled_from(["peer", "memory"]),
              message=st.just("x"), own=st.booleans()),
    st.builds(RankLost, at=st.just(0.0), rank=ranks, message=st.just("x"), pid=st.sampled_from([0, 1001])),
    st.builds(RankFinished, at=st.just(0.0), rank=ranks),
    st.builds(Reported, at=st.just(0.0), report=reports),
    st.builds(OrderDone, at=st.just(0.0), rank=ranks, order=st.integers(0, 12), ok=st.booleans()),
    st.builds(Tick, at=st.just(0.0)),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.booleans(), st.lists(st.tuples(events, st.sampled_from([0.0, 0.1, 5.0])), max_size=40))
def test_any_events_in_any_order_end_within_the_deadlines(
    register: bool, watched: bool, drawn: list[tuple[Event, float]]
) -> None:
    job = Job(register=register, hang=5.0 if watched else 0.0)
    for event, pause in drawn:
        job.now += pause
        job.feed(event)
    if stops(job.actions) or job.engine.state is State.EXITING:
        job.wait(DEADLINES.stop + DEADLINES.dump + DEADLINES.exit + 2)
        assert job.engine.state is State.CLOSED
    closed = [action for action in job.actions if isinstance(action, Closed)]
    assert len(closed) == (job.engine.state is State.CLOSED)
    issued = [order.id for order in orders(job.actions)]
    assert set(issued) == set(range(1, len(set(issued)) + 1))
    json.dumps(job.engine.incident())


# ------------------------------------------------------------------------------------------------ after all controllers


def test_a_controller_that_knows_nothing_waits_until_all_who_trained_are_known() -> None:
    """All controllers died together with a rank. Its relay tells of it, and so does another process in its place."""
    job = Job(register=False)
    job.feed(Registered(0, job.info(0), began=True), FaultSeen(0, 0, "peer", "closed", own=False))
    job.feed(Registered(0, job.info(3), began=True), RankLost(0, 3, "killed by signal 9"))
    assert job.engine.state is State.STARTING and not stops(job.actions)
    job.report(0, epoch=3)
    found = job.feed(*(Registered(0, job.info(rank), epoch=3, began=True) for rank in (1, 2)))
    assert stops(found)[0].epoch == 4
    job.report(1, 2, epoch=4)
    assert {order.kind for order in orders(job.report(0, epoch=4))} == {STAGE}


def test_a_controller_that_knows_nothing_of_a_rank_saves_nothing() -> None:
    job = Job(register=False)
    job.feed(*(Registered(0, job.info(rank), began=True) for rank in (0, 1, 2)))
    job.feed(FaultSeen(0, 0, "peer", "closed", own=False))
    job.wait(DEADLINES.stop - 0.5)
    assert job.engine.state is State.STARTING
    job.wait(1)
    assert job.engine.state is State.EXITING
    assert "rank 3 did not come to this controller" in notes(job.actions)
