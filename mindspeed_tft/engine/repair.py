"""Online repair: no process dies, all ranks are brought to the state of S and compute the step after it again. Where no
rank has that state any more, or nobody can vouch for it: to the state of the last good checkpoint (a rewind).

Stages: finish updates -> regroup -> repair damaged ranks from holders -> roll back -> resume. Of a rewind: regroup ->
give damaged ranks what no checkpoint holds -> load the checkpoint -> resume. Each is one order to each rank concerned,
with one deadline for all. A fault on the way ends the try: its caller stops everybody once more, and what to do next is
decided from new reports, because only they tell what each rank has become. `Repairs` counts the tries, so that a step
that breaks again and again is given up. What happens before and after is `stops`' affair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from enum import Enum

from mindspeed_tft.engine.agreement import Agreement, agree, digests_of, revise
from mindspeed_tft.engine.desk import Desk, Payload
from mindspeed_tft.engine.incident import Fault
from mindspeed_tft.engine.planning import (
    NEWEST,
    NoPlan,
    RepairPlan,
    RewindPlan,
    contradiction,
    loadable,
    plan_repair,
    plan_unowned,
    unspoiled,
)
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.types import Commit, Deadlines, Order, OrderDone, OrderKind, RankReport, Update
from mindspeed_tft.engine.words import count, ranks, some

MAX_TRIES = 3  # with the same signature
MAX_TRIES_AT_STEP = 10  # whatever the signatures: a step that breaks in ever new ways is given up, too

REPAIRABLE = frozenset({"memory", "link"})  # kinds of faults that leave the process able to go on
NOTICED = REPAIRABLE | {"peer", "communication"}  # what ranks may say of others; with all alive, a broken link
SPOILING = frozenset({"corrupted", "precision"})  # an update may have spread wrong numbers to every rank: rewound
DAMAGING = frozenset({"memory", "corrupted"})  # the rank's own tensors may be damaged
DIGEST = "digest:"  # before the id of a shard, in the result of an order
LOADED = "loaded"  # in the result of a LOAD of the NEWEST checkpoint: its step
INTACT = "intact"  # in the result of a REGROUP: why a rank that was taken for damaged needs nothing, as it now knows
MOVED = "moved:"  # before a transfer, in the result of a REPAIR; its value: "bytes seconds", as this rank saw it
WRONG_SHARDS = "wrong shards, never a source: "  # how a note begins that names whose memory is not what it was

Signature = tuple[int, tuple[tuple[str, int], ...]]  # S, and who is broken in which way


class Stage(str, Enum):
    """Where a repair stands. The values are the stage names of the incident."""

    DECIDE = "decide"
    FINISH = "finish"
    REGROUP = "regroup"
    REPAIR = "repair"
    ROLLBACK = "rollback"
    LOAD = "load"
    RESUME = "resume"
    DONE = "done"


def unrepairable(faults: Iterable[Fault], roster: Roster, reports: Collection[int], silent: Collection[int]) -> str:
    """Why these faults need more than a repair or a rewind; "" when all ranks are there and all kinds are known."""
    gone = roster.lost.keys()
    if gone:
        return f"{ranks(gone)} {'was' if len(gone) == 1 else 'were'} lost"
    if roster.finished:
        return f"{ranks(roster.finished)} finished training"
    if mute := {*silent} | {rank for rank in roster.infos if rank not in reports}:
        return f"{ranks(mute)} did not report"
    for fault in faults:
        if fault.kind not in (REPAIRABLE | SPOILING if fault.own else NOTICED):
            return f"a fault of kind {fault.kind!r} cannot be repaired ({fault})"
    return ""


def finished(report: RankReport, event: OrderDone) -> RankReport:
    """What a rank would report now that it has finished its update."""
    digests = {key.removeprefix(DIGEST): value for key, value in event.result.items() if key.startswith(DIGEST)}
    rng_end = event.result.get("rng_end", report.rng_end)
    return replace(
        report, commit=Commit.PASSED, update=Update.DONE, rng_end=rng_end, digests=digests, stamps=dict(digests)
    )


def note_corrupt(desk: Desk, agreement: Agreement) -> None:
    """Say loudly whose memory is not what it was: nobody else will."""
    if agreement.corrupt:
        told = some((f"rank {rank}: {agreement.offers[rank].reason}" for rank in agreement.corrupt), separator="; ")
        desk.note(f"{WRONG_SHARDS}{told}", warn=True)


class Repair:
    """One try. `failure` is set when it cannot succeed any more; the stage is `DONE` when everybody trains again."""

    def __init__(
        self,
        desk: Desk,
        roster: Roster,
        deadlines: Deadlines,
        reports: dict[int, RankReport],
        agreement: Agreement,
        plan: RepairPlan | RewindPlan,
        number: int,
        until: float,
        half_loaded: bool = False,
        newcomers: Collection[int] = (),
        departed: Collection[RankReport] = (),
    ) -> None:
        """`reports` are shared with the caller; `until` is the end of all tries of this incident; `half_loaded`: an
        earlier try left some ranks with a checkpoint that others have not loaded; `newcomers`: ranks that became
        another process in this incident; `departed`: what their predecessors said."""
        self.stage = Stage.DECIDE
        self.failure = ""
        self.agreement, self.plan, self.number = agreement, plan, number
        self.epoch = desk.epoch
        self.failed: set[int] = set()  # ranks whose orders failed or were not answered in time
        self.half_loaded = half_loaded
        self.loading = False  # a load was ordered
        self._desk, self._roster, self._deadlines = desk, roster, deadlines
        self._reports, self._until, self._departed = reports, until, departed
        self._newcomers = [str(rank) for rank in sorted(newcomers)]
        self._pending: dict[int, Order] = {}
        self._end_of_stage = 0.0

    # ------------------------------------------------------------------------------------------------ going on

    def begin(self) -> None:
        self._run(Stage.FINISH, OrderKind.FINISH_UPDATE, self.plan.finish, {})

    def _advance(self) -> None:
        """All orders of the stage are answered."""
        plan, everybody = self.plan, sorted(self._roster.alive)
        if self.stage is Stage.FINISH:
            if why := self._apart():
                self.fail(why)
                return
            joined: Payload = {"newcomers": self._newcomers} if self._newcomers else {}
            self._run(Stage.REGROUP, OrderKind.REGROUP, everybody, {**self._desk.link_payload(), **joined})
        elif self.stage is Stage.REGROUP:
            transfers = [str(transfer) for transfer in plan.transfers]
            self._run(Stage.REPAIR, OrderKind.REPAIR, plan.busy, {"transfers": transfers, **self._digests()})
        elif self.stage is Stage.REPAIR and isinstance(plan, RewindPlan):
            self.loading = self.half_loaded = True
            self._run(Stage.LOAD, OrderKind.LOAD, everybody, {"newcomers": self._newcomers})
        elif self.stage is Stage.REPAIR:
            self._trust_again()
            self._run(Stage.ROLLBACK, OrderKind.ROLLBACK, everybody, {"newcomers": self._newcomers})
        elif self.stage in (Stage.ROLLBACK, Stage.LOAD):
            self.half_loaded = False
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

    def _apart(self) -> str:
        """Why the hashes that are known since updates were finished call for another plan; "" when they do not."""
        if not self.plan.finish:
            return ""
        infos = self._roster.infos
        now = revise(self.agreement, self._reports, infos, start=True, departed=self._departed)
        fallen = [rank for rank in sorted(infos) if self.agreement.offers[rank] and not now.offers[rank]]
        return some((f"rank {rank}: {now.offers[rank].reason}" for rank in fallen), limit=1)

    def _digests(self) -> Payload:
        """Of the shards that are given away."""
        now = revise(self.agreement, self._reports, self._roster.infos, start=True, departed=self._departed)
        known = {} if isinstance(self.plan, RewindPlan) else digests_of(now, self._reports)
        moved = {transfer.shard for transfer in self.plan.transfers}
        found = {shard: digest for shard, digest in sorted(known.items()) if shard in moved}
        return {"digests": found} if found else {}

    def _trust_again(self) -> None:
        for rank in self.plan.damaged:
            report = self._reports[rank]
            whole = replace(
                report,
                step=self.plan.step,
                commit=Commit.PASSED,
                update=Update.DONE,
                trusted=True,
                digests={},
                stamps={},
            )
            self._reports[rank] = whole

    # ------------------------------------------------------------------------------------------------ what happens

    def done(self, order: Order, event: OrderDone) -> None:
        """A rank answered an order of this try."""
        if self._pending.pop(order.id, None) is None:
            return
        if not event.ok:
            self.failed.add(order.rank)
            if order.kind is OrderKind.REPAIR:  # perhaps by what it was given: another source is tried first
                self.failed |= {transfer.source for transfer in self.plan.transfers if transfer.target == order.rank}
            self.fail(f"rank {order.rank} could not {order.kind.value}: {event.message or 'no reason'}")
            return
        if order.kind is OrderKind.FINISH_UPDATE:
            self._reports[order.rank] = finished(self._reports[order.rank], event)
        if LOADED in event.result and isinstance(self.plan, RewindPlan) and not self._found(order.rank, event):
            return
        if INTACT in event.result and isinstance(self.plan, RepairPlan):
            self._desk.note(f"rank {order.rank} is intact: {event.result[INTACT]}")
            self.plan = self.plan.without(order.rank)
        if not self._pending:
            self._advance()

    def _found(self, rank: int, event: OrderDone) -> bool:
        """A rank says which checkpoint it has loaded. False: it may not, and this try is over."""
        plan, step = self.plan, int(event.result[LOADED])
        assert isinstance(plan, RewindPlan)
        most = plan.safe if plan.spoiled else plan.last
        if plan.step not in (NEWEST, step):
            self.fail(f"rank {rank} loaded the checkpoint of step {step}, and others that of step {plan.step}")
        elif not 0 < step <= most:
            why = f", where no later one than that of step {most} can be right" if plan.spoiled else ""
            self.fail(f"rank {rank} loaded the checkpoint of step {step}{why}")
        else:
            self.plan = replace(plan, step=step)
        return not self.failure

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
        rewind = isinstance(self.plan, RewindPlan)
        return {
            "number": self.number,
            "step": self.plan.step,
            "rewind": self.plan.describe() if rewind else "",
            "epoch": self.epoch,
            "failure": self.failure,
            "finish": list(self.plan.finish),
            "damaged": {str(rank): self.agreement.offers[rank].reason for rank in self.plan.damaged},
            "transfers": [str(transfer) for transfer in self.plan.transfers],
        }


class Repairs:
    """The repairs and rewinds of one job: whether one is possible, and how often the same was tried."""

    def __init__(self, desk: Desk, roster: Roster, deadlines: Deadlines) -> None:
        self._desk, self._roster, self._deadlines = desk, roster, deadlines
        self.tries: list[Repair] = []  # of this incident
        self.newcomers: set[int] = set()  # ranks that became another process in this incident
        self.departed: list[RankReport] = []  # what their predecessors said
        self._until: float | None = None  # the end of all tries of this incident
        self._count: dict[Signature, int] = {}
        self._used: dict[Signature, set[int]] = {}  # checkpoints that were loaded because numbers may be wrong

    def attempt(self, reports: dict[int, RankReport], silent: dict[int, str]) -> Repair | str:
        """The next try; or why there is none."""
        desk, infos = self._desk, self._roster.infos
        if why := unrepairable(desk.incident.current(), self._roster, reports, silent):
            return why
        if self._until is None:
            self._until = desk.now + self._deadlines.dump
        elif desk.now >= self._until:
            return f"it did not end within {self._deadlines.dump:g} s ({self._last_failure()})"
        agreement = agree(reports, infos, start=True, departed=self.evidence)
        plan = self._plan(reports, agreement, self.newcomers)
        if isinstance(plan, NoPlan):
            return plan.reason
        if why := self._given_up(plan.last):
            return why
        number = len(self.tries) + 1
        if agreement.step != plan.last:  # a load was broken off
            agreement = replace(
                agreement, step=plan.last, reason="as it was when the first checkpoint was to be loaded"
            )
        desk.note(f"S = {plan.last}: {agreement.reason}")
        note_corrupt(desk, agreement)
        desk.note(f"{'rewind' if isinstance(plan, RewindPlan) else 'repair'}, try {number}: {plan.describe()}")
        found = Repair(
            desk,
            self._roster,
            self._deadlines,
            reports,
            agreement,
            plan,
            number,
            self._until,
            self._half_loaded,
            self.newcomers,
            self.evidence,
        )
        self.tries.append(found)
        return found

    # ------------------------------------------------------------------------------------------------ newcomers

    def outlook(
        self, reports: dict[int, RankReport], departing: Collection[RankReport], newcomers: Collection[int]
    ) -> RepairPlan | RewindPlan | NoPlan:
        """What would be done if newcomers stood for these ranks already. Nothing is counted."""
        agreement = agree(
            reports, self._roster.infos, start=True, departed=[*self.evidence, *(() if self._loaded else departing)]
        )
        plan = self._plan(reports, agreement, {*self.newcomers, *newcomers})
        if not isinstance(plan, NoPlan) and (why := self._exhausted(plan.last)):
            return NoPlan(why)
        return plan

    def joined(self, newcomers: Collection[int]) -> None:
        """These ranks are another process now. The time that they took is not that of the repair."""
        self.newcomers |= {*newcomers}
        self._until = None

    @property
    def evidence(self) -> list[RankReport]:
        """What replaced processes said of completed steps; nothing, once a checkpoint of an earlier one was loaded."""
        return [] if self._loaded else self.departed

    @property
    def _loaded(self) -> bool:
        return any(earlier.loading for earlier in self.tries)

    # ------------------------------------------------------------------------------------------------ which way

    def _plan(
        self, reports: dict[int, RankReport], agreement: Agreement, newcomers: Collection[int]
    ) -> RepairPlan | RewindPlan | NoPlan:
        """A repair where every shard of S is left somewhere and can be believed; else a rewind."""
        spoiling = next((fault for fault in self._desk.incident.faults if fault.own and fault.kind in SPOILING), None)
        if spoiling is not None:
            if not self._half_loaded and (why := contradiction(agreement)):
                return NoPlan(why)
            return self._rewind(
                reports, agreement, newcomers, f"the numbers of all ranks may be wrong since ({spoiling})", True
            )
        if self._half_loaded:
            return self._rewind(reports, agreement, newcomers, "the load of a checkpoint was broken off", False)
        plan = plan_repair(self._roster.infos, agreement, self._blamed(), self._avoid(), newcomers)
        if isinstance(plan, RepairPlan) or not (plan.missing or self._before_load()):
            return plan
        return self._rewind(reports, agreement, newcomers, plan.reason, False)

    def _rewind(
        self,
        reports: dict[int, RankReport],
        agreement: Agreement,
        newcomers: Collection[int],
        why: str,
        spoiled: bool,
    ) -> RewindPlan | NoPlan:
        """Back to the newest checkpoint that is good and that every rank could load.

        Newcomers know of no checkpoint: they find the one that is named to them.
        """
        known = {rank: report for rank, report in reports.items() if rank not in newcomers}
        last, safe = self._limits(known, agreement)
        if newcomers and self._before_load() is None:  # nobody knows which update was the last that began there
            safe = min(safe, last - 2)
        if last < 0:
            return NoPlan(f"{why}; {agreement.reason}, so that no checkpoint is known to be good")
        steps = loadable(known.values(), safe if spoiled else last)
        if not steps and spoiled:
            return NoPlan(
                f"{why}, and no checkpoint that could be loaded online is known good (of step {safe} or before)"
            )
        if not steps:
            return NoPlan(f"{why}, and no checkpoint that could be loaded online")
        used = self._used.get(self._signature(last), set()) if spoiled else set()
        step = max((step for step in steps if step not in used), default=steps[0])
        wounded = tuple(sorted({*self._wounded(reports), *newcomers}))
        transfers = plan_unowned(self._roster.infos, wounded, self._blamed(), self._avoid())
        if isinstance(transfers, NoPlan):
            return NoPlan(f"{why}, and {transfers.reason}")
        return RewindPlan(step, last, safe, spoiled, why, wounded, transfers)

    def _limits(self, reports: dict[int, RankReport], agreement: Agreement) -> tuple[int, int]:
        """S, and the newest step whose checkpoint is good even if numbers are wrong.

        Who has loaded a checkpoint, or was interrupted while it did, cannot tell any more: then both are as they were
        before. Unless training went on from the checkpoint already, and the last word of that was late.
        """
        before = self._before_load()
        if before is None:
            return agreement.step, unspoiled(reports.values(), agreement.step)
        if self._half_loaded or agreement.step <= before.step:
            return before.last, before.safe
        return agreement.step, min(before.safe, unspoiled(reports.values(), agreement.step))

    def _before_load(self) -> RewindPlan | None:
        """The plan of the last try of this incident that came to the load of a checkpoint."""
        plans = (earlier.plan for earlier in reversed(self.tries) if earlier.loading)
        return next((plan for plan in plans if isinstance(plan, RewindPlan)), None)

    @property
    def _half_loaded(self) -> bool:
        return bool(self.tries) and self.tries[-1].half_loaded

    def _wounded(self, reports: dict[int, RankReport]) -> tuple[int, ...]:
        """Ranks whose tensors outside of any checkpoint may be damaged.

        While it loads, every rank distrusts itself. That does not concern these tensors.
        """
        faults = self._desk.incident.faults
        hit = {fault.rank for fault in faults if fault.own and fault.kind in DAMAGING}
        distrusted = {rank for rank, report in reports.items() if not report.trusted}
        if self._half_loaded:
            distrusted &= {rank for earlier in self.tries for rank in earlier.plan.damaged}
        return tuple(sorted(distrusted | hit))  # a memory may have failed after its rank reported

    def _blamed(self) -> set[int]:
        """Ranks with a fault of their own: used as a source where nobody else can be."""
        return {fault.rank for fault in self._desk.incident.faults if fault.own}

    def _avoid(self) -> dict[int, int]:
        """Ranks whose orders failed in this incident, and how often."""
        found: dict[int, int] = {}
        for earlier in self.tries:
            for rank in earlier.failed:
                found[rank] = found.get(rank, 0) + 1
        return found

    # ------------------------------------------------------------------------------------------------ how often

    def _signature(self, last: int) -> Signature:
        own = {(fault.kind, fault.rank) for fault in self._desk.incident.faults if fault.own}
        return last, tuple(sorted(own))

    def _given_up(self, step: int) -> str:
        """Counts one more try of these faults after this step, S; says why there must be none."""
        if why := self._exhausted(step):
            return why
        signature = self._signature(step)
        self._count[signature] = self._count.get(signature, 0) + 1
        return ""

    def _exhausted(self, step: int) -> str:
        """Why these faults after this step must not be tried once more; "" while they may."""
        self.heard(step + 1)
        signature = self._signature(step)
        before = self._count.get(signature, 0)
        at_step = sum(number for (other, _), number in self._count.items() if other == step)
        if before >= MAX_TRIES or at_step >= MAX_TRIES_AT_STEP:
            who = some(f"{kind} of rank {rank}" for kind, rank in signature[1]) or "a broken link"
            times = count(before, "repair") if before >= MAX_TRIES else count(at_step, "repair")
            return f"{times} after step {step} did not help ({who}): {self._last_failure()}"
        return ""

    def _last_failure(self) -> str:
        return self.tries[-1].failure if self.tries else "each time the fault came again"

    def heard(self, step: int) -> None:
        """Some rank computes `step`: what was tried two steps before it has helped."""
        if self._count and any(tried + 2 <= step for tried, _ in self._count):
            self._count = {key: number for key, number in self._count.items() if key[0] + 2 > step}
            self._used = {key: steps for key, steps in self._used.items() if key[0] + 2 > step}

    def over(self) -> None:
        """Training goes on: the next incident has its own tries and its own time."""
        plan = self.tries[-1].plan
        if isinstance(plan, RewindPlan) and plan.spoiled:
            self._used.setdefault(self._signature(plan.last), set()).add(plan.step)
        self.tries, self._until = [], None
        self.newcomers, self.departed = set(), []
