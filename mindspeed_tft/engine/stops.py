"""A job from one fault to the next: who is stopped, whose report is waited for, what is tried, how everybody leaves.

    TRAINING -> STOPPING -> (a dump: FINISHING, STAGING, WRITING, PUBLISHING) -> EXITING -> CLOSED
       ^            | ^
       |            v | a further fault
       +- (a repair: FINISHING, REGROUPING, REPAIRING, ROLLING_BACK, RESUMING)
       +- (a rewind: REGROUPING, REPAIRING, LOADING, RESUMING)
       +- (WAITING for newcomers before either of these, where processes are gone)

Where a dump stands is `dump`'s affair, where a repair stands `repair`'s, who is waited for `reboot`'s, who hangs
`watch`'s, which step is saved `agreement`'s, who writes or gives what `planning`'s. Who takes part in the job, and what
an engine before this one left behind, is `machine`'s.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_tft.engine import link
from mindspeed_tft.engine.agreement import completed
from mindspeed_tft.engine.desk import Desk, Payload
from mindspeed_tft.engine.dump import Dump
from mindspeed_tft.engine.hold import OF_HELD, Holds
from mindspeed_tft.engine.incident import EXIT_UNSAVED, NOBODY, Ending, Fault, Incident
from mindspeed_tft.engine.planning import RewindPlan
from mindspeed_tft.engine.reboot import Reboots, Replaced, describe
from mindspeed_tft.engine.repair import DAMAGING, SPOILING, Repair, Repairs
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.states import OF_DUMP, OF_REPAIR, State
from mindspeed_tft.engine.types import (
    Closed,
    Deadlines,
    FaultSeen,
    Kill,
    Order,
    OrderDone,
    OrderKind,
    RankReport,
    Recovered,
    Reported,
)
from mindspeed_tft.engine.watch import Deadlock, Hang, Inquest, Watch
from mindspeed_tft.engine.words import count, ranks

_STATE_BEARING = ("step", "commit", "update")  # what a rank may not say differently a second time


class Stops:
    """The stops of one job of `world_size` ranks, and what follows them. `machine.Engine` hands it what happens."""

    _dumps: type[Dump] = Dump  # how this job saves
    _operated: type[Holds] = Holds  # and how it is held

    def __init__(
        self, deadlines: Deadlines, world_size: int, epoch: int, issued: int, tag: str, strategies: frozenset[str]
    ) -> None:
        """For the arguments see `Engine`."""
        self._deadlines = deadlines
        self._desk = Desk(epoch, issued, deadlines.heartbeat_lost / 2)
        self._first = epoch == 0  # no engine was here before: what ranks tell before they hear a stop is news
        self._roster = Roster(world_size)
        self._reports: dict[int, RankReport] = {}
        self._silent: dict[int, str] = {}
        self._awaited: set[int] = set()  # STOPPING: reports to come; EXITING: ranks to leave
        self._furthest = 0  # the last step known to be complete somewhere
        self._deadline = 0.0  # of STOPPING and of EXITING
        self._reason = ""  # of the stop
        self._exits: dict[int, Order] = {}  # rank -> its order to leave
        online = bool({"retry", "recover"} & strategies)
        self._repairs = Repairs(self._desk, self._roster, deadlines) if online else None
        self._reboots: Reboots | None = None
        if self._repairs is not None and "recover" in strategies:
            self._reboots = Reboots(self._desk, self._roster, deadlines, self._repairs)
        self._watch = Watch(self._desk, self._roster, deadlines)
        self._holds = self._operated(self._desk, self._roster, deadlines, issued)
        link.offer(self._holds, self._desk, self._roster, deadlines)
        self._inquest: Inquest | None = None  # into ranks that do not report
        self._repair: Repair | None = None  # the try that is running
        self._number = 1  # of the incident
        self._past: tuple[Incident, dict[str, object]] | None = None  # the last incident that training survived
        self._dump: Dump | None = None
        self._ending: Ending | None = None
        self._summary = ""
        self._state = State.STARTING
        self._directory = f".tft-dump-{tag + '-' if tag else ''}"  # a name inside `--save`
        self._desk.enter("start")

    # ------------------------------------------------------------------------------------------------ what is known

    @property
    def state(self) -> State:
        if self._dump is not None and self._state is State.STOPPING:
            return OF_DUMP[self._dump.stage]
        if self._repair is not None and self._state is State.STOPPING:
            return OF_REPAIR[self._repair.stage]
        if self._waiting is not None:
            return State.WAITING
        return self._state

    @property
    def step(self) -> int:
        """S, once it is agreed; -1 before, and when no step is provable."""
        flow = self._flow
        return flow.agreement.step if flow is not None else -1

    @property
    def timings(self) -> dict[str, float]:
        """Seconds spent in each stage so far; while training goes on, in those of the last incident."""
        return dict(self._record.timings)

    @property
    def timeline(self) -> list[tuple[float, str, str]]:
        """Everything noted so far: (at, stage, text); while training goes on, of the last incident."""
        return list(self._record.log)

    @property
    def _record(self) -> Incident:
        return self._past[0] if self._past is not None and self._state is State.TRAINING else self._desk.incident

    @property
    def _waiting(self) -> Reboots | None:
        """The wait for newcomers, while it goes on."""
        waits = self._reboots is not None and self._reboots.waiting and self._state is State.STOPPING
        return self._reboots if waits and self._flow is None else None

    @property
    def _welcoming(self) -> Reboots | None:
        """Newcomers may take the place of lost ranks: nothing else was decided yet."""
        open_ = self._state is State.STOPPING and self._dump is None
        return self._reboots if open_ else None

    @property
    def _flow(self) -> Dump | Repair | None:
        """What was decided after the stop; None while reports are collected."""
        return self._dump or self._repair

    def incident(self) -> dict[str, object]:
        """All that is known, for the incident file: plain values only. While training goes on, of the last incident."""
        if self._past is not None and self._state is State.TRAINING:
            return dict(self._past[1])
        roster, dump, repairs = self._roster, self._dump, self._repairs
        flow = self._flow
        ending = self._ending
        return {
            "state": self.state.value,
            "world_size": roster.world_size,
            "registered": len(roster.infos),
            "epoch": self._desk.epoch,
            "step": self.step,
            "furthest_step": self._furthest,
            "agreement": flow.agreement.reason if flow else "",
            "impossible": {str(r): flow.agreement.offers[r].reason for r in flow.agreement.impossible} if flow else {},
            "lost": {str(rank): message for rank, message in sorted(roster.lost.items())},
            "silent": {str(rank): message for rank, message in sorted(self._silent.items())},
            "finished": len(roster.finished),
            "replaced": {str(one.rank): one.as_dict() for one in self._replaced()},
            "attempts": [attempt.as_dict() for attempt in dump.attempts] if dump else [],
            "number": self._number,
            "repairs": [repair.as_dict() for repair in repairs.tries] if repairs else [],
            "outcome": ending.outcome if ending else "",
            "summary": self._summary,
            **self._desk.incident.as_dict(),
        }

    # ------------------------------------------------------------------------------------------------ faults

    def _on_fault(self, event: FaultSeen) -> None:
        rank, roster = event.rank, self._roster
        if rank not in roster or self._state is State.CLOSED or rank in roster.finished:
            return
        if event.kind == "terminated" and (self._dump is not None or self._state is State.EXITING):
            return  # the job is on its way out: launchers ask those that are left to hurry
        fault = Fault(self._desk.at, rank, event.kind, event.message, event.own)
        new = self._book_fault(fault, self._roster.last_heard(rank))
        if not new and not (event.own and self._repair is not None):  # it has reported: it is broken once more
            return
        if event.own or self._state in (State.STARTING, State.TRAINING):  # thousands may notice the same loss
            self._desk.note(str(fault) if event.own else f"{fault} (noticed, not its own)", warn=True)
        if self._state is State.STARTING:
            self._abandon_start(str(fault))
        elif self._state is State.TRAINING:
            self._stop(str(fault))
        elif self._repair is not None:
            self._repair.fail(str(fault))
        else:
            if event.own and event.kind in DAMAGING and rank in self._reports:
                self._distrust(rank, f"has a memory fault: {event.message}")
            self._look_again()

    def _book_fault(self, fault: Fault, last_heard: float | None) -> bool:
        incident = self._desk.incident
        if not incident.faults and last_heard is not None:
            incident.timings["detect"] = self._desk.now - last_heard  # at most: it was well when it was heard last
        new = incident.fault(fault)
        if new and fault.own and fault.kind in SPOILING and not self._desk.doubt:
            self._desk.doubt = f"wrong numbers since: {fault}"
            if self._state is State.STOPPING:
                self._desk.stop(self._roster.told, self._reason)  # who has heard this stop hears of the doubt
        return new

    def _take_doubt(self, doubt: str) -> None:
        """An engine before this one knew of a fault whose witness may be gone."""
        fault = Fault(self._desk.at, NOBODY, "precision", doubt, own=True)
        self._book_fault(fault, None)
        self._desk.note(str(fault), warn=True)
        if self._state is State.TRAINING:
            self._stop(doubt)

    def _distrust(self, rank: int, why: str) -> None:
        if not self._reports[rank].trusted:
            return
        self._reports[rank] = replace(self._reports[rank], trusted=False)
        self._desk.note(f"rank {rank} is no source from now on: it {why}", warn=True)
        if (flow := self._flow) is not None and self._state is State.STOPPING:
            flow.distrust(rank, why)

    def _lose(self, rank: int, message: str) -> None:
        last = self._roster.last_heard(rank)
        self._roster.lose(rank, message)
        self._holds.gone(rank)
        if self._state is State.EXITING:  # it was told to leave: that is no fault
            self._left(rank)
            return
        self._book_fault(Fault(self._desk.at, rank, "lost", message, own=True), last)
        self._desk.note(f"rank {rank} lost: {message}", warn=True)
        if self._state is State.STARTING:
            self._abandon_start(f"rank {rank} lost: {message}")
        elif self._state is State.TRAINING:
            self._stop(f"rank {rank} lost: {message}")
        else:
            self._gone(rank, f"was lost: {message}")

    def _lose_newcomer(self, rank: int, message: str) -> None:
        del self._roster.newcomers[rank]
        if (welcoming := self._welcoming) is not None:
            self._book_fault(Fault(self._desk.at, rank, "lost", message, own=True), None)
            self._desk.note(f"the newcomer for rank {rank} is lost, too: {message}", warn=True)
            welcoming.gone(rank)
        self._left(rank)

    def _gone(self, rank: int, why: str) -> None:
        """A rank that took part in a stage does so no more."""
        self._left(rank)
        if self._state is State.STOPPING:
            if (flow := self._flow) is not None:
                flow.gone(rank, why)
            elif not self._look_again():
                self._decide_when_heard()

    def _look_again(self) -> bool:
        """Something has changed in the midst of a wait for others; False: there is none."""
        if (waiting := self._waiting) is not None:
            waiting.changed()
        return waiting is not None

    def _left(self, rank: int) -> None:
        self._awaited.discard(rank)
        if self._state is State.EXITING:
            self._close_when_left()

    # ------------------------------------------------------------------------------------------------ stops

    def _stop(self, reason: str) -> None:
        """Everybody leaves what it is doing, at once."""
        self._desk.epoch += 1
        self._reason = reason
        self._state = State.STOPPING
        self._desk.enter("stop")
        self._awaited = self._roster.alive - self._reports.keys()
        self._inquest = None
        self._deadline = self._desk.now + self._deadlines.stop
        told = self._roster.told
        self._desk.note(f"stopping {count(len(told), 'rank')}: {reason}")
        self._desk.stop(told, reason)
        self._holds.stopped()
        self._decide_when_heard()

    def _stop_again(self, reason: str) -> None:
        """A repair failed. Ranks may wait for each other in any stage of it: what they are now, only they can tell."""
        self._repair = None
        self._desk.note(f"this try to repair failed: {reason}", warn=True)
        self._stop_anew(reason)

    def _stop_anew(self, reason: str) -> None:
        """What was told under the last epoch counts no more."""
        self._desk.void()
        self._desk.incident.renew()
        self._reports.clear()
        self._silent.clear()
        if self._reboots is not None:
            self._reboots.stopped_again()
        self._stop(reason)

    def _abandon_start(
        self, reason: str, why: str = "the job had not started training, there is no step to save"
    ) -> None:
        """A fault before every rank had registered: nothing can be saved, and nobody may wait for the others."""
        self._desk.epoch += 1
        self._reason = reason
        self._desk.enter("stop")
        self._desk.note(f"the job did not start: {reason}")
        self._desk.stop(self._roster.told, reason)
        self._leave(Ending("failed", -1, EXIT_UNSAVED, why))

    def _train_on(self, repair: Repair) -> None:
        """Every rank computes the step after S, or that of a checkpoint, again. What is known of this incident says
        nothing about the next."""
        desk, plan, tries = self._desk, repair.plan, repair.number
        lost = count(max(0, self._furthest - plan.step), "completed step")
        again = f" at the {tries}. try" if tries > 1 else ""
        rewound = isinstance(plan, RewindPlan)
        how = f"Rewound online to the checkpoint of step {plan.step}" if rewound else "Repaired online"
        why = f"It was loaded because {plan.why}. " if isinstance(plan, RewindPlan) else ""
        self._summary = (
            f"{how}{again}: {desk.incident.what_happened()}. {why}"
            f"{describe(self._replaced())}Training goes on after step {plan.step}; {lost} lost"
            f"{'' if self._replaced() else ', no process was started again'}."
        )
        desk.note(self._summary)
        desk.enter("train")
        outcome = "rebooted" if self._replaced() else "rewound" if rewound else "retried"
        self._past = (desk.incident, {**self.incident(), "outcome": outcome, "state": State.TRAINING.value})
        desk.put(Recovered(outcome, plan.step, tries, self._summary, repair.epoch))
        desk.void()
        assert self._repairs is not None
        self._repairs.over()
        if self._reboots is not None:
            self._reboots.over()
        if rewound:  # the steps after it are told as lost now, and not once more
            self._furthest = plan.step
        desk.incident = Incident()
        desk.doubt = ""
        desk.enter("train")
        self._repair, self._summary, self._number = None, "", self._number + 1
        self._reports.clear()
        self._silent.clear()
        self._awaited = set()
        self._state = State.TRAINING
        self._watch.begin()
        self._close_when_finished()

    def _replaced(self) -> list[Replaced]:
        return [one for _, one in sorted(self._reboots.replaced.items())] if self._reboots is not None else []

    # ------------------------------------------------------------------------------------------------ hangs

    def _tick_training(self) -> None:
        found = self._watch.look()
        if isinstance(found, Deadlock):
            self._stop_for_link(found.message)
        elif found:
            self._stop("; ".join(str(fault) for fault in self._end(found)))

    def _stop_for_link(self, why: str) -> None:
        """No rank is to blame, but communication does not work."""
        fault = Fault(self._desk.at, NOBODY, "link", why, own=False)
        self._book_fault(fault, None)
        self._desk.note(str(fault), warn=True)
        self._stop(str(fault))

    def _end(self, hangs: list[Hang]) -> list[Fault]:
        """Processes that do not move any more are ended. Their end is seen like any other, and has a cause already."""
        faults = [Fault(self._desk.at, hang.rank, "hang", hang.message, own=True) for hang in hangs]
        for hang, fault in zip(hangs, faults, strict=True):
            self._book_fault(fault, None)
            self._desk.note(f"{fault}. Its process {hang.pid} is killed", warn=True)
            self._desk.put(Kill(hang.rank, hang.pid))
        return faults

    def _tick_stopping(self) -> None:
        """Reports are awaited. Who sends none in time is ended, where another process can take the place of his."""
        now, inquest = self._desk.now, self._inquest
        if inquest is not None and inquest.reasons and inquest.over:
            if victims := [hang for hang in inquest.victims() if hang.rank in self._awaited]:
                self._end(victims)
                self._deadline = now + self._deadlines.heartbeat_lost
            else:
                self._deadline = now
            inquest.reasons.clear()
        if now < self._deadline:
            return
        if inquest is None and self._may_end_silent():
            why = f"did not report within {self._deadlines.stop:g} s of the stop"
            reasons = dict.fromkeys(self._awaited, why)
            self._desk.note(f"{ranks(reasons)} {why}: looked at", warn=True)
            self._inquest = Inquest(self._desk, self._roster, reasons, self._deadlines.heartbeat_lost)
            self._deadline = now + 2 * self._deadlines.heartbeat_lost
        else:
            self._decide()

    def _may_end_silent(self) -> bool:
        return (
            self._deadlines.hang > 0
            and self._reboots is not None
            and bool(self._awaited)
            and self._reboots.worth(self._reports, self._awaited)
        )

    # ------------------------------------------------------------------------------------------------ reports

    def _on_reported(self, event: Reported) -> None:
        report = event.report
        rank = report.rank
        self._holds.left(rank)
        if rank in self._roster.newcomers and (welcoming := self._welcoming) is not None:
            welcoming.heard(report)
            self._go_on_when_complete()
            return
        if rank not in self._roster.infos or rank in self._roster.newcomers or rank in self._roster.finished:
            return
        if self._state in (State.EXITING, State.CLOSED) or self._stale(report):
            return
        if rank in self._reports:
            self._compare(self._reports[rank], report)
            return
        self._reports[rank] = report
        self._furthest = max(self._furthest, completed(report) if report.trusted else 0)
        if report.fault and not self._desk.incident.blames(rank):
            self._book_fault(Fault(self._desk.at, rank, "stopped", report.fault, own=True), None)
        if self._state is State.STARTING:
            self._abandon_start(f"rank {rank} stopped: {report.fault or 'no reason given'}")
        elif self._state is State.TRAINING:
            if self._desk.epoch:  # it was told to an engine before this one, whose orders may have changed it since
                del self._reports[rank]
            self._stop(f"rank {rank} stopped: {report.fault or 'no reason given'}")
        elif self._flow is None:
            self._awaited.discard(rank)
            self._decide_when_heard()
        elif self._silent.pop(rank, None):
            self._desk.note(f"rank {rank} reported late: it can take part in the next attempt")

    def _stale(self, report: RankReport) -> bool:
        """It answers an older stop, and the rank has been ordered to change since then, or will answer once more.

        Ranks that stop by themselves may report before they hear of the first stop. After a repair, what they say
        cannot be told from a late word about the last incident: they say what happened with an event, too.
        """
        if self._state is State.TRAINING:
            return self._past is not None
        first = self._first and self._desk.epoch == 1
        return report.epoch != self._desk.epoch and not (first and report.epoch == 0)

    def _compare(self, old: RankReport, new: RankReport) -> None:
        """A second report. Word for word the same, or explained by an order, it says nothing new."""
        if not new.trusted:
            self._distrust(new.rank, f"says that its memory may be damaged: {new.fault}")
        elif self._flow is None and any(getattr(old, name) != getattr(new, name) for name in _STATE_BEARING):
            self._distrust(new.rank, f"reported twice, and differently: step {old.step}, then step {new.step}")

    def _decide_when_heard(self) -> None:
        if not self._awaited and self._flow is None and self._waiting is None:
            self._decide()

    # ------------------------------------------------------------------------------------------------ decisions

    def _decide(self) -> None:
        late = f"did not report within {self._deadlines.stop:g} s of the stop"
        self._silent.update(dict.fromkeys(self._awaited, late))
        self._awaited = set()
        self._choose()

    def _choose(self) -> None:
        """What follows, with all that is known now."""
        if self._repairs is None:
            self._save()
        elif self._reboots is not None and self._reboots.needed():
            self._desk.enter("reboot")
            self._wait(self._reboots)
        else:
            self._repair_or_save(self._repairs)

    def _wait(self, reboots: Reboots) -> None:
        """For newcomers, who may be here already."""
        if why := reboots.begin(self._reports):
            self._give_up(why)
        else:
            self._go_on_when_complete()

    def _go_on_when_complete(self) -> None:
        """All newcomers are ready: with them, everybody is here."""
        if (waiting := self._waiting) is not None and waiting.complete:
            waiting.adopt(self._reports)
            assert self._repairs is not None
            self._repair_or_save(self._repairs)

    def _tick_waiting(self, waiting: Reboots) -> None:
        if waiting.stale:
            self._wait(waiting)
        elif late := waiting.late():
            self._give_up(late)

    def _repair_or_save(self, repairs: Repairs) -> None:
        self._desk.enter("decide")
        found = repairs.attempt(self._reports, self._silent)
        if isinstance(found, str):
            self._give_up(found)
            return
        self._repair = found
        found.begin()

    def _give_up(self, why: str) -> None:
        """Training does not go on: what can be saved is saved."""
        self._desk.incident.verdict = why
        self._desk.note(f"no repair, a dump instead: {why}", warn=True)
        self._save()

    def _save(self) -> None:
        departed = self._repairs.evidence if self._repairs is not None else ()
        self._dump = self._dumps(
            self._desk, self._roster, self._deadlines, self._reports, self._silent, self._directory, departed
        )
        spoiled = next((f for f in self._desk.incident.faults if f.own and f.kind in SPOILING), None)
        if spoiled is not None:
            self._dump.refuse(f"the numbers of all ranks may be wrong since ({spoiled})")
        else:
            self._dump.begin()

    def _on_order_done(self, event: OrderDone) -> None:
        order = self._desk.take(event)
        if order is None or self._state is State.CLOSED:
            return
        if order.kind is OrderKind.EXIT:
            self._left(order.rank)
        elif order.kind in OF_HELD:
            self._holds.done(order, event)
        elif (flow := self._flow) is not None:
            if order.kind is OrderKind.RESUME:
                self._desk.incident.resumed(order.rank)
            flow.done(order, event)

    # ------------------------------------------------------------------------------------------------ the end

    def _close_when_finished(self) -> bool:
        """The ordinary end: every rank finished, and nobody was stopped."""
        world_size = self._roster.world_size
        if len(self._roster.finished) < world_size or self._state not in (State.STARTING, State.TRAINING):
            return False
        self._desk.note("every rank finished training")
        self._ending = Ending("finished", -1, 0)
        self._summary = f"Training ended on {count(world_size, 'rank')}."
        self._close()
        return True

    def _leave(self, ending: Ending | None) -> None:
        """Everybody exits with the same words. A second ending corrects the words that are said at the close."""
        first = self._ending is None
        self._ending = ending
        if ending is None:
            return
        self._summary = self._desk.incident.summary(ending, self._furthest)
        if not first:
            return
        self._state = State.EXITING
        self._holds.ended(self._summary)
        self._desk.enter("exit")
        self._deadline = self._desk.now + self._deadlines.exit
        self._desk.note(f"exit {ending.code}: {self._summary}")
        self._awaited = set(self._roster.told)
        for rank in self._roster.told:
            self._order_exit(rank)
        self._close_when_left()

    def _order_exit(self, rank: int) -> None:
        assert self._ending is not None
        payload: Payload = {"code": self._ending.code, "summary": self._summary}
        self._exits[rank] = self._desk.issue(rank, OrderKind.EXIT, payload)

    def _absent(self) -> str:
        unknown = self._roster.missing() if not self._roster.accounted else []
        return ranks(self._awaited.union(unknown))

    def _close_when_left(self) -> None:
        if not self._awaited and self._roster.accounted:
            self._close()

    def _close(self) -> None:
        assert self._ending is not None
        self._state = State.CLOSED
        self._holds.ended(self._summary)
        self._desk.enter("closed")
        self._desk.note(f"closed: {self._ending.outcome}")
        self._desk.put(Closed(self._ending.outcome, self._ending.step, self._summary))
