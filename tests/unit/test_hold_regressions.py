"""Requests of operators where something comes in between: numbers that are none, stops, other leaders, other work."""

from __future__ import annotations

from typing import Any

import pytest
from engine_job import DEADLINES
from test_hold import Operated, Toy, successor

from mindspeed_tft.control import codec
from mindspeed_tft.engine.hold import Outcome
from mindspeed_tft.engine.machine import Engine, State
from mindspeed_tft.engine.types import (
    Asked,
    FaultSeen,
    Held,
    LinkState,
    Order,
    OrderKind,
    Registered,
    Released,
    SavedStep,
    Stop,
    Tell,
    Tick,
    Wish,
)


@pytest.mark.parametrize("number", ["99999999999999999999", "1e400", "nan", "inf", "-inf", "-5", str(2**53 + 2)])
@pytest.mark.parametrize(("name", "flag"), [("step", "--at-step"), ("limit", "--for")])
def test_a_number_that_no_wish_can_carry_is_refused(name: str, flag: str, number: str) -> None:
    job = Operated()
    assert flag in job.refused(job.ask("pause", **{name: number}))
    assert job.wish == Wish()


@pytest.mark.parametrize("name", ["step", "limit"])
def test_the_largest_number_that_is_taken_can_be_told(name: str) -> None:
    job = Operated()
    job.ask("pause", **{name: str(2**53)})
    assert codec.wish_from_wire(codec.wish_to_wire(job.wish)) == job.wish != Wish()


@pytest.mark.parametrize("error", [ValueError("cannot be"), OverflowError("too large")])
def test_no_request_ends_the_engine(error: Exception) -> None:
    job = Operated()

    def fail(_event: Asked) -> Toy:
        raise error

    job.engine._holds.offer("fly", fail, 5.0)
    assert str(error) in job.refused(job.ask("fly"))


# ------------------------------------------------------------------------------------------- a stop


def repairable() -> Operated:
    job = Operated()
    job.engine = Engine(DEADLINES, 4, strategies=frozenset({"retry", "dump"}))
    job.feed(*(Registered(0, job.info(rank)) for rank in range(4)))
    return job


@pytest.mark.parametrize("again", [False, True])
def test_who_was_held_just_before_a_stop_is_not_paused(again: bool) -> None:
    """Their words come after the stop, or once more with a registration; all that are alive are held, as it seems."""
    job = repairable()
    name = job.ask("pause")
    move = Toy(job.engine._desk)
    job.engine._holds._requests.clear()
    job.engine._holds.hold_for(Asked(0, "w", "switch"), move)
    job.lose(3)
    assert job.engine.state is State.STOPPING
    told = {"wish": job.wish, "held": job.wish.hold, "held_at": 8}
    for rank in (0, 1, 2):
        job.feed(Registered(0, job.info(rank), **told) if again else Held(0, rank, job.wish.hold, 8))
    assert move.begun is None and job.answer_to(name) is None
    assert not job.engine.status()["pause"]["paused"]  # type: ignore[index]


def test_who_trains_on_and_is_held_before_the_last_one_has_said_so_is_held() -> None:
    job = repairable()
    name = job.ask("pause")
    job.feed(*(Held(0, rank, job.wish.hold, 8) for rank in (0, 1)))
    job.feed(Tick(0))
    job.feed(FaultSeen(0, 2, "link", "LINK ERROR", own=True))
    job.report(0, 1, 2, 3, epoch=1)
    orders = job.until(OrderKind.RESUME)
    job.answer(*[order for order in orders if order.rank != 3])
    assert job.engine.state is State.RESUMING
    job.hold(0, 1, 2, step=9)
    job.answer(*[order for order in orders if order.rank == 3])
    job.hold(3, step=9)
    answer = job.answer_to(name)
    assert answer is not None and answer.ok and answer.data["step"] == 9


def test_a_move_that_nobody_knows_the_end_of_is_over_when_all_groups_were_built_anew() -> None:
    job = repairable()
    job.feed(Registered(0, job.info(1), link=LinkState(unsettled=7), epoch=7))
    stops = [action for action in job.actions if isinstance(action, Stop)]
    assert len(stops) == 1 and "moved to another link" in stops[0].reason
    job.feed(Registered(0, job.info(2), link=LinkState(unsettled=7), epoch=stops[0].epoch))
    job.report(0, 1, 2, 3, epoch=job.engine.status()["epoch"])
    job.answer(*job.until(OrderKind.RESUME))
    job.feed(Tick(0))
    assert job.engine.state is State.TRAINING


