"""The dump: from the reports of stopped ranks to one published checkpoint of the last completed step, or to a reason.

Stages: decide S and a plan -> finish updates -> stage shards -> write parts -> publish. A fault on the way ends the
attempt: what it left is discarded, and the next tick plans again with who is left, so that losses seen together cost
one attempt. At most three attempts, all within the dump's deadline. What happens to the ranks before and after is
`stops`' affair.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from mindspeed_tft.engine.agreement import agree, digests_of, revise
from mindspeed_tft.engine.desk import Desk, Payload
from mindspeed_tft.engine.incident import EXIT_SAVED, EXIT_UNSAVED, Ending
from mindspeed_tft.engine.planning import DumpPlan, NoPlan, plan_dump, rng_apart, rng_conflict
from mindspeed_tft.engine.repair import finished, note_corrupt
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.types import Commit, Deadlines, Order, OrderDone, OrderKind, RankReport, Update
from mindspeed_tft.engine.words import count, ranks, some

MAX_ATTEMPTS = 3
NOBODY_LEFT = "no rank with training state is left"


class Stage(str, Enum):
    """Where a dump stands. The values are the stage names of the incident."""

    DECIDE = "decide"
    FINISH = "finish"
    STAGE = "stage"
    WRITE = "write"
    PUBLISH = "publish"


@dataclass
class Attempt:
    """One try to write the checkpoint, in a directory of its own."""

    number: int
    directory: str
    plan: DumpPlan
    touched: set[int] = field(default_factory=set)  # ranks told to put something into the directory
    publish: Order | None = None
    failure: str = ""
    cleared: bool = False  # published, or told to be discarded

    def as_dict(self) -> dict[str, object]:
        return {
            "number": self.number,
            "directory": self.directory,
            "failure": self.failure,
            "finish": list(self.plan.finish),
            "parts": [asdict(part) for part in self.plan.parts],
        }


class Dump:
    """One dump. `ending` is set when it is over, one way or the other."""

    def __init__(
        self,
        desk: Desk,
        roster: Roster,
        deadlines: Deadlines,
        reports: dict[int, RankReport],
        silent: dict[int, str],
        directory: str,
        departed: Collection[RankReport] = (),
    ) -> None:
        """`reports` and `silent` (ranks that did not report, with the reason) are shared with the caller; `departed`:
        what processes said that were replaced."""
        self.stage = Stage.DECIDE
        self.ending: Ending | None = None
        self.attempts: list[Attempt] = []
        self._desk, self._roster, self._deadlines = desk, roster, deadlines
        self._reports, self._silent, self._directory, self._departed = reports, silent, directory, departed
        self._uncertain: dict[int, str] = {}  # told to finish its update, and nothing heard: any state is possible
        self._failures: dict[int, int] = {}  # rank -> weight of its orders that failed
        self._failing_hosts: set[str] = set()  # lost a rank during this dump
        self._pending: dict[int, Order] = {}
        self._doomed = ""  # why this attempt cannot succeed, while ranks still finish their update
        self._end_of_stage = 0.0
        self._end_of_dump = desk.now + deadlines.dump
        desk.enter(Stage.DECIDE.value)
        self.agreement = agree(reports, roster.infos, departed=departed)

    # ------------------------------------------------------------------------------------------------ deciding

    def begin(self) -> None:
        """State what was agreed, and plan; or end at once."""
        desk, agreement = self._desk, self.agreement
        if self._silent:
            desk.note(f"{ranks(self._silent)} {some(set(self._silent.values()))}: excluded", warn=True)
        if agreement.impossible:
            why = some(f"rank {rank}: {agreement.offers[rank].reason}" for rank in agreement.impossible)
            desk.note(f"impossible reports, never a source: {why}", warn=True)
        if not self._roster.alive:
            self._fail(NOBODY_LEFT)
        elif not agreement.provable:
            self._fail(agreement.reason)
        elif agreement.step == 0:
            self._fail("no step was completed, there is nothing to save")
        else:
            desk.note(f"S = {agreement.step}: {agreement.reason}")
            note_corrupt(desk, agreement)
            self._plan()

    def refuse(self, why: str) -> None:
        """Save nothing: no state of this job can be proved right."""
        self._fail(why)

    def _plan(self) -> None:
        self.agreement = revise(self.agreement, self._reports, self._roster.infos, departed=self._departed)
        plan = plan_dump(self._roster.infos, self._reports, self.agreement, self._excluded(), self._doubts())
        if isinstance(plan, NoPlan):
            self._fail(plan.reason)
            return
        number = len(self.attempts) + 1
        attempt = Attempt(number, f"{self._directory}{plan.step:07d}-{number}", plan)
        self.attempts.append(attempt)
        self._doomed = ""
        self._desk.note(f"attempt {number} of {MAX_ATTEMPTS}: {plan.describe()}")
        self._run(Stage.FINISH, OrderKind.FINISH_UPDATE, {rank: {"step": plan.step} for rank in plan.finish})

    def _excluded(self) -> dict[int, str]:
        roster = self._roster
        gone = {rank: f"lost ({message})" for rank, message in roster.lost.items()}
        return {**self._silent, **self._uncertain, **gone, **dict.fromkeys(roster.finished, "finished training")}

    def _doubts(self) -> dict[int, int]:
        """Ranks to use last: orders failed there, or their host lost a rank just now and may lose more."""
        infos = self._roster.infos
        beside = {rank: 1 for rank in self._roster.alive if infos[rank].host in self._failing_hosts}
        return {**beside, **{rank: 2 * weight for rank, weight in self._failures.items()}}

    # ------------------------------------------------------------------------------------------------ going on

    def _run(self, stage: Stage, kind: OrderKind, payloads: dict[int, Payload]) -> None:
        """Begin a stage: one order each, one deadline for all. A stage without orders is over at once."""
        self.stage = stage
        self._desk.enter(stage.value)
        self._pending = {}
        for rank, payload in sorted(payloads.items()):
            order = self._desk.issue(rank, kind, payload)
            self._pending[order.id] = order
        self._end_of_stage = min(self._desk.now + self._deadlines.order, self._end_of_dump)
        if self._pending:
            self._desk.note(f"{kind.value} to {ranks(payloads)}")
        else:
            self._advance()

    def _advance(self) -> None:
        """All orders of the stage are answered."""
        if self.stage is Stage.FINISH:
            self._after_finish()
        elif self.stage is Stage.STAGE:
            self._write()
        elif self.stage is Stage.WRITE:
            self._publish()

    def _after_finish(self) -> None:
        if self._doomed:
            self._fail_attempt(self._doomed)
            return
        self.agreement = revise(self.agreement, self._reports, self._roster.infos, departed=self._departed)
        excluded = self._excluded()
        able = [rank for rank, offer in self.agreement.offers.items() if offer and rank not in excluded]
        if conflict := rng_conflict(self._roster.infos, self._reports, self.agreement, able):
            self._fail(conflict)  # now that finished ranks know their digest
        elif other := self._wrong_writer(able) or self._fallen():
            self._fail_attempt(other)
        else:
            self._stage_shards()

    def _wrong_writer(self, able: Collection[int]) -> str:
        """Why the plan must change now that digests are known: where they differ, a part's first rank writes."""
        infos, writers = self._roster.infos, self.attempts[-1].plan.writers
        apart = rng_apart(infos, self._reports, self.agreement, able)
        return next((text for part, text in sorted(apart.items()) if infos[writers[part]].dp_rank != 0), "")

    def _fallen(self) -> str:
        """Which rank of the plan cannot show S any more, now that the hashes of finished shards are known."""
        offers = self.agreement.offers
        fallen = [rank for rank in sorted(self.attempts[-1].plan.ranks) if not offers[rank]]
        return some((f"rank {rank}: {offers[rank].reason}" for rank in fallen), limit=1)

    @staticmethod
    def _digests(known: Mapping[str, str], shards: Collection[str]) -> Payload:
        """The right hashes of these shards at S, as far as they are known."""
        found = {shard: known[shard] for shard in sorted(shards) if shard in known}
        return {"digests": found} if found else {}

    def _stage_shards(self) -> None:
        attempt = self.attempts[-1]
        staged = attempt.plan.staged
        known = digests_of(self.agreement, self._reports)  # once for all: it looks at every shard of the job
        attempt.touched |= staged.keys()
        self._run(
            Stage.STAGE,
            OrderKind.STAGE_SHARDS,
            {
                rank: {
                    "step": attempt.plan.step,
                    "directory": attempt.directory,
                    "shards": list(shards),
                    **self._digests(known, shards),
                }
                for rank, shards in staged.items()
            },
        )

    def _write(self) -> None:
        attempt = self.attempts[-1]
        payloads: dict[int, Payload] = {}
        known = digests_of(self.agreement, self._reports)
        for part in attempt.plan.parts:
            sources = {shard: "self" if rank == part.writer else f"rank:{rank}" for shard, rank in part.sources.items()}
            payloads[part.writer] = {
                "step": attempt.plan.step,
                "directory": attempt.directory,
                "part": part.part,
                "sources": sources,
                **self._digests(known, sources),
            }
        attempt.touched |= payloads.keys()
        self._run(Stage.WRITE, OrderKind.WRITE_PART, payloads)

    def _publish(self) -> None:
        attempt = self.attempts[-1]
        writers = [rank for rank in attempt.plan.writers.values() if rank in self._roster.alive]
        if not writers:
            self._fail_attempt("every writer was lost before the checkpoint was published")
            return
        payload: Payload = {
            "step": attempt.plan.step,
            "directory": attempt.directory,
            "parts": list(attempt.plan.writers),
        }
        rank = min(writers)
        self._run(Stage.PUBLISH, OrderKind.PUBLISH, {rank: payload})
        (attempt.publish,) = self._pending.values()

    # ------------------------------------------------------------------------------------------------ what happens

    def done(self, order: Order, event: OrderDone) -> None:
        """A rank answered an order of this dump, in time or late."""
        if order.kind is OrderKind.FINISH_UPDATE:
            self._book_update(order.rank, event)
        elif order.kind is OrderKind.DISCARD and not event.ok:
            self._desk.note(f"rank {order.rank} could not discard {order.payload['directory']}: {event.message}", True)
        if order.kind is OrderKind.PUBLISH and event.ok:
            self._published(event)
        elif self._pending.pop(order.id, None) is None:
            return
        elif not event.ok:
            self._order_failed(order, f"rank {order.rank} could not {order.kind.value}: {event.message or 'no reason'}")
        elif not self._pending:
            self._advance()

    def _book_update(self, rank: int, event: OrderDone) -> None:
        """The report stays what it was, until this order changed the rank."""
        self._uncertain.pop(rank, None)
        report = self._reports[rank]
        if event.ok:
            self._reports[rank] = finished(report, event)
        else:
            self._reports[rank] = replace(report, commit=Commit.PASSED, update=Update.DIRTY)

    def _order_failed(self, order: Order, why: str) -> None:
        self._failures[order.rank] = self._failures.get(order.rank, 0) + 1
        self._spoil(why)

    def _spoil(self, why: str) -> None:
        """This attempt cannot succeed. Updates that run are waited for: only then is it known who can offer S."""
        if self.stage is not Stage.FINISH:
            self._fail_attempt(why)
            return
        self._doomed = self._doomed or why
        if not self._pending:
            self._advance()

    def gone(self, rank: int, why: str) -> None:
        """A rank was lost, or left: the attempt fails if it had something to do that is not done."""
        info = self._roster.infos.get(rank)
        if info is not None and rank in self._roster.lost:
            self._failing_hosts.add(info.host)
        if not self._roster.alive:
            self._fail(NOBODY_LEFT)
        elif self._drop(rank):
            self._spoil(f"rank {rank} {why}")

    def distrust(self, rank: int, why: str) -> None:
        """What this rank gave or gives may be damaged. What is written already was written before anybody knew better:
        a publication goes on."""
        writing = self.stage in (Stage.FINISH, Stage.STAGE, Stage.WRITE)
        if writing and rank in self.attempts[-1].plan.ranks:
            self._drop(rank)
            self._spoil(f"rank {rank} {why}")

    def _drop(self, rank: int) -> bool:
        """Forget what is asked of this rank; True when the attempt needs it still."""
        mine = [order.id for order in self._pending.values() if order.rank == rank]
        for number in mine:
            del self._pending[number]
        if mine or self.stage in (Stage.DECIDE, Stage.PUBLISH):
            return bool(mine)
        plan = self.attempts[-1].plan
        if self.stage is Stage.FINISH:
            return rank in plan.ranks
        return self.stage is Stage.STAGE and rank in plan.writers.values()

    def tick(self) -> None:
        """Judge the deadlines, and begin the next attempt where one is due."""
        now = self._desk.now
        if now >= self._end_of_dump:
            open_orders = f" in {self._open_orders()}" if self._pending else ""
            self._fail(f"the dump did not end within {self._deadlines.dump:g} s{open_orders}")
        elif self.stage is Stage.DECIDE:
            self._plan()
        elif now >= self._end_of_stage:
            self._time_out()

    def _time_out(self) -> None:
        why = f"no answer within {self._deadlines.order:g} s to {self._open_orders()}"
        late = {order.rank for order in self._pending.values()}
        self._pending = {}
        if self.stage is Stage.FINISH:
            self._uncertain.update(dict.fromkeys(late, "did not say whether its update was finished"))
        for rank in late:  # weighs more than an answer that it could not
            self._failures[rank] = self._failures.get(rank, 0) + 2
        self._spoil(why)

    def _open_orders(self) -> str:
        kind = next(iter(self._pending.values())).kind.value
        return f"{kind} of {ranks(order.rank for order in self._pending.values())}"

    def repeat(self, rank: int) -> None:
        """The rank reconnected: what it was asked may have been lost on the way. The ids are the same."""
        for order in self._pending.values():
            if order.rank == rank:
                self._desk.put(order)

    # ------------------------------------------------------------------------------------------------ ends

    def _fail_attempt(self, why: str) -> None:
        attempt = self.attempts[-1]
        attempt.failure = why
        self._pending = {}
        self._desk.note(f"attempt {attempt.number} failed: {why}", warn=True)
        if attempt.number >= MAX_ATTEMPTS:
            self._fail(f"{count(MAX_ATTEMPTS, 'attempt')} failed, the last because {why}")
            return
        self._discard(attempt)
        self.stage = Stage.DECIDE
        self._desk.enter(Stage.DECIDE.value)

    def _fail(self, why: str) -> None:
        self._desk.note(f"no checkpoint: {why}", warn=True)
        self._end(Ending("failed", -1, EXIT_UNSAVED, why))

    def _published(self, event: OrderDone) -> None:
        """The checkpoint of S is on disk. Also when an earlier attempt says so late: S is the same."""
        if self.ending is not None and self.ending.step >= 0:
            return
        existed = event.result.get("exists") == "1"
        ending = Ending(
            "exists" if existed else "dumped",
            self.agreement.step,
            EXIT_SAVED,
            path=event.result.get("path", ""),
            resume=event.result.get("resume", ""),
        )
        where = f" in {ending.path}" if ending.path else ""
        self._desk.note(f"step {ending.step} {'was on disk already' if existed else 'is published'}{where}")
        for attempt in self.attempts:
            if attempt.publish is not None and attempt.publish.id == event.order:
                attempt.cleared = True
        self._end(ending)

    def _end(self, ending: Ending) -> None:
        self._pending = {}
        if self.ending is None and self.attempts:
            self._discard(self.attempts[-1])
        self.ending = ending

    def _discard(self, attempt: Attempt) -> None:
        """Let what this attempt wrote be removed, by those who wrote: each does it after what it is still writing.

        While a publication may still be running, only its publisher may touch the directory: anybody else could remove
        files between its check and its rename.
        """
        if attempt.cleared:
            return
        attempt.cleared = True
        publish = attempt.publish
        running = publish is not None and self._desk.open(publish)
        who = {publish.rank} if running and publish is not None else attempt.touched
        for rank in sorted(who & self._roster.alive):
            self._desk.issue(rank, OrderKind.DISCARD, {"directory": attempt.directory})
