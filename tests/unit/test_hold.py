"""Requests of operators, by hand: each of them has one clear answer in every situation, and no hold is for ever."""

from __future__ import annotations

from typing import Any

import pytest
from engine_job import DEADLINES
from test_machine import Job

from mindspeed_tft.engine.desk import Desk
from mindspeed_tft.engine.hold import LIMIT, Outcome
from mindspeed_tft.engine.machine import Engine, State
from mindspeed_tft.engine.types import (
    Action,
    Answer,
    Asked,
    FaultSeen,
    Heartbeat,
    Held,
    Kill,
    Order,
    OrderDone,
    OrderKind,
    Progress,
    RankFinished,
    RankLost,
    Registered,
    Released,
    SavedStep,
    Stop,
    Tell,
    Tick,
    Wish,
    Withdrawn,
)


class Operated(Job):
    """A job with an operator, whose ranks compute step 7."""

    def __init__(self, world: int = 4, **more: Any) -> None:
        super().__init__(world, **more)
        self.asked = 0
        self.feed(*(Heartbeat(0, rank, 7, "forward-backward") for rank in range(world) if more.get("register", True)))

    def ask(self, kind: str, patience: float = 600.0, **args: str) -> str:
        self.asked += 1
        self.feed(Asked(0, f"q{self.asked}", kind, args, patience, "me"))
        return f"q{self.asked}"

    @property
    def wish(self) -> Wish:
        told = [action.wish for action in self.actions if isinstance(action, Tell)]
        return told[-1] if told else Wish()

    def answer_to(self, name: str) -> Answer | None:
        found = [action for action in self.actions if isinstance(action, Answer) and action.id == name]
        assert len(found) <= 1, "answered twice"
        return found[0] if found else None

    def hold(self, *ranks: int, step: int = 8) -> list[Action]:
        return self.feed(*(Held(0, rank, self.wish.hold, step) for rank in ranks or range(self.world)))

    def release(self, hold: int, *ranks: int) -> list[Action]:
        return self.feed(*(Released(0, rank, hold) for rank in ranks or range(self.world)))

    def paused(self, **args: str) -> int:
        """Paused after step 8; the id of the hold."""
        self.ask("pause", **args)
        self.hold()
        assert self.engine.status()["pause"]["paused"]  # type: ignore[index]
        return self.wish.hold

    def refused(self, name: str) -> str:
        answer = self.answer_to(name)
        assert answer is not None and not answer.ok, answer
        return answer.text


def test_a_pause_is_answered_when_the_last_rank_is_held() -> None:
    job = Operated()
    name = job.ask("pause", step="9", limit="120")
    (told,) = [action for action in job.actions if isinstance(action, Tell)]
    assert told.ranks == (0, 1, 2, 3)
    assert (told.wish.hold > 0, told.wish.hold_from, told.wish.limit, told.wish.save) == (True, 9, 120.0, 0)
    assert told.wish.id > told.wish.hold
    job.hold(0, 1, 2, step=9)
    job.wait(0.5)
    assert job.answer_to(name) is None
    (progress,) = [action for action in job.actions if isinstance(action, Progress)]
    assert (progress.done, progress.of, progress.text) == (3, 4, "3 of 4 ranks held, rank 3 not yet")
    job.hold(3, step=9)
    answer = job.answer_to(name)
    assert answer is not None and answer.ok
    assert answer.data == {"step": 9, "seconds_left": 120.0}
    assert job.engine.state is State.TRAINING


def test_a_resume_is_answered_when_the_last_rank_has_gone_on() -> None:
    job = Operated()
    hold = job.paused()
    name = job.ask("resume")
    assert job.wish.hold == 0 and job.wish.id > hold
    job.release(hold, 0, 1, 2)
    assert job.answer_to(name) is None
    job.release(hold, 3)
    answer = job.answer_to(name)
    assert answer is not None and answer.ok and answer.data == {"step": 8}


