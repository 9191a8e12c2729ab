"""The dump: from the reports of stopped ranks to one published checkpoint of the last completed step, or a reason why not.

Stages: decide S and a plan -> finish updates -> stage shards -> write parts -> publish. A fault on the way ends the
attempt: what it left is discarded, and the next tick plans again with who is left, so that losses seen together cost
one attempt. At most three attempts, all within the dump's deadline. What happens to the ranks before and after is
`machine`'s affair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from mindspeed_tft.engine.agreement import agree, revise
from mindspeed_tft.engine.desk import Desk
from mindspeed_tft.engine.incident import EXIT_SAVED, EXIT_UNSAVED, Ending
from mindspeed_tft.engine.planning import DumpPlan, NoPlan, plan_dump, rng_conflict
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.types import Commit, Deadlines, Order, OrderDone, OrderKind, RankReport, Update
from mindspeed_tft.engine.words import count, ranks, some

MAX_ATTEMPTS = 3


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
    ) -> None:
        """`reports` and `silent` (ranks that did not report, with the reason) are shared with the caller."""
        self.stage = Stage.DECIDE
        self.ending: Ending | None = None
        self.attempts: list[Attempt] = []
        self._desk, self._roster, self._deadlines = desk, roster, deadlines
        self._reports, self._silent, self._directory = reports, silent, directory
        self._uncertain: dict[int, str] = {}  # told to finish its update, and nothing heard: any state is possible
        self._avoid: set[int] = set()
        self._pending: dict[int, Order] = {}
        self._doomed = ""  # why this attempt cannot succeed, while ranks still finish their update
        self._end_of_stage = 0.0
        self._end_of_dump = desk.now + deadlines.dump
        desk.enter(Stage.DECIDE.value)
        self.agreement = agree(reports, roster.infos)

    # ------------------------------------------------------------------------------------------------ deciding

    def begin(self) -> None:
        """State what was agreed, and plan; or end at once."""
        desk, agreement = self._desk, self.agreement
        if self._silent:
            desk.note(f"{ranks(self._silent)}: {some(set(self._silent.values()), limit=1)}; excluded", warn=True)
        if agreement.impossible:
            why = some(f"rank {rank}: {agreement.offers[rank].reason}" for rank in agreement.impossible)
            desk.note(f"impossible reports, never a source: {why}", warn=True)
        if not agreement.provable:
            self._fail(agreement.reason)
        elif agreement.step == 0:
            self._fail("no step was completed: nothing to save")
        else:
            desk.note(f"S = {agreement.step}: {agreement.reason}")
            self._plan()

    def _plan(self) -> None:
        self.agreement = revise(self.agreement, self._reports, self._roster.infos)
        plan = plan_dump(self._roster.infos, self._reports, self.agreement, self._excluded(), self._suspects())
        if isinstance(plan, NoPlan):
            self._fail(plan.reason)
            return
        number = len(self.attempts) + 1
        attempt = Attempt(number, f"{self._directory}{plan.step:07d}-{number}", plan)
        self.attempts.append(attempt)
        self._doomed = ""
        self._desk.note(f"attempt {number} of {MAX_ATTEMPTS}: {plan.describe()}")
        orders = {rank: {"step": plan.step} for rank in plan.finish}
        self._run(Stage.FINISH, OrderKind.FINISH_UPDATE, orders)

    def _excluded(self) -> dict[int, str]:
        roster = self._roster
        gone = {rank: f"lost ({message})" for rank, message in roster.lost.items()}
        return {**self._silent, **self._uncertain, **gone, **dict.fromkeys(roster.finished, "finished training")}

    def _suspects(self) -> set[int]:
        """Ranks to use last: an order failed there, or their host lost a rank, which may be the first of many."""
        roster = self._roster
        hosts = {roster.infos[rank].host for rank in roster.lost if rank in roster.infos}
        return self._avoid | {rank for rank in roster.alive if roster.infos[rank].host in hosts}

    # ------------------------------------------------------------------------------------------------ going on

    def _run(self, stage: Stage, kind: OrderKind, payloads: dict[int, dict[str, object]]) -> None:
        ...