# ------------------------------------------------------------------------------------------- another leader


def test_a_dump_whose_controller_died_is_the_same_dump_when_it_is_asked_for_again() -> None:
    job = Operated()
    job.ask("dump")
    wish = job.wish
    successor(job, *[{"wish": wish, "began": True}] * 4)
    name = job.ask("dump", again="1")
    assert job.wish in (wish, Wish()), "nothing new is told"
    job.feed(*(SavedStep(0, rank, wish.save, 9, "/save/iter_9") for rank in range(4)))
    answer = job.answer_to(name)
    assert answer is not None and answer.ok and job.wish.save == 0
    job.ask("dump")
    assert job.wish.save > wish.save, "and another one can be asked for"


def test_who_saved_by_agreement_may_say_so_before_anybody_tells_of_the_wish() -> None:
    job = Operated()
    job.ask("dump")
    wish = job.wish
    successor(job, {"began": True})
    job.feed(SavedStep(0, 0, wish.save, 9, "/save/iter_9"))
    job.feed(*(Registered(0, job.info(rank), wish=wish, began=True) for rank in (1, 2, 3)))
    job.feed(*(SavedStep(0, rank, wish.save, 9, "/save/iter_9") for rank in (1, 2, 3)))
    assert job.wish.save == 0 and job.wish.id > wish.id
    name = job.ask("dump")
    assert job.answer_to(name) is None and job.wish.save, "it is taken"


def test_a_dump_that_nobody_serves_is_withdrawn_by_its_patience() -> None:
    job = Operated()
    job.ask("dump")
    wish = job.wish
    successor(job, *[{"wish": wish, "began": True}] * 4)
    job.ask("dump", patience=5.0, again="1")
    job.wait(6.0)
    assert job.wish.save == 0 and job.wish.id > wish.id


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_who_is_held_by_agreement_counts_whenever_the_wish_becomes_known(order: tuple[int, ...]) -> None:
    """Ranks 0 and 1 never heard of the wish."""
    job = Operated()
    hold = job.paused()
    wish = job.wish
    successor(job)
    for rank in order:
        told = {"wish": wish} if rank > 1 else {}
        job.feed(Registered(0, job.info(rank), held=hold, held_at=8, began=True, **told))
    status: Any = job.engine.status()["pause"]
    assert (status["paused"], status["step"], status["held"]) == (True, 8, 4)
    job.ask("resume")
    assert job.wish.hold == 0 and job.wish.id > wish.id


def test_a_pause_that_nobody_waits_for_any_more_is_withdrawn_by_the_next_leader() -> None:
    job = Operated()
    job.ask("pause", step="50")
    wish = job.wish
    assert wish.pending
    successor(job, *[{"wish": wish, "began": True}] * 4)
    job.wait(DEADLINES.stop - 1.0)
    assert job.engine.status()["pause"]["wished"]  # type: ignore[index]
    job.wait(2.0)
    assert not job.engine.status()["pause"]["wished"]  # type: ignore[index]
    assert job.wish.id > wish.id


def test_a_pause_that_is_asked_for_again_or_came_true_stays() -> None:
    job = Operated()
    job.ask("pause", step="50")
    wish = job.wish
    successor(job, *[{"wish": wish, "began": True}] * 4)
    name = job.ask("pause", step="50", again="1")
    job.wait(2 * DEADLINES.stop)
    assert job.engine.status()["pause"]["wished"] and job.answer_to(name) is None  # type: ignore[index]
    job.feed(*(Held(0, rank, wish.hold, 50) for rank in range(4)))
    told = {"wish": job.wish, "held": wish.hold, "held_at": 50, "began": True}
    assert not job.wish.pending
    successor(job, *[told] * 4)
    job.wait(2 * DEADLINES.stop)
    assert job.engine.status()["pause"]["paused"]  # type: ignore[index]


def test_a_pause_that_joins_another_one_has_its_own_words() -> None:
    job = Operated()
    job.ask("pause", step="50", limit="60")
    hold = job.wish.hold
    successor(job, *[{"wish": job.wish, "began": True}] * 4)
    job.ask("pause", step="70", limit="90")
    assert (job.wish.hold, job.wish.hold_from, job.wish.limit) == (hold, 70, 90.0)


