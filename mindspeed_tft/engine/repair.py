"""Online repair: no process dies, all ranks are brought to the state of S and compute the step after it again.

Stages: finish updates -> regroup -> repair damaged ranks from holders -> roll back -> resume. Each is one order to each
rank concerned, with one deadline for all. A fault on the way ends the try: its caller stops everybody once more, and
what to do next is decided from new reports, because only they tell what each rank has become. `Repairs` counts the
tries, so that a step that breaks again and again is given up. What happens before and after is `machine`'s affair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from enum import Enum

from mindspeed_tft.engine.agreement import Agreement, agree
from mindspeed_tft.engine.desk import Desk, Payload
from mindspeed_tft.engine.incident import Fault
from mindspeed_tft.engine.planning import NoPlan, RepairPlan, plan_repair
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.types import Commit, Deadlines, Order, OrderDone, OrderKind, RankReport, Update
from mindspeed_tft.engine.words import count, ranks, some

MAX_TRIES = 3  # with the same signature
MAX_TRIES_AT_STEP = 10  # whatever the signatures: a step that breaks in ever new ways is given up, too

REPAIRABLE = frozenset({"memory", "link"})  # kinds of faults that leave the process able to go on
NOTICED = REPAIRABLE | {"peer", "communication"}  # what ranks may say of others; with all alive, a broken link

Signature = tuple[int, tuple[tuple[str, int], ...]]  # S, and who is broken in which way


class Stage(str, Enum):
    """Where a repair stands. The values are the stage names of the incident."""

    DECIDE = "decide"
    FINISH = "finish"
    REGROUP = "regroup"
    REPAIR = "repair"
    ROLLBACK = "rollback"
    RESUME = "resume"
    DONE = "done"


def unrepairable(faults: Iterable[Fault], roster: Roster, reports: Collection[int], silent: Collection[int]) -> str:
    """Why these faults need more than a repair; "" when all ranks are there and every fault is of a known kind."""
    gone = roster.lost.keys() | roster.newcomers.keys()
    if gone:
        return f"{ranks(gone)} {'was' if len(gone) == 1 else 'were'} lost"
    if roster.finished:
        return f"{ranks(roster.finished)} finished training"
    if mute := {*silent} | {rank for rank in roster.infos if rank not in reports}:
        return f"{ranks(mute)} did not report"
    for fault in faults:
        if fault.kind not in (REPAIRABLE if fault.own else NOTICED):
            return f"a fault of kind {fault.kind!r} cannot be repaired ({fault})"
    return ""


class Repair:
    """One try. `failure` is set when it cannot succeed any more; the stage is `DONE` when everybody trains again."""

    def __init__(
        self,
        desk: Desk,
        roster: Roster,
        deadlines: Deadlines,
        reports: dict[int, RankReport],
        agreement: Agreement,
        plan: RepairPlan,
        number: int,
        until: float,
    ) -> None:
        """`reports` are shared with the caller; `until` is the end of all tries of this incident."""
        self.stage = Stage.DECIDE
        self.failure = ""
        self.agreement, self.plan, self.number = agreement, plan, number
        self.epoch = desk.epoch
        self.failed: set[int] = set()  # ranks whose orders failed or were not answered in time
        self._desk, self._roster, self._deadlines = desk, roster, deadlines
        self._reports, self._until = reports, until
        self._pending: dict[int, Order] = {}
        self._end_of_stage = 0.0

    # ------------------------------------------------------------------------------------------------ going on

    def begin(self) -> None:
        self._run(Stage.FINISH, OrderKind.FINISH_UPDATE, self.plan.finish, {})

    def _advance(self) -> None:
        """All orders of the stage are answered."""
        plan, everybody = self.plan, sorted(self._roster.alive)
        if self.stage is Stage.FINISH:
            self._run(Stage.REGROUP, OrderKind.REGROUP, everybody, {})
        elif self.stage is Stage.REGROUP:
            transfers = [str(transfer) for transfer in plan.transfers]
            self._run(Stage.REPAIR, OrderKind.REPAIR, plan.busy, {"transfers": transfers})
        elif self.stage is Stage.REPAIR:
            self._trust_again()
            self._run(Stage.ROLLBACK, OrderKind.ROLLBACK, everybody, {})
        elif self.stage is Stage.ROLLBACK:
            self._run(Stage.RESUME, OrderKind.RESUME, everybody, {})
        elif self.stage is Stage.RESUME:
            self.stage = Stage.DONE

    def _run(self, stage: Stage, kind: OrderKind, to: Collection[int], payload: Payload) -> None:
        """Begin a stage: the same order to each of these ranks. A stage without orders is over at once.

        Each order names the stop it belongs to: who has heard of a later one must not carry it out any more.
        """
        self.stage = stage
        if not to:
            self._advance()
            return
        self._desk.enter(stage.value)
        self._desk.note(f"{kind.value} to {ranks(to)}")
        self._end_of_stage = min(self._desk.now + self._deadlines.order, self._until)
        for rank in to:
            order = self._desk.issue(rank, kind, {"step": self.plan.step, "epoch": self.epoch, **payload})
            self._pending[order.id] = order

    def _trust_again(self) -> None:
        for rank in self.plan.damaged:
            report = self._reports[rank]
            whole = replace(report, step=self.plan.step, commit=Commit.PASSED, update=Update.DONE, trusted=True)
            self._reports[rank] = whole

    # ------------------------------------------------------------------------------------------------ what happens

    def done(self, order: Order, event: OrderDone) -> None:
        """A rank answered an order of this try."""
        if self._pending.pop(order.id, None) is None:
            return
        if not event.ok:
            self.failed.add(order.rank)
            self.fail(f"rank {order.rank} could not {order.kind.value}: {event.message or 'no reason'}")
            return
        if order.kind is OrderKind.FINISH_UPDATE:
            report = self._reports[order.rank]
            self._reports[order.rank] = replace(report, commit=Commit.PASSED, update=Update.DONE)
        if not self._pending:
            self._advance()

    def gone(self, rank: int, why: str) -> None:
        """A rank was lost, or left. Who finishes training was resumed, also when its answer is still on its way."""
        if self.stage is not Stage.RESUME or rank not in self._roster.finished:
            self.fail(f"rank {rank} {why}")
            return
        self._pending = {number: order for number, order in self._pending.items() if order.rank != rank}
        if not self._pending:
            self._advance()

    def distrust(self, rank: int, why: str) -> None:
        self.fail(f"rank {rank} {why}")

    def fail(self, why: str) -> None:
        """This try is over. Its open orders count no more."""
        self.failure = self.failure or why
        self._pending = {}

    def tick(self) -> None:
        """Judge the deadlines."""
        if self._desk.now < self._end_of_stage or not self._pending:
            return
        late = {order.rank for order in self._pending.values()}
        self.failed |= late
        self.fail(f"no answer in time to {self.stage.value} of {ranks(late)}")

    def repeat(self, rank: int) -> None:
        """The rank reconnected: what it was asked may have been lost on the way. The ids are the same."""
        for order in self._pending.values():
            if order.rank == rank:
                self._desk.put(order)

    def as_dict(self) -> dict[str, object]:
        return {
            "number": self.number,
            "step": self.plan.step,
            "epoch": self.epoch,
            "failure": self.failure,
            "finish": list(self.plan.finish),
            "damaged": {str(rank): self.agreement.offers[rank].reason for rank in self.plan.damaged},
            "transfers": [str(transfer) for transfer in self.plan.transfers],
        }


class Repairs:
    """The repairs of one job: whether one is possible, and how often the same was tried."""

    def __init__(self, desk: Desk, roster: Roster, deadlines: Deadlines) -> None:
        self._desk, self._roster, self._deadlines = desk, roster, deadlines
        self.tries: list[Repair] = []  # of this incident
        self._until: float | None = None  # the end of all tries of this incident
        self._count: dict[Signature, int] = {}

    def attempt(self, reports: dict[int, RankReport], silent: dict[int, str]) -> Repair | str:
        """The next try; or why there is none."""
        desk, infos = self._desk, self._roster.infos
        faults = desk.incident.faults
        if why := unrepairable(faults, self._roster, reports, silent):
            return why
        if self._until is None:
            self._until = desk.now + self._deadlines.dump
        elif desk.now >= self._until:
            return f"it did not end within {self._deadlines.dump:g} s ({self._last_failure()})"
        agreement = agree(reports, infos, start=True)
        avoid: dict[int, int] = {}
        for earlier in self.tries:
            for rank in earlier.failed:
                avoid[rank] = avoid.get(rank, 0) + 1
        plan = plan_repair(infos, agreement, {fault.rank for fault in faults if fault.own}, avoid)
        if isinstance(plan, NoPlan):
            return plan.reason
        if why := self._given_up(plan.step):
            return why
        number = len(self.tries) + 1
        desk.note(f"S = {plan.step}: {agreement.reason}")
        desk.note(f"repair, try {number}: {plan.describe()}")
        found = Repair(desk, self._roster, self._deadlines, reports, agreement, plan, number, self._until)
        self.tries.append(found)
        return found

    def _given_up(self, step: int) -> str:
        """Counts one more try of these faults at this step; says why there must be none."""
        self.heard(step + 1)
        own = {(fault.kind, fault.rank) for fault in self._desk.incident.faults if fault.own}
        signature = (step, tuple(sorted(own)))
        before = self._count.get(signature, 0)
        at_step = sum(number for (other, _), number in self._count.items() if other == step)
        if before >= MAX_TRIES or at_step >= MAX_TRIES_AT_STEP:
            who = some(f"{kind} of rank {rank}" for kind, rank in signature[1]) or "a broken link"
            times = count(before, "repair") if before >= MAX_TRIES else count(at_step, "repair")
            return f"{times} after step {step} did not help ({who}): {self._last_failure()}"
        self._count[signature] = before + 1
        return ""

    def _last_failure(self) -> str:
        return self.tries[-1].failure if self.tries else "each time the fault came again"

    def heard(self, step: int) -> None:
        """Some rank computes `step`: what was tried two steps before it has helped."""
        if self._count and any(tried + 2 <= step for tried, _ in self._count):
            self._count = {key: number for key, number in self._count.items() if key[0] + 2 > step}

    def over(self) -> None:
        """Training goes on: the next incident has its own tries and its own time."""
        self.tries, self._until = [], None