def test_a_dump_is_answered_when_all_have_saved_the_same_step() -> None:
    job = Operated()
    name = job.ask("dump")
    save = job.wish.save
    assert save > 0 and job.wish.hold == 0
    job.feed(*(SavedStep(0, rank, save, 8, "/save/iter_8") for rank in (0, 1, 2)))
    assert job.answer_to(name) is None and job.wish.save == save
    job.now += 2.5
    job.feed(SavedStep(0, 3, save, 8, "/save/iter_8"))
    answer = job.answer_to(name)
    assert answer is not None and answer.ok
    assert answer.data == {"step": 8, "path": "/save/iter_8", "seconds": 2.5}
    assert job.wish.save == 0, "a newcomer must not save once more"


def test_a_dump_that_was_given_up_is_answered_with_the_reason() -> None:
    job = Operated()
    name = job.ask("dump")
    other = "another rank could not; its log says why"
    job.feed(*(SavedStep(0, rank, job.wish.save, 8, "", other if rank != 2 else "no space left") for rank in range(4)))
    answer = job.answer_to(name)
    assert answer is not None and not answer.ok
    assert answer.text == f"step 8 was not saved: {other}; no space left"
    assert job.wish.save == 0


def test_a_dump_while_paused_is_ordered_and_the_job_stays_paused() -> None:
    job = Operated()
    hold = job.paused()
    name = job.ask("dump")
    found = [action for action in job.actions if isinstance(action, Order)]
    assert [(order.rank, order.kind, order.payload) for order in found] == [
        (rank, OrderKind.SAVE, {"step": 8}) for rank in range(4)
    ]
    busy = job.ask("resume")
    assert "dump is under way" in job.refused(busy)
    job.answer(*found, path="/save/iter_8")
    answer = job.answer_to(name)
    assert answer is not None and answer.ok and answer.data["step"] == 8
    assert job.wish.hold == hold, "still paused"
    assert "paused already, after step 8" in job.refused(job.ask("pause"))


def test_an_order_that_got_lost_is_given_again() -> None:
    job = Operated()
    job.paused()
    job.ask("dump")
    (first,) = [action for action in job.actions if isinstance(action, Order) and action.rank == 2]
    again = job.feed(Registered(0, job.info(2), wish=job.wish, held=job.wish.hold, held_at=8))
    assert [action for action in again if isinstance(action, Order)] == [first]