def test_a_pause_that_joins_the_hold_of_a_work_is_one() -> None:
    job = Operated()
    job.engine._holds.hold_for(Asked(0, "w", "switch"), Toy(job.engine._desk))
    job.feed(Tick(0))
    wish = job.wish
    assert wish.working
    successor(job, *[{"wish": wish, "held": wish.hold, "held_at": 8, "began": True}] * 4)
    name = job.ask("pause", limit="500")
    answer = job.answer_to(name)
    assert answer is not None and answer.ok
    job.wait(2 * DEADLINES.stop)
    assert job.engine.status()["pause"]["paused"] and job.wish.limit == 500.0  # type: ignore[index]


def test_another_leader_counts_the_time_of_a_pause_on() -> None:
    job = Operated()
    hold = job.paused(limit="100")
    told = {"wish": job.wish, "held": hold, "held_at": 8, "began": True}
    kept = [{**told, "held_for": 0.0}] * 4  # as relays say again what they kept
    successor(job, *kept)
    job.feed(*(Registered(0, job.info(rank), **told, held_for=70.0 + rank) for rank in range(4)))
    status: Any = job.engine.status()["pause"]
    assert (status["seconds"], status["seconds_left"]) == (73.0, 27.0)
    job.wait(28.0)
    assert job.wish.hold == 0


# ------------------------------------------------------------------------------------------- works


def test_a_dump_that_was_asked_for_as_ranks_came_to_the_hold_is_saved_by_the_held_ranks() -> None:
    job = Operated()
    job.ask("pause")
    job.hold(0, 1)
    name = job.ask("dump")
    assert job.wish.save
    job.hold(2, 3)
    orders = [action for action in job.actions if isinstance(action, Order)]
    assert [(order.rank, order.kind) for order in orders] == [(rank, OrderKind.SAVE) for rank in range(4)]
    assert job.wish.save == 0 and job.wish.hold
    job.answer(*orders, path="/save/iter_8")
    answer = job.answer_to(name)
    assert answer is not None and answer.ok and answer.data["step"] == 8
    assert job.engine.status()["pause"]["paused"]  # type: ignore[index]


def working(job: Operated, limit: float = 300.0) -> Toy:
    work = Toy(job.engine._desk)
    job.engine._holds.hold_for(Asked(0, "w", "switch"), work, limit)
    job.feed(Tick(0))
    assert work.begun is not None
    return work


@pytest.mark.parametrize(("seconds", "stays"), [(20.0, True), (100.0, False)])
def test_a_pause_does_not_end_under_a_work(seconds: float, stays: bool) -> None:
    job = Operated()
    hold = job.paused(limit="30")
    work = working(job)
    assert (job.wish.hold, job.wish.limit) == (hold, 330.0), "nor do ranks leave it by themselves"
    assert job.engine.status()["pause"]["seconds_left"] == 30.0  # type: ignore[index]
    job.wait(seconds)
    work.outcome = Outcome(True, "moved")
    job.feed(Tick(0))
    assert (job.wish.hold, job.wish.limit) == ((hold, 30.0) if stays else (0, 0.0))


def test_the_time_of_a_pause_is_what_it_was_after_a_fault_in_a_work() -> None:
    job = Operated()
    hold = job.paused(limit="30")
    working(job)
    job.lose(1)
    assert (job.wish.hold, job.wish.limit) == (hold, 30.0)


def test_a_rank_that_goes_on_alone_ends_no_work_in_the_middle() -> None:
    job = Operated()
    hold = job.paused()
    work = working(job)
    told = len([action for action in job.actions if isinstance(action, Tell)])
    job.feed(Released(0, 2, hold))
    job.wait(1.0)
    assert len([action for action in job.actions if isinstance(action, Tell)]) == told, "it goes on"
    work.outcome = Outcome(False, "one is gone")
    job.feed(Tick(0))
    assert job.wish.hold == 0, "and then all follow"


# ------------------------------------------------------------------------------------------- words


def test_a_resume_of_a_pause_that_has_not_come_true_names_no_step() -> None:
    job = Operated()
    hold = job.paused()
    job.ask("resume")
    job.release(hold)
    job.ask("pause", step="50")
    answer = job.answer_to(job.ask("resume"))
    assert answer is not None and (answer.ok, answer.data) == (True, {})
    assert answer.text == "the pause is withdrawn, before any rank was held"


def test_a_dump_is_told_what_is_under_way() -> None:
    job = Operated()
    job.engine._holds.hold_for(Asked(0, "w", "switch-link"), Toy(job.engine._desk))
    assert job.refused(job.ask("dump")) == "a switch-link is under way; wait for it"
    assert job.wish.save == 0
