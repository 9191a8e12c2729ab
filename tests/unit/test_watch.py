"""The watch by hand: who is taken to hang and who is not, after how long, and what happens to the job then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from mindspeed_tft.engine import watch
from mindspeed_tft.engine.incident import EXIT_SAVED
from mindspeed_tft.engine.machine import Engine, State
from mindspeed_tft.engine.types import (
    Action,
    Closed,
    Commit,
    Deadlines,
    Event,
    Examine,
    Examined,
    Heartbeat,
    Kill,
    Note,
    Order,
    OrderDone,
    OrderKind,
    RankInfo,
    RankLost,
    RankQuiet,
    RankReport,
    Recovered,
    Registered,
    Reported,
    Stop,
    Tick,
    Update,
)

DEADLINES = Deadlines(heartbeat=1, heartbeat_lost=5, stop=10, order=8, dump=30, exit=4, reboot=60, hang=5)
FB, BETWEEN = "forward-backward", "between-steps"
FILE = "/incidents/stacks.txt"


class Job:
    """Four ranks, their relays and a clock. What is not set for a rank is healthy."""

    def __init__(self, *strategies: str, step_time: float = 1.0, steps: int = 20, **deadlines: Any) -> None:
        self.deadlines = replace(DEADLINES, **deadlines)
        self.engine = Engine(self.deadlines, 4, strategies=frozenset({"dump", *strategies}))
        self.now, self.actions = 100.0, list[Action]()
        self.step, self.phase, self.step_time = 0, "start", step_time
        self.begun = self.now
        self.stands = False  # the whole job: no step ends
        self.waiting: set[int] = set()
        self.pulses = {rank: 0 for rank in range(4)}
        self.lively: set[int] = set()  # ranks whose main thread moves all the time
        self.mute: dict[int, tuple[str, float]] = {}  # rank -> state of its process, and since when
        self.deaf: set[int] = set()  # ranks whose relays are not heard
        self.phases: dict[int, str] = {}  # of ranks that are elsewhere than the others
        self.spare: dict[int, str] = {}
        self.answers = True  # of relays that were asked to look
        self.feed(*(Registered(0, self.info(rank)) for rank in range(4)))
        self.run(steps * step_time + 0.5)

    def info(self, rank: int, pid: int = 0) -> RankInfo:
        return RankInfo(rank, f"h{rank}", pid or 1000 + rank, "p0", rank, (f"p0/{rank % 2}",))

    def feed(self, *events: Event) -> list[Action]:
        found: list[Action] = []
        for event in events:
            found += self.engine.handle(replace(event, at=self.now))
        self.actions += found
        for action in found:
            if isinstance(action, Examine) and self.answers:
                spare = self.spare.get(action.rank, "")
                self.feed(Examined(0, action.rank, 1000 + action.rank, spare, "" if spare else FILE))
        return found

    def run(self, seconds: float) -> Job:
        """Ticks five times a second, heartbeats each second."""
        for _ in range(round(seconds * 5)):
            self.now = round(self.now + 0.2, 3)
            if not self.stands and self.now - self.begun >= self.step_time - 1e-6:
                self.step, self.phase, self.begun = self.step + 1, FB, self.now
            if self.now % 1 < 0.1:
                self.beat()
            self.feed(Tick(0))
        return self

    def beat(self) -> None:
        for rank in range(4):
            if rank in self.lively:
                self.pulses[rank] += 1
            if rank in self.deaf:
                continue
            if rank in self.mute:
                state, since = self.mute[rank]
                if self.now - since >= self.deadlines.heartbeat_lost:
                    self.feed(RankQuiet(0, rank, self.now - since, state))
                continue
            phase = self.phases.get(rank, self.phase)
            self.feed(Heartbeat(0, rank, self.step, phase, rank in self.waiting, self.pulses[rank]))

    def hang(self, *ranks: int) -> Job:
        """These do not move any more, and all others wait for them."""
        self.stands, self.waiting = True, {0, 1, 2, 3} - {*ranks}
        return self

    def stop_process(self, rank: int, state: str = "T") -> Job:
        self.mute[rank] = (state, self.now)
        return self.hang(rank)

    def said(self, kind: type[Action]) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def killed(self) -> list[int]:
        return [action.rank for action in self.said(Kill)]

    @property
    def notes(self) -> str:
        return "\n".join(note.text for note in self.said(Note))

    def healthy(self) -> bool:
        return self.engine.state is State.TRAINING and not self.said(Examine) and not self.said(Stop)

    def report(self, *ranks: int, **more: Any) -> None:
        epoch = self.said(Stop)[-1].epoch
        for rank in ranks:
            found = RankReport(rank, self.step, Commit.NONE, Update.UNTOUCHED, epoch=epoch)
            self.feed(Reported(0, replace(found, **more)))

    def answer_all(self, rounds: int = 12) -> None:
        """All orders, as they come."""
        done: set[int] = set()
        for _ in range(rounds):
            for order in self.said(Order):
                if order.id not in done:
                    done.add(order.id)
                    self.feed(OrderDone(0, order.rank, order.id, True))


def first_kill(job: Job, most: float) -> float:
    """Seconds until somebody is killed, in steps of a tick."""
    begin = job.now
    while not job.killed and job.now - begin < most:
        job.run(0.2)
    assert job.killed, f"nobody was killed within {most} s: {job.notes}"
    return job.now - begin


# ------------------------------------------------------------------------------------------------ a rank hangs


def test_a_rank_for_which_all_others_wait_is_killed_and_the_job_is_stopped() -> None:
    job = Job().hang(2)
    took = first_kill(job, 20)
    assert 5 <= took <= 8
    assert job.killed == [2]
    assert job.said(Kill) == [Kill(2, 1002)]
    (stop,) = job.said(Stop)
    assert stop.reason.startswith("rank 2 hangs: no progress for ")
    assert stop.reason.endswith(f" in forward-backward of step {job.step}; stacks in {FILE}")


def test_with_dumps_only_the_others_save_and_the_summary_names_the_cause() -> None:
    job = Job().hang(2)
    first_kill(job, 20)
    job.feed(RankLost(0, 2, "process 1002 was killed because it did not move", 1002))
    job.report(0, 1, 3)
    job.answer_all()
    (closed,) = job.said(Closed)
    assert closed.outcome == "dumped"
    assert closed.summary.startswith("Training stopped: rank 2 hangs: no progress for ")
    exits = [order for order in job.said(Order) if order.kind is OrderKind.EXIT]
    assert {order.payload["code"] for order in exits} == {EXIT_SAVED}


def test_with_worker_reboot_training_goes_on() -> None:
    job = Job("recover").hang(2)
    first_kill(job, 20)
    job.feed(RankLost(0, 2, "gone", 1002))
    job.report(0, 1, 3)
    assert job.engine.state is State.WAITING
    job.feed(Registered(0, job.info(2, 5002)))
    job.report(2, step=0, trusted=False)
    job.answer_all()
    (done,) = job.said(Recovered)
    assert done.outcome == "rebooted" and "rank 2 hangs" in done.summary
    assert job.engine.state is State.TRAINING
    assert not job.run(30).said(Closed)  # what stood still before says nothing about the time after
    assert len(job.said(Kill)) == 1


def test_two_looks_are_needed_and_who_moves_in_between_is_left_alone() -> None:
    job = Job().hang(2)
    limit = 0
    while not job.said(Examine) and limit < 100:
        job.run(0.2)
        limit += 1
        if job.engine._watch._first is not None:
            break
    assert not job.said(Examine)
    job.pulses[2] += 1
    assert job.run(3).healthy()


def test_who_moves_while_it_is_looked_at_is_left_alone() -> None:
    job = Job().hang(2)
    job.answers = False
    while not job.said(Examine):
        job.run(0.2)
    job.stands, job.waiting = False, set()
    job.run(1.4)
    job.feed(Examined(0, 2, 1002, "", FILE))
    job.run(5)
    assert not job.killed and "rank 2 moves again" in job.notes


def test_where_no_relay_answers_nobody_is_killed_and_it_is_asked_again() -> None:
    job = Job().hang(2)
    job.answers = False
    job.run(60)
    assert not job.killed and not job.said(Stop)
    assert "left alone: its host does not answer" in job.notes
    assert len(job.said(Examine)) == 1
    job.answers = True
    assert first_kill(job, 30) > 5


def test_a_debugged_rank_is_left_alone_until_it_moves() -> None:
    job = Job().hang(2)
    job.spare[2] = "it is being debugged by process 9"
    job.run(50)
    assert not job.killed and job.notes.count("left alone: it is being debugged by process 9") == 1
    job.spare.clear()
    job.pulses[2] += 1  # the debugger goes away, and it hangs once more
    assert first_kill(job, 30) >= 5


def test_two_that_hang_are_killed_together() -> None:
    job = Job().hang(1, 3)
    first_kill(job, 20)
    assert job.killed == [1, 3]


def test_the_answer_for_an_earlier_process_counts_for_nothing() -> None:
    job = Job().hang(2)
    job.answers = False
    while not job.said(Examine):
        job.run(0.2)
    job.feed(Examined(0, 2, 999, "", FILE), Examined(0, 0, 1000, "", FILE))
    job.run(20)
    assert not job.killed


# ------------------------------------------------------------------------------------------------ nobody hangs


def healthy_slow_steps(job: Job) -> None:
    job.step_time = 4.9
    job.run(60)


def evaluation_of_minutes(job: Job) -> None:
    job.stands, job.phase = True, BETWEEN
    job.waiting = {1, 3}
    job.run(600)
    job.stands, job.waiting = False, set()
    job.run(20)


def one_rank_saves_while_the_others_wait_in_the_next_step(job: Job) -> None:
    job.step += 1
    job.stands, job.waiting, job.phases = True, {1, 2, 3}, {0: BETWEEN}
    job.run(300)


def all_compute_for_long(job: Job) -> None:
    job.stands = True
    job.run(600)
    assert job.notes.count("no progress for 20 s, but no rank waits for another one") == 1


def heartbeats_that_are_delayed(job: Job) -> None:
    job.deaf = {0, 1, 2, 3}
    job.hang(2).run(60)
    assert not job.said(Examine)
    job.deaf, job.stands, job.waiting = set(), False, set()
    job.run(10)


def one_host_that_is_not_heard_while_another_rank_stands_out(job: Job) -> None:
    job.deaf = {1}
    job.hang(2).run(60)


def a_controller_that_was_stopped_itself(job: Job) -> None:
    job.hang(2).run(3)
    job.now += 100
    job.run(4)
    assert not job.said(Examine)
    job.stands, job.waiting = False, set()
    job.run(10)


def python_that_works_for_a_while(job: Job) -> None:
    job.lively = {2}
    job.hang(2).run(55)
    job.stands, job.waiting = False, set()
    job.run(5)


def a_network_that_stands_still_for_a_while(job: Job) -> None:
    job.hang().run(18)
    job.stands, job.waiting = False, set()
    job.run(5)


@pytest.mark.parametrize(
    "life",
    [
        healthy_slow_steps,
        evaluation_of_minutes,
        one_rank_saves_while_the_others_wait_in_the_next_step,
        all_compute_for_long,
        heartbeats_that_are_delayed,
        one_host_that_is_not_heard_while_another_rank_stands_out,
        a_controller_that_was_stopped_itself,
        python_that_works_for_a_while,
        a_network_that_stands_still_for_a_while,
    ],
    ids=lambda life: life.__name__,
)
def test_no_alarm(life: Callable[[Job], None]) -> None:
    job = Job()
    life(job)
    assert job.healthy(), job.notes


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_the_first_steps_may_take_minutes(steps: int) -> None:
    job = Job(steps=steps).hang(2).run(900)
    assert job.healthy()


def test_after_the_first_steps_they_may_not() -> None:
    assert first_kill(Job(steps=11).hang(2), 20) < 10


def test_slow_data_of_one_rank_is_a_hang_after_the_limit() -> None:
    """It cannot be told from a loader that is dead. Before the limit it is nothing."""
    job = Job().hang(2).run(4.8)
    job.stands, job.waiting = False, set()
    assert job.run(5).healthy()
    assert first_kill(job.hang(2), 20) > 5


def test_python_that_runs_for_ever_is_ended_in_the_end() -> None:
    job = Job()
    job.lively = {2}
    assert first_kill(job.hang(2), 100) >= watch.BUSY * 5


def test_no_watch() -> None:
    assert Job(hang=0.0).hang(2).run(900).healthy()


# ------------------------------------------------------------------------------------------------ the limit


@pytest.mark.parametrize(("step_time", "limit"), [(0.2, 5.0), (1.0, 5.0), (4.0, 12.0), (30.0, 90.0)])
def test_the_limit_follows_the_step_time(step_time: float, limit: float) -> None:
    job = Job(step_time=step_time)
    assert job.engine._watch.limit == pytest.approx(limit, rel=0.2)
    took = first_kill(job.hang(2), 200)
    assert limit - step_time - 1 <= took <= 1.2 * limit + 4


def test_a_fixed_limit_is_fixed() -> None:
    job = Job(step_time=4.0, hang=8.0, hang_fixed=True)
    assert job.engine._watch.limit == 8.0


def test_steps_that_become_longer_make_it_longer_at_once() -> None:
    job = Job(steps=200)
    job.step_time = 4.0
    job.run(5)
    assert job.engine._watch.limit == pytest.approx(12, rel=0.2)


def test_a_pause_between_steps_is_no_step_time() -> None:
    job = Job()
    job.stands, job.phase = True, BETWEEN
    job.run(100)
    job.stands = False
    job.run(10)
    assert job.engine._watch.limit == 5.0


def test_an_earlier_step_after_a_rewind_starts_anew() -> None:
    job = Job(steps=30)
    job.engine._watch.begin()
    job.step = 5
    job.run(9)
    assert job.engine._watch.limit is None
    job.run(6)
    assert job.engine._watch.limit == 5.0


# ------------------------------------------------------------------------------------------------ mute ranks


@pytest.mark.parametrize("phase", [FB, BETWEEN, "start"])
def test_a_stopped_process_is_killed_in_any_phase(phase: str) -> None:
    job = Job(steps=0 if phase == "start" else 20)
    job.phases = dict.fromkeys(range(4), phase)
    job.run(2)
    took = first_kill(job.stop_process(2), 30)
    assert 5 <= took <= 9
    assert job.killed == [2]
    assert "rank 2 hangs: no sign of life for" in job.notes and "its process is stopped (state T)" in job.notes


def test_a_native_call_that_holds_the_lock() -> None:
    assert first_kill(Job().stop_process(2, "S"), 20) <= 9
    assert first_kill(Job().stop_process(2, "R"), 20) <= 9


@pytest.mark.parametrize(("state", "phase", "least"), [("S", BETWEEN, 20), ("D", FB, 60)])
def test_silence_that_may_be_work_is_waited_for_longer(state: str, phase: str, least: float) -> None:
    job = Job()
    job.phases = {2: phase}
    job.run(2)
    assert first_kill(job.stop_process(2, state), 100) >= least


@pytest.mark.parametrize("state", ["S", "t"])
def test_silence_before_the_first_steps_and_in_a_debugger_is_no_hang(state: str) -> None:
    assert Job(steps=0 if state == "S" else 20).stop_process(2, state).run(600).healthy()


def test_a_job_that_is_suspended_as_a_whole_is_left_alone() -> None:
    job = Job()
    for rank in range(4):
        job.stop_process(rank)
    job.run(600)
    assert job.healthy() and "no rank is heard any more" in job.notes
    job.mute, job.stands, job.waiting = {}, False, set()
    assert job.run(30).healthy()


def test_a_rank_that_is_heard_again_in_time_is_left_alone() -> None:
    job = Job().stop_process(2).run(6)
    job.mute, job.stands, job.waiting = {}, False, set()
    job.run(20)
    assert not job.killed and not job.said(Stop)


def test_a_host_that_lost_its_power_is_noticed_by_those_who_wait_for_it() -> None:
    job = Job("recover")
    job.deaf = {2}
    job.hang(2).run(4)
    assert job.healthy()  # its relay may be on its way back
    job.run(9)
    (stop,) = job.said(Stop)
    assert "all wait, and rank 2 cannot be heard, nor can whoever watches" in stop.reason
    assert not job.killed


def test_a_host_that_is_cut_off_from_the_controller_alone_trains_on() -> None:
    job = Job()
    job.deaf = {2}
    assert job.run(100).healthy()  # steps go on
    job.stands = True
    assert job.run(100).healthy()  # a long step: nobody waits
    job.phases = {1: BETWEEN}
    job.waiting = {0, 3}
    assert job.run(100).healthy()  # rank 1 saves


# ------------------------------------------------------------------------------------------------ all wait


def test_a_deadlock_is_a_broken_link_that_a_repair_mends() -> None:
    job = Job("retry").hang()
    job.run(30)
    (stop,) = job.said(Stop)
    assert stop.reason.startswith("all ranks link: each waits for another one, no progress for 2")
    assert not job.killed
    job.report(0, 1, 2, 3)
    job.answer_all()
    (done,) = job.said(Recovered)
    assert done.outcome == "retried" and "all ranks link" in done.summary


def test_a_deadlock_with_dumps_only() -> None:
    job = Job().hang()
    job.run(30)
    job.report(0, 1, 2, 3)
    job.answer_all()
    assert [closed.outcome for closed in job.said(Closed)] == ["dumped"]


def test_ranks_that_wait_for_each_other_between_steps_are_no_deadlock() -> None:
    job = Job()
    job.phases = {0: BETWEEN}
    assert job.hang().run(600).healthy()


# ------------------------------------------------------------------------------------------------ the stop


def stopped(job: Job, silent: Iterable[int] = (2,)) -> None:
    """Rank 1 dies; these do not report."""
    job.stands = True
    job.feed(RankLost(0, 1, "killed by signal 9", 1001))
    job.report(*({0, 2, 3} - {*silent}))


def test_who_does_not_report_is_killed_where_it_can_come_back() -> None:
    job = Job("recover")
    stopped(job)
    took = first_kill(job, 30)
    assert 10 <= took <= 12
    assert job.killed == [2]
    job.feed(RankLost(0, 2, "gone", 1002))
    # 0 and 2 hold one shard, 1 and 3 the other: each is left somewhere, and both ranks get all of the time.
    assert job.engine.state is State.WAITING
    assert "waiting for newcomers for ranks 1, 2, for 60.0 s" in job.notes
    for rank in (1, 2):
        job.feed(Registered(0, job.info(rank, 5000 + rank)))
        job.report(rank, step=0, trusted=False)
    job.answer_all()
    (done,) = job.said(Recovered)
    assert f"rank 2 hangs: did not report within 10 s of the stop; stacks in {FILE}" in done.summary


def test_a_late_report_saves_its_rank() -> None:
    job = Job("recover")
    job.answers = False
    stopped(job)
    while not job.said(Examine):
        job.run(0.2)
    job.report(2)
    job.feed(Examined(0, 2, 1002, "", FILE))
    job.run(3)
    assert not job.killed and job.engine.state is State.WAITING


@pytest.mark.parametrize("case", ["no reboot", "no answer", "a debugger", "nothing to be had", "no watch", "no death"])
def test_otherwise_the_dump_goes_on_without_it(case: str) -> None:
    job = Job(*([] if case == "no reboot" else ["recover"]), hang=0.0 if case == "no watch" else 5.0)
    job.answers = case != "no answer"
    job.spare = {2: "it is being debugged by process 9"} if case == "a debugger" else {}
    silent = [2, 3] if case == "nothing to be had" else [2]
    stopped(job, silent)
    job.run(25)
    assert job.killed == ([2] if case == "no death" else [])
    assert "rank 2 did not report" in job.notes or "ranks 2, 3 did not report" in job.notes
    assert job.engine.state not in (State.WAITING, State.TRAINING)


# ------------------------------------------------------------------------------------------------ size


def test_a_large_job_costs_nothing_but_its_heartbeats() -> None:
    engine = Engine(DEADLINES, 4096)
    for rank in range(4096):
        engine.handle(Registered(0.0, RankInfo(rank, "h", rank + 1, "p0", rank, (f"p0/{rank % 2}",))))
    calls = 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args)

    original = watch.Watch._rests
    for at in range(30):
        for rank in range(4096):
            engine.handle(Heartbeat(float(at), rank, at, FB))
        watch.Watch._rests, before = counted, watch.Watch._rests  # type: ignore[method-assign]
        engine.handle(Tick(float(at)))
        watch.Watch._rests = before  # type: ignore[method-assign]
    assert calls == 0


# ------------------------------------------------------------------------------------------------ controls

BROKEN: dict[str, tuple[str, Any, Callable[[Job], None]]] = {
    "pauses count as steps": ("STEPPING", watch.STEPPING | {BETWEEN}, evaluation_of_minutes),
    "a moving thread is none": ("BUSY", 1.0, python_that_works_for_a_while),
    "every wait is a deadlock": ("LONG", 1.0, a_network_that_stands_still_for_a_while),
    "old words count": ("BEATS", 1000, one_host_that_is_not_heard_while_another_rank_stands_out),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_tests_above_catch_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, life = BROKEN[rule]
    monkeypatch.setattr(watch, name, broken)
    job = Job()
    life(job)
    assert not job.healthy()