@pytest.mark.parametrize(
    ("kind", "args", "why"),
    [
        ("resume", {}, "not paused"),
        ("pause", {"step": "6"}, "--at-step 6: that step is over, the job computes step 7"),
        ("pause", {"step": "soon"}, "'soon' is no number"),
        ("pause", {"limit": "0"}, "--for 0 s"),
        ("fly", {}, "nobody knows the request 'fly'; known: dump, pause, resume"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(kind: str, args: dict[str, str], why: str) -> None:
    job = Operated()
    assert why in job.refused(job.ask(kind, **args))
    assert job.wish == Wish()


@pytest.mark.parametrize("kind", ["pause", "resume", "dump"])
def test_before_training_and_after_it_everything_is_refused(kind: str) -> None:
    job = Operated(register=False)
    job.feed(Registered(0, job.info(0)))
    assert "1 of 4 ranks have registered" in job.refused(job.ask(kind))
    job = Operated()
    job.feed(RankFinished(0, 2))
    assert "training has ended on rank 2" in job.refused(job.ask(kind))
    job.feed(*(RankFinished(0, rank) for rank in (0, 1, 3)))
    assert "the job is ending" in job.refused(job.ask(kind))


@pytest.mark.parametrize("kind", ["pause", "dump"])
def test_in_an_incident_it_is_refused(kind: str) -> None:
    job = Operated()
    job.lose(1)
    assert "an incident is being handled (stopping)" in job.refused(job.ask(kind))


@pytest.mark.parametrize("kind", ["pause", "dump"])
def test_two_at_the_same_time_are_refused(kind: str) -> None:
    job = Operated()
    job.ask(kind)
    wish = job.wish
    assert "another" in job.refused(job.ask(kind))
    assert job.wish == wish


def test_a_dump_and_a_pause_can_wait_side_by_side() -> None:
    job = Operated()
    first, second = job.ask("dump"), job.ask("pause")
    assert job.wish.save and job.wish.hold
    job.feed(*(SavedStep(0, rank, job.wish.save, 8, "/save/iter_8") for rank in range(4)))
    job.hold()
    assert all((answer := job.answer_to(name)) is not None and answer.ok for name in (first, second))


def test_a_resume_withdraws_a_pause_that_has_not_come_true() -> None:
    job = Operated()
    pause = job.ask("pause", step="50")
    job.hold(0)
    hold, resume = job.wish.hold, job.ask("resume")
    assert "withdrawn by a resume" in job.refused(pause)
    job.release(hold, 0)
    answer = job.answer_to(resume)
    assert answer is not None and answer.ok and job.wish.hold == 0


@pytest.mark.parametrize("kind", ["pause", "dump"])
def test_who_does_not_wait_any_more_does_not_want_it_any_more(kind: str) -> None:
    job = Operated()
    name = job.ask(kind)
    job.feed(Withdrawn(0, name))
    assert (job.wish.hold, job.wish.save) == (0, 0)
    assert job.answer_to(name) is None
    job.feed(Withdrawn(0, name))
    job.ask(kind)
    assert job.wish.hold or job.wish.save, "and another one may want it"


@pytest.mark.parametrize(("kind", "where"), [("pause", "0 of 4 ranks held"), ("dump", "0 of 4 ranks have saved")])
def test_a_request_ends_in_time(kind: str, where: str) -> None:
    job = Operated()
    name = job.ask(kind, patience=5.0)
    job.wait(4.5)
    assert job.answer_to(name) is None
    job.wait(1.0)
    answer = job.answer_to(name)
    assert answer is not None and (answer.ok, answer.late) == (False, True)
    assert answer.text == f"not done within 5 s: {where}; the wish is withdrawn"
    assert (job.wish.hold, job.wish.save) == (0, 0)


def test_the_limit_of_a_hold_is_ended_for_all_at_once() -> None:
    job = Operated()
    hold = job.paused(limit="30")
    job.wait(29.5)
    assert job.wish.hold == hold
    job.wait(1.0)
    assert job.wish.hold == 0 and job.wish.id > hold


def test_a_rank_that_went_on_alone_takes_all_with_it() -> None:
    """Its own limit was over while nobody heard it."""
    job = Operated()
    hold = job.paused()
    job.release(hold, 2)
    assert job.wish.hold == 0


def test_no_limit_that_was_not_asked_for_is_longer_than_an_hour() -> None:
    job = Operated()
    job.ask("pause")
    assert job.wish.limit == LIMIT == 3600.0


# ------------------------------------------------------------------------------------------- faults


def test_a_fault_ends_the_hold_and_the_wish_stays() -> None:
    job = Operated()
    job.engine = Engine(DEADLINES, 4, strategies=frozenset({"retry", "dump"}))
    job.feed(*(Registered(0, job.info(rank)) for rank in range(4)))
    hold = job.paused()
    job.lose(1)
    assert job.engine.state is State.STOPPING
    status: Any = job.engine.status()["pause"]
    assert (status["wished"], status["paused"], status["held"]) == (True, False, 0)
    assert job.wish.hold == hold, "who trains on is held again"


def test_a_rank_that_was_held_as_the_stop_went_out_is_not_held_after_the_repair() -> None:
    """Its word comes after the stop, and its report after that."""
    job = Operated()
    job.engine = Engine(DEADLINES, 4, strategies=frozenset({"retry", "dump"}))
    job.feed(*(Registered(0, job.info(rank)) for rank in range(4)))
    name = job.ask("pause")
    job.feed(FaultSeen(0, 3, "link", "LINK ERROR", own=True))
    job.hold(0, 1, 2, step=7)
    job.report(0, 1, 2, 3, epoch=1)
    job.answer(*job.until(OrderKind.RESUME))
    assert job.engine.state is State.TRAINING
    job.hold(3, step=8)
    assert job.answer_to(name) is None, "the others have not come yet"
    job.hold(0, 1, 2, step=8)
    answer = job.answer_to(name)
    assert answer is not None and answer.ok and answer.data["step"] == 8


def test_a_resume_in_an_incident_is_heeded() -> None:
    job = Operated()
    job.paused()
    job.lose(1)
    name = job.ask("resume")
    answer = job.answer_to(name)
    assert answer is not None and answer.ok and job.wish.hold == 0


def test_a_dump_that_a_fault_interrupts_fails_and_the_orders_are_void() -> None:
    job = Operated()
    job.paused()
    name = job.ask("dump")
    order = next(action for action in job.actions if isinstance(action, Order))
    job.lose(1)
    assert "a fault came in between" in job.refused(name)
    job.feed(OrderDone(0, order.rank, order.id, True))  # late, and nobody stumbles over it
    assert job.engine.state is State.STOPPING


def test_a_fault_while_ranks_save_takes_back_no_word_and_mixes_no_steps() -> None:
    job = Operated()
    job.engine = Engine(DEADLINES, 4, strategies=frozenset({"retry", "dump"}))
    job.feed(*(Registered(0, job.info(rank)) for rank in range(4)))
    name = job.ask("dump")
    save = job.wish.save
    job.feed(*(SavedStep(0, rank, save, 8, "/save/iter_8") for rank in (0, 1, 2)))
    job.feed(FaultSeen(0, 3, "link", "LINK ERROR", own=True))
    assert job.engine.state is State.STOPPING and job.wish.save == save
    job.feed(SavedStep(0, 3, save, 9, "/save/iter_9"))  # it was not through, so all save the next one
    assert job.answer_to(name) is None
    job.feed(*(SavedStep(0, rank, save, 9, "/save/iter_9") for rank in (0, 1, 2)))
    answer = job.answer_to(name)
    assert answer is not None and answer.ok and answer.data["path"] == "/save/iter_9"


def test_the_end_of_the_job_answers_everybody() -> None:
    job = Operated()
    names = [job.ask("pause", step="100"), job.ask("dump")]
    job.feed(*(RankFinished(0, rank) for rank in range(4)))
    assert all("the job has ended: Training ended on 4 ranks." in job.refused(name) for name in names)


def test_the_watch_leaves_held_ranks_alone_and_finds_one_that_hangs_before_it_is_held() -> None:
    job = Operated(hang=5.0)
    for step in range(8, 40):  # the watch learns how long a step takes
        for rank in range(4):
            job.feed(Heartbeat(0, rank, step, "forward-backward"))
        job.wait(0.5)
    job.ask("pause")
    for _ in range(400):
        job.feed(*(Heartbeat(0, rank, 40, "held", waiting=True) for rank in range(4)))
        job.wait(0.5)
    assert not any(isinstance(action, (Stop, Kill)) for action in job.actions)
    for _ in range(400):
        job.feed(*(Heartbeat(0, rank, 41, "held", waiting=True) for rank in range(3)))
        job.feed(Heartbeat(0, 3, 41, "param-gather"))
        job.wait(0.5)
        if looked := [action for action in job.actions if type(action).__name__ == "Examine"]:
            break
    assert [action.rank for action in looked] == [3]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------- after another engine


def successor(job: Operated, *hellos: dict[str, Any]) -> list[Action]:
    job.engine = Engine(DEADLINES, job.world, epoch=1000, issued=1 << 32)
    job.actions.clear()
    return job.feed(*(Registered(0, job.info(rank), **hello) for rank, hello in enumerate(hellos)))


def test_a_new_leader_knows_that_the_job_is_paused_and_can_resume_it() -> None:
    job = Operated()
    hold = job.paused()
    told = {"wish": job.wish, "held": hold, "held_at": 8, "began": True}
    successor(job, *[told] * 4)
    status: Any = job.engine.status()["pause"]
    assert (status["paused"], status["step"]) == (True, 8)
    job.ask("resume")
    assert job.wish.hold == 0
    assert job.wish.id > 1 << 32, "no id of an earlier leader comes again"


def test_a_new_leader_tells_the_latest_wish_to_who_missed_it() -> None:
    job = Operated()
    hold = job.paused()
    old = job.wish
    job.ask("resume")
    new, held = job.wish, {"held": hold, "held_at": 8}
    successor(job, {"wish": old, **held}, {"wish": new}, {"wish": old, **held}, {"wish": new})
    told = {rank for action in job.actions if isinstance(action, Tell) and action.wish == new for rank in action.ranks}
    assert told >= {0, 2}
    assert not job.engine.status()["pause"]["wished"]  # type: ignore[index]


def test_a_pause_whose_controller_died_is_the_same_pause_when_it_is_asked_for_again() -> None:
    job = Operated()
    job.ask("pause")
    wish = job.wish
    successor(job, *[{"wish": wish, "began": True}] * 4)
    name = job.ask("pause")
    assert job.wish in (wish, Wish()), "nothing new is told"
    job.feed(*(Held(0, rank, wish.hold, 9) for rank in range(4)))
    answer = job.answer_to(name)
    assert answer is not None and answer.ok


@pytest.mark.parametrize("kind", ["pause", "resume"])
def test_what_came_true_before_the_answer_was_lost_is_no_refusal(kind: str) -> None:
    job = Operated()
    if kind == "pause":
        job.paused()
    assert "paused" in job.refused(job.ask(kind))
    answer = job.answer_to(job.ask(kind, again="1"))
    assert answer is not None and answer.ok, answer


def test_a_rank_that_comes_back_or_comes_new_is_told() -> None:
    job = Operated()
    job.paused()
    (told,) = [a for a in job.feed(Registered(0, job.info(2))) if isinstance(a, Tell)]
    assert (told.ranks, told.wish) == ((2,), job.wish)
    assert not any(isinstance(a, Tell) for a in job.feed(Registered(0, job.info(2), wish=job.wish)))


# ------------------------------------------------------------------------------------------- works


class Toy:
    """A work that is over when it is told so."""

    doing = "its work"

    def __init__(self, desk: Desk) -> None:
        self.begun: tuple[tuple[int, ...], int] | None = None
        self.outcome: Outcome | None = None
        self.broken = ""

    def begin(self, members: tuple[int, ...], step: int) -> None:
        self.begun = (members, step)

    def done(self, order: Order, event: OrderDone) -> None: ...
    def repeat(self, rank: int) -> None: ...
    def tick(self) -> None: ...


@pytest.mark.parametrize("paused", [False, True])
def test_a_work_is_done_while_all_are_held_and_who_trained_before_trains_on(paused: bool) -> None:
    job = Operated()
    if paused:
        job.paused()
    work = Toy(job.engine._desk)
    job.engine._holds.hold_for(Asked(0, "w", "switch"), work)
    job.feed(Tick(0))
    if not paused:
        assert work.begun is None
        job.hold()
    job.feed(Tick(0))
    assert work.begun == ((0, 1, 2, 3), 8)
    work.outcome = Outcome(True, "moved")
    job.feed(Tick(0))
    answer = job.answer_to("w")
    assert answer is not None and (answer.ok, answer.text) == (True, "moved")
    assert bool(job.wish.hold) is paused


def test_a_work_that_is_broken_stops_everybody() -> None:
    job = Operated()
    work = Toy(job.engine._desk)
    job.engine._holds.hold_for(Asked(0, "w", "switch"), work)
    job.feed(Tick(0))
    job.hold()
    work.broken = "no link works"
    job.feed(Tick(0))
    assert "no link works" in job.refused("w")
    (stop,) = [action for action in job.actions if isinstance(action, Stop)]
    assert "no link works" in stop.reason


def test_a_lost_rank_is_not_waited_for() -> None:
    """Its loss is a fault, which stops everybody: no answer says that all are held."""
    job = Operated()
    name = job.ask("pause")
    job.hold(0, 1, 2)
    job.feed(RankLost(0, 3, "killed by signal 9"))
    assert job.answer_to(name) is None and job.engine.state is State.STOPPING


def test_a_new_leader_calls_nothing_paused_before_it_has_heard_everybody() -> None:
    job = Operated()
    told = {"wish": Wish(5, 4, 0, 60.0), "held": 4, "held_at": 8, "began": True}
    successor(job, told, told, told)
    assert not job.engine.status()["pause"]["paused"]  # type: ignore[index]
    job.feed(Registered(0, job.info(3), **told))
    assert job.engine.status()["pause"]["paused"]  # type: ignore[index]
