"""A cluster manager decides: the engine by hand, and the negotiation by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from engine_job import DEADLINES, EngineJob, notes, orders

from mindspeed_tft.clusterd import words as w
from mindspeed_tft.clusterd.negotiation import Negotiation, Output, Place, Reconnect, Say
from mindspeed_tft.clusterd.words import Report, Signal
from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.counsel import MAX_DECISIONS
from mindspeed_tft.engine.hold import AGAIN
from mindspeed_tft.engine.incident import EXIT_MOVED, EXIT_REBORN, EXIT_UNSAVED
from mindspeed_tft.engine.machine import Engine, State

BOTH = frozenset({"retry", "recover", "dump"})


class Job(EngineJob):
    """Four ranks in step 7, steered."""

    def __init__(self, strategies: frozenset[str] = BOTH, steered: bool = True) -> None:
        deadlines = replace(DEADLINES, consult=6.0, reboot=20.0)
        super().__init__(Engine(deadlines, 4, strategies=strategies))
        if steered:
            self.feed(t.Steered(0, True, "ClusterD"))

    def report(self, *ranks: int) -> list[t.Action]:
        found = [t.RankReport(rank, 7, t.Commit.PASSED, t.Update.DONE) for rank in ranks]
        return self.feed(*(t.Reported(0, replace(report, epoch=self.engine._desk.epoch)) for report in found))

    def lose(self, *ranks: int) -> list[t.Action]:
        return self.feed(*(t.RankLost(0, rank, "killed by signal 9") for rank in ranks))

    def advise(self, strategy: str, *leaving: int) -> list[t.Action]:
        return self.feed(t.Advised(0, strategy, leaving))


def consults(actions: Iterable[t.Action]) -> list[t.Consult]:
    return [action for action in actions if isinstance(action, t.Consult)]


def test_nobody_is_asked_where_nobody_steers() -> None:
    job = Job(steered=False)
    job.lose(3)
    job.report(0, 1, 2)
    assert not consults(job.actions) and job.engine.state is State.WAITING
    job.advise("exit")
    assert job.engine.state is State.WAITING


def test_what_is_possible_is_offered_the_gentlest_first() -> None:
    job = Job()
    job.lose(3)
    (asked,) = consults(job.report(0, 1, 2))
    assert (asked.strategies, asked.faults, asked.failed) == (("recover", "dump", "exit"), ((3, "lost"),), "")
    assert job.engine.state is State.CONSULTING

    whole = Job()
    whole.feed(t.FaultSeen(0, 2, "link", "a link", own=True))
    (asked,) = consults(whole.report(0, 1, 2, 3))
    assert (asked.strategies, asked.faults) == (("retry", "recover", "dump", "exit"), ((2, "link"),))

    bare = Job(frozenset({"dump"}))
    bare.lose(1, 3)  # both holders of a shard
    (asked,) = consults(bare.report(0, 2))
    assert asked.strategies == ("exit",)


def test_nodes_that_go_take_their_ranks_along() -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1, 2)
    (order,) = orders(job.advise("recover", 2, 3), t.OrderKind.EXIT)
    assert (order.rank, order.payload["code"]) == (2, EXIT_MOVED)
    assert job.engine.state is State.WAITING
    assert "waiting for newcomers for ranks 2, 3" in notes(job.actions)


def test_a_rank_that_stays_with_its_node_is_started_again() -> None:
    job = Job()
    job.feed(t.FaultSeen(0, 3, "exception", "it broke", own=True))
    job.report(0, 1, 2, 3)
    (order,) = orders(job.advise("recover"), t.OrderKind.EXIT)
    assert (order.rank, order.payload["code"]) == (3, EXIT_REBORN)


def test_a_memory_fault_that_only_the_manager_knows_makes_no_source() -> None:
    job = Job()
    told = job.feed(t.Told(0, ((3, "memory"),), "ClusterD"))
    assert any(isinstance(action, t.Stop) for action in told)
    (asked,) = consults(job.report(0, 1, 2, 3))
    assert asked.strategies[0] == "retry"
    job.advise("retry")
    (repair,) = job.engine._repairs.tries  # type: ignore[union-attr]
    assert [str(transfer) for transfer in repair.plan.transfers] == ["p0/1|1|3"]


def test_all_that_is_told_later_is_answered_with_another_question() -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1, 2)
    (asked,) = consults(job.feed(t.Told(0, ((3, "process"), (1, "memory")), "ClusterD")))
    assert asked.strategies == ("exit",), "both holders of a shard are gone"
    assert asked.faults == ((1, "memory"), (3, "lost"))


def test_without_a_fault_all_ranks_stop_all_the_same() -> None:
    job = Job()
    job.feed(t.Told(0, (), "ClusterD"))
    assert job.engine.state is State.STOPPING
    (asked,) = consults(job.report(0, 1, 2, 3))
    assert asked.strategies[0] == "retry"


def test_losses_while_it_decides_are_one_question_more() -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1, 2)
    assert not consults(job.lose(2))
    (asked,) = consults(job.wait(0.5))
    assert asked.faults == ((2, "lost"), (3, "lost"))


@pytest.mark.parametrize(("strategy", "why"), [("retry", "rank 3 was lost"), ("downgrade", "not in this version")])
def test_what_was_not_offered_is_not_done(strategy: str, why: str) -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1, 2)
    (asked,) = consults(job.advise(strategy))
    assert asked.failed == strategy and why in asked.why
    assert not orders(job.actions)


def test_what_did_not_lead_on_is_decided_once_more() -> None:
    job = Job()
    job.feed(t.FaultSeen(0, 2, "memory", "uncorrectable", own=True))
    job.report(0, 1, 2, 3)
    first = orders(job.advise("retry"))
    job.answer(first[0], ok=False, message="no")
    (asked,) = consults(job.report(0, 1, 2, 3))
    assert asked.failed == "retry" and "could not" in asked.why
    assert orders(job.advise("exit"), t.OrderKind.EXIT)[0].payload["code"] == EXIT_UNSAVED


def test_whoever_decides_for_the_same_for_ever_is_not_asked_any_more() -> None:
    job = Job()
    job.lose(3)
    job.report(0, 1, 2)
    for _ in range(MAX_DECISIONS):
        assert job.engine.state is State.CONSULTING
        job.advise("retry")
    assert job.engine.state is State.WAITING, "newcomers, by our own rules"
    assert "has decided 10 times, and nothing led on" in notes(job.actions, warn=True)


def test_an_exit_says_why_nothing_could_be_saved() -> None:
    job = Job(frozenset({"dump"}))
    job.lose(1, 3)
    job.report(0, 2)
    job.advise("exit")
    assert "decided for an exit without a dump; not possible: dump (no holder left" in job.engine._summary


def test_our_own_rules_hold_when_it_is_lost_or_late() -> None:
    for how in ("lost", "late"):
        job = Job()
        job.lose(3)
        job.report(0, 1, 2)
        found = job.feed(t.Steered(0, False, "ClusterD", "cut")) if how == "lost" else job.wait(6.5)
        assert job.engine.state is State.WAITING, "newcomers, as without it"
        assert len([text for text in notes(found, warn=True).splitlines() if "our own rules" in text.lower()]) == 1
        assert any(isinstance(action, t.Unadvised) for action in found) is (how == "late")
        assert not consults(job.lose(2))


# ------------------------------------------------------------------------------------------------ the negotiation


class Client:
    """A negotiation of four ranks, all registered; what it says is kept."""

    def __init__(self, connected: bool = True, registered: int = 4) -> None:
        self.machine = Negotiation(4)
        self.said: list[Output] = []
        for rank in range(registered):
            self.take(self.machine.event(t.Registered(0, t.RankInfo(rank, "h", 1, "p", rank, ("s",)))))
        if connected:
            self.take(self.machine.connected())

    def take(self, outputs: Iterable[Output]) -> list[Output]:
        found = list(outputs)
        self.said += found
        return found

    def signal(self, kind: str, uuid: str = "e", nodes: dict[int, set[int]] | None = None, **more: Any) -> list[Output]:
        return self.take(self.machine.signal(Signal(uuid, kind, **more), nodes or {}))

    def consult(self, *faults: tuple[int, str], failed: str = "", step: int = 7) -> list[Output]:
        asked = t.Consult(("retry", "recover", "dump", "exit"), faults, failed, "why" if failed else "", step)
        return self.take(self.machine.action(asked))

    def to_offer(self) -> None:
        """A fault of ours, until it may decide."""
        self.take(self.machine.action(t.Stop(1, (0, 1, 2, 3), "a fault")))
        self.consult((1, "lost"))
        self.signal(w.STOP, faults=((1, w.OTHER),))
        self.consult((1, "lost"))
        self.signal(w.GLOBAL, faults=((1, w.OTHER),))
        self.consult((1, "lost"))
        assert self.machine.place is Place.OFFERED


def reports(outputs: Iterable[Output]) -> list[tuple[str, int]]:
    return [(each.method.removeprefix("Report"), each.code) for each in outputs if isinstance(each, Report)]


def words(outputs: Iterable[Output]) -> str:
    return "\n".join(each.text for each in outputs if isinstance(each, Say))


def test_the_order_of_one_event() -> None:
    client = Client()
    client.to_offer()
    (advised,) = client.signal(w.CHANGE, strategy="recover")
    assert advised == t.Advised(0.0, "recover", ())
    client.take(client.machine.action(t.Recovered("rebooted", 7, 1, "", 2)))
    assert not client.take(client.machine.event(t.Heartbeat(0, 0, 8, "forward")))
    client.take(client.machine.event(t.Heartbeat(0, 0, 9, "forward")))
    assert reports(client.said) == [
        ("ProcessFault", 0),
        ("StopComplete", 0),
        ("RecoverStrategy", 0),
        ("RecoverStatus", 0),
    ]
    assert client.machine.place is Place.IDLE
    assert "that event is over" in words(client.signal(w.CHANGE, strategy="dump"))


@pytest.mark.parametrize("kind", sorted(w.REFUSED))
def test_what_is_not_done_is_refused_by_name(kind: str) -> None:
    client = Client()
    assert f"{kind}, which is refused" in words(client.signal(kind))
    assert client.machine.place is Place.IDLE and not reports(client.said)


def test_what_comes_at_the_wrong_place_changes_nothing() -> None:
    client = Client()
    client.to_offer()
    before = len(reports(client.said))
    assert "it came before" in words(client.signal(w.STOP))
    assert "nobody waits for it" in words(client.signal(w.GLOBAL))
    assert "another event" in words(client.signal(w.CHANGE, "other", strategy="dump"))
    assert "nobody here knows" in words(client.signal("dance"))
    assert client.signal(w.KEEP_ALIVE) == []
    assert (client.machine.place, len(reports(client.said))) == (Place.OFFERED, before)


def test_nodes_that_go_are_named_by_their_ranks_and_those_in_place_are_not() -> None:
    nodes = {0: {0, 1}, 1: {2, 3}}
    client = Client()
    client.to_offer()
    signal = Signal("e", w.CHANGE, ("change_strategy",), strategy="recover", nodes=(1,))
    assert list(client.machine.signal(signal, nodes)) == [t.Advised(0.0, "recover", (2, 3))]
    stays = Client()
    stays.to_offer()
    in_place = replace(signal, actions=("change_strategy", w.FAULT_NODES_RESTART), extra=w.IN_PLACE)
    assert list(stays.machine.signal(in_place, nodes)) == [t.Advised(0.0, "recover", ())]


def test_nodes_that_are_to_go_before_it_decides_are_faults_of_all_their_ranks() -> None:
    client = Client()
    client.take(client.machine.action(t.Stop(1, (0, 1, 2, 3), "a fault")))
    client.consult((3, "lost"))
    client.signal(w.STOP, faults=((3, w.OTHER),))
    client.consult((3, "lost"))
    signal = Signal("e", w.GLOBAL, ("on_global_rank", w.FAULT_NODES_EXIT), ((3, w.OTHER),), nodes=(1,))
    (told,) = client.machine.signal(signal, {0: {0, 1}, 1: {2, 3}})
    assert told == t.Told(0.0, ((2, "process"), (3, "process")), "ClusterD")


def test_an_event_that_begins_in_another_one_takes_its_place() -> None:
    client = Client()
    client.to_offer()
    (told,) = client.signal(w.STOP, "f", faults=((2, w.OTHER),))
    assert told == t.Told(0.0, ((2, "process"),), "ClusterD")
    assert reports(client.consult((1, "lost"), (2, "process"))) == [("StopComplete", 0), ("ProcessFault", 0)]
    assert "another event" in words(client.signal(w.GLOBAL, "e"))
    client.signal(w.GLOBAL, "f", faults=((2, w.OTHER),))
    assert reports(client.consult((1, "lost"), (2, "process"))) == [("RecoverStrategy", 0)]


def test_results_of_what_did_not_lead_on() -> None:
    for strategy, code, place in (("retry", 405, Place.STOPPED), ("recover", 406, Place.OFFERED)):
        client = Client()
        client.to_offer()
        client.signal(w.CHANGE, strategy=strategy)
        assert reports(client.consult((1, "lost"), failed=strategy)) == [("RecoverStatus", code)]
        assert client.machine.place is place


def test_a_strategy_that_comes_twice_in_one_event_is_tried_once() -> None:
    client = Client()
    client.to_offer()
    client.signal(w.CHANGE, strategy="recover")
    client.consult((1, "lost"), failed="recover")
    assert "it came before" in words(client.signal(w.CHANGE, strategy="recover"))
    assert client.signal(w.CHANGE, strategy="dump") == [t.Advised(0.0, "dump")]


def test_a_decision_for_something_else_waits_until_the_first_has_failed() -> None:
    client = Client()
    client.to_offer()
    client.signal(w.CHANGE, strategy="recover")
    assert "if that fails, then" in words(client.signal(w.CHANGE, strategy="dump"))
    assert client.consult((1, "lost"), failed="recover") == [t.Advised(0.0, "dump")]


def test_a_fault_that_is_settled_is_no_fault_of_the_rank_that_is_well_again() -> None:
    client = Client()
    client.to_offer()
    client.signal(w.CHANGE, strategy="retry")
    client.take(client.machine.action(t.Recovered("retried", 7, 1, "", 2)))
    assert reports(client.consult((2, "memory"), failed="retry")) == [("RecoverStatus", 405), ("ProcessFault", 0)]
    (told,) = client.signal(w.GLOBAL, faults=((1, w.OTHER), (2, w.MEMORY)))
    assert told == t.Told(0.0, ((2, "memory"),), "ClusterD")


def test_a_fault_after_one_more_step_is_another_event() -> None:
    """Steps may be shorter than the time between two heartbeats."""
    client = Client()
    client.to_offer()
    client.signal(w.CHANGE, strategy="retry")
    client.take(client.machine.action(t.Recovered("retried", 7, 1, "", 2)))
    found = client.consult((1, "memory"), step=8)
    assert reports(found) == [("RecoverStatus", 0), ("ProcessFault", 0)]
    assert client.machine.place is Place.REPORTED


def test_ranks_that_are_not_there_yet_cannot_be_stopped() -> None:
    client = Client(registered=3)
    assert reports(client.signal(w.STOP)) == [("StopComplete", 404)]
    assert client.signal(w.PRE_EXIT, "p", faults=((1, w.OTHER),)) == []


def test_the_end_of_the_job_is_a_fault_first() -> None:
    fault, steered = Client().signal(w.KILL_MASTER)
    assert isinstance(fault, t.FaultSeen) and fault.kind == "terminated"
    assert isinstance(steered, t.Steered) and not steered.on


def test_an_answer_that_takes_no_report_ends_the_event() -> None:
    client = Client()
    client.to_offer()
    found = client.take(client.machine.answered(Report("ReportRecoverStrategy"), 400, ""))
    assert isinstance(found[0], Reconnect) and "400 (not registered)" in found[0].why
    assert isinstance(found[1], t.Steered) and not found[1].on
    assert not client.machine.may_connect, "in the middle of an incident it would forget"
    client.take(client.machine.action(t.Recovered("rebooted", 7, 1, "", 2)))
    assert client.machine.may_connect


def test_a_decision_that_came_too_late_leads_to_a_new_subscription() -> None:
    client = Client()
    client.to_offer()
    client.take(client.machine.action(t.Unadvised("late")))
    assert "nobody waits for it" in words(client.signal(w.CHANGE, strategy="exit"))
    found = client.take(client.machine.action(t.Recovered("rebooted", 7, 1, "", 2)))
    assert any(isinstance(each, Reconnect) for each in found) and client.machine.may_connect


def test_a_dump_that_failed_is_said() -> None:
    for outcome, code in (("dumped", 0), ("exists", 0), ("failed", 407)):
        client = Client()
        client.to_offer()
        client.signal(w.CHANGE, strategy="dump")
        assert reports(client.take(client.machine.action(t.Closed(outcome, 7, "")))) == [("RecoverStatus", code)]


def paused() -> Client:
    client = Client()
    (asked,) = client.signal(w.STOP, "p", actions=(w.PAUSE_TRAIN,))
    assert isinstance(asked, t.Asked) and asked.kind == "pause"
    client.take(client.machine.action(t.Answer(asked.id, True, "paused", {})))
    assert reports(client.said) == [("StopComplete", 0)]
    return client


@pytest.mark.parametrize("what", ["a fault of ours", "a stop", "the line", "another subscription"])
def test_a_pause_that_something_else_ends_holds_nobody_afterwards(what: str) -> None:
    """Else ranks would be held again after the recovery, and no later pause could be told from this one."""
    client = paused()
    if what == "a fault of ours":
        found = client.consult((1, "lost"))
        assert reports(found)[0] == ("RecoverStatus", 406)
    elif what == "a stop":
        found = client.signal(w.STOP, "e", faults=((1, w.OTHER),))
    elif what == "the line":
        found = client.take(client.machine.lost("cut"))
    else:
        client.machine.place = Place.AWAY
        found = client.take(client.machine.connected())
    (asked,) = [each for each in found if isinstance(each, t.Asked)]
    assert (asked.kind, dict(asked.args)) == ("resume", {AGAIN: "1"})
    assert not client.take(client.machine.action(t.Answer(asked.id, True, "on", {}))), "nobody asked for a word of it"
    if what == "another subscription":
        (asked,) = client.signal(w.STOP, "q", actions=(w.PAUSE_TRAIN,))
        assert isinstance(asked, t.Asked) and asked.kind == "pause"


def test_what_continues_a_pause_that_was_over_by_itself_is_no_failure() -> None:
    """An answer other than 0 makes it end the job."""
    job = Job()
    client = paused()
    (asked,) = client.signal(w.CHANGE, "p", strategy=w.CONTINUE)
    (answer,) = [each for each in job.feed(asked) if isinstance(each, t.Answer)]
    assert answer.ok
    assert reports(client.take(client.machine.action(answer))) == [("RecoverStatus", 0)]


def test_a_line_that_breaks_before_one_more_step_is_completed_comes_back() -> None:
    client = Client()
    client.to_offer()
    client.signal(w.CHANGE, strategy="recover")
    client.take(client.machine.action(t.Recovered("rebooted", 7, 1, "", 2)))
    client.take(client.machine.lost("cut"))
    assert not client.take(client.machine.event(t.Heartbeat(0, 0, 9, "forward")))
    assert (client.machine.place, client.machine.may_connect) == (Place.AWAY, True)
