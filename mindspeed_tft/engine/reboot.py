"""Worker reboot: who is gone or has to go, and whether all have come back.

The processes are started again by their launcher; here it is only decided whether that is worth waiting for, and for
how long. Survivors wait where they were stopped. A newcomer takes its predecessor's place when nobody is missing any
more, so that until then a dump finds everything as it would without reboot. What happens then is `repair`'s affair.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from mindspeed_tft.engine.agreement import agree
from mindspeed_tft.engine.desk import Desk
from mindspeed_tft.engine.incident import EXIT_MOVED, EXIT_REBORN, Fault
from mindspeed_tft.engine.planning import DumpPlan, NoPlan, RewindPlan, plan_dump
from mindspeed_tft.engine.repair import MAX_TRIES, NOTICED, REPAIRABLE, SPOILING, Repairs
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.types import Commit, Deadlines, Order, OrderKind, RankInfo, RankReport, Update
from mindspeed_tft.engine.words import ranks, some

LEAVING = frozenset({"terminated"})  # asked to end by a signal: not to be started again


@dataclass(frozen=True)
class Replaced:
    """A rank that goes on as another process."""

    rank: int
    old: RankInfo
    new: RankInfo

    def __str__(self) -> str:
        elsewhere = f" on host {self.new.host}" if self.new.host != self.old.host else ""
        return f"rank {self.rank} (pid {self.old.pid} on host {self.old.host}) was replaced by pid {self.new.pid}" + (
            elsewhere
        )

    def as_dict(self) -> dict[str, object]:
        return {"old_pid": self.old.pid, "new_pid": self.new.pid, "host": self.new.host}


class Reboots:
    """The newcomers of one incident after the other."""

    def __init__(self, desk: Desk, roster: Roster, deadlines: Deadlines, repairs: Repairs) -> None:
        self.waiting = False
        self.leaving: frozenset[int] = frozenset()  # ranks whose node goes: another one comes with their newcomers
        self.replaced: dict[int, Replaced] = {}
        self._desk, self._roster, self._deadlines, self._repairs = desk, roster, deadlines, repairs
        self._reports: dict[int, RankReport] = {}  # of newcomers that are ready
        self._sent: dict[int, tuple[RankInfo, Order]] = {}  # processes that were told to come back as another one
        self._changed = False  # somebody more is missing, or there is a fault more
        self._missed: set[int] = set()  # who was missing when that was looked at last
        self._until = 0.0
        self._renewals = 0

    # ------------------------------------------------------------------------------------------------ coming and going

    def came(self, info: RankInfo) -> None:
        """A newcomer registered: what was told of its rank before says nothing about it."""
        self._desk.incident.reborn(info.rank)
        self._reports.pop(info.rank, None)
        self._sent.pop(info.rank, None)
        self._changed = self._changed or _differs(info, self._roster.infos[info.rank])

    def sent_again(self, info: RankInfo) -> bool:
        """True for a process that reconnects although it was sent away. It gets its order again."""
        old, order = self._sent.get(info.rank, (None, None))
        if old is None or order is None or (old.host, old.pid) != (info.host, info.pid):
            return False
        self._desk.put(order)
        return True

    def ended(self, rank: int) -> None:
        """A process of this rank is gone: whoever comes is another one, with the same number or not, as in a pod that
        was made anew."""
        self._sent.pop(rank, None)

    def heard(self, report: RankReport) -> None:
        """A newcomer's start-up is over. Whatever it says, it has none of the state."""
        if report.epoch != self._desk.epoch or report.rank in self._reports:
            return
        self._reports[report.rank] = _bare(report.rank, report.epoch)
        left = self.missing()
        more = f", {ranks(left)} still missing" if left else ""
        self._desk.note(f"the newcomer for rank {report.rank} is ready{more}")

    def gone(self, rank: int) -> None:
        """The newcomer for this rank is gone again."""
        self._reports.pop(rank, None)
        self._missed.discard(rank)
        self._changed = True

    def changed(self) -> None:
        """Somebody was lost, or there is a fault more: look again, with the next tick."""
        self._changed = True

    def missing(self) -> list[int]:
        """Lost ranks without a newcomer that is ready."""
        return sorted(rank for rank in self._roster.lost if rank not in self._reports)

    # ------------------------------------------------------------------------------------------------ waiting

    def needed(self) -> bool:
        """Some process is gone, or has to be another one before training can go on."""
        return bool(self._roster.lost or self._doomed())

    def worth(self, reports: Mapping[int, RankReport], silent: Collection[int]) -> bool:
        """Training could go on, if newcomers stood for these ranks too, which do not report."""
        return not self._hopeless(reports, self._doomed(), silent)

    def hopeless(self, reports: Mapping[int, RankReport]) -> str:
        """Why newcomers would not help; "" where training could go on with them."""
        return self._hopeless(reports, self._doomed())

    def begin(self, reports: Mapping[int, RankReport]) -> str:
        """Wait for newcomers, if that is worth while; otherwise why not."""
        first = not self.waiting
        self._changed, self.waiting = False, False
        doomed = self._doomed()
        if why := self._hopeless(reports, doomed):
            return f"no newcomer is waited for: {why}"
        for rank, fault in sorted(doomed.items()):
            self._send_away(rank, fault)
        missing = self.missing()
        more = not self._missed.issuperset(missing)
        if first:
            self._until = self._desk.now + self._deadlines.reboot  # who is lost may have become known only now
        elif more and self._renewals < MAX_TRIES:
            self._renewals += 1
            self._until = self._desk.now + self._deadlines.reboot
        if more:
            self._desk.note(f"waiting for newcomers for {ranks(missing)}, for {self._until - self._desk.now:.1f} s")
        self._missed = set(self._roster.lost)
        self.waiting = True
        return ""

    @property
    def complete(self) -> bool:
        """Nobody is missing any more, and nothing has happened that must be looked at first."""
        return self.waiting and not self._changed and not self.missing()

    @property
    def stale(self) -> bool:
        """What was decided must be decided again."""
        return self.waiting and self._changed

    def late(self) -> str:
        """Why the waiting ends without newcomers; "" while it may go on."""
        if not self.waiting or self._desk.now < self._until:
            return ""
        missing, limit = ranks(self.missing()), self._deadlines.reboot
        return f"no newcomer for {missing} within {limit:g} s (--tft-reboot-wait)"

    def adopt(self, reports: dict[int, RankReport]) -> None:
        """Newcomers take the places of their predecessors. What those had said remains evidence of completed steps."""
        roster = self._roster
        for rank in sorted(roster.lost):
            first = self.replaced.get(rank)
            self.replaced[rank] = Replaced(rank, first.old if first else roster.infos[rank], roster.newcomers[rank])
            if rank in reports:
                self._repairs.departed.append(reports[rank])
            reports[rank] = self._reports.pop(rank)
            roster.adopt(rank, self._desk.now)
        self._repairs.joined(self.replaced)
        self._missed = set()
        self.waiting = False

    def stopped_again(self) -> None:
        """A repair failed, everybody reports anew."""
        self._reports.clear()
        self._missed = set()
        self.waiting = False

    def over(self) -> None:
        """The incident is over."""
        self.stopped_again()
        self._sent.clear()
        self.replaced = {}
        self._renewals = 0

    # ------------------------------------------------------------------------------------------------ judging

    def _doomed(self) -> dict[int, Fault]:
        """Ranks that live, with a fault that their process does not survive."""
        here = set(self._roster.told)
        found: dict[int, Fault] = {}
        for fault in self._desk.incident.current():
            if fault.own and fault.kind not in REPAIRABLE | SPOILING and fault.rank in here:
                found.setdefault(fault.rank, fault)
        return found

    def _hopeless(
        self, reports: Mapping[int, RankReport], doomed: Mapping[int, Fault], silent: Collection[int] = ()
    ) -> str:
        """Why training cannot go on even when all newcomers have come, also for the `silent`."""
        roster, faults = self._roster, self._desk.incident.faults
        if roster.finished:
            return f"{ranks(roster.finished)} finished training"
        if mute := roster.alive - reports.keys() - {*silent}:
            return f"{ranks(mute)} did not report"
        if leaving := next((fault for fault in faults if fault.own and fault.kind in LEAVING), None):
            return f"a rank was asked to end ({leaving})"
        if strange := next((fault for fault in faults if not fault.own and fault.kind not in NOTICED), None):
            return f"a fault of kind {strange.kind!r} cannot be repaired ({strange})"
        if others := [info for info in roster.newcomers.values() if _differs(info, roster.infos[info.rank])]:
            return (
                f"the newcomer for rank {others[0].rank} is of part {others[0].part} with shards "
                f"{some(others[0].holds)}, which differs from its predecessor; it was started with other settings"
            )
        return self._no_way(reports, {*doomed, *silent})

    def _no_way(self, reports: Mapping[int, RankReport], doomed: Collection[int]) -> str:
        """Why the state could not be had without the ranks that are gone or have to go."""
        roster = self._roster
        absent = {*roster.lost, *doomed}
        later = {rank: _bare(rank) if rank in absent else reports[rank] for rank in roster.infos}
        plan = self._repairs.outlook(later, [reports[rank] for rank in sorted(absent & reports.keys())], absent)
        if isinstance(plan, NoPlan):
            return plan.reason
        if isinstance(plan, RewindPlan) and not plan.spoiled and doomed and self._can_dump(reports):
            return f"with {ranks(doomed)} completed steps would be lost, of which a dump loses none ({plan.why})"
        return ""

    def _can_dump(self, reports: Mapping[int, RankReport]) -> bool:
        infos = self._roster.infos
        found = plan_dump(infos, reports, agree(reports, infos), self._roster.lost)
        return isinstance(found, DumpPlan) and found.step > 0

    def _send_away(self, rank: int, fault: Fault) -> None:
        """Its process ends and its launcher starts it again. From now on it counts as lost; its end is no news."""
        info = self._roster.process_of(rank)
        assert info is not None
        moves = rank in self.leaving
        how = "leaves with its node" if moves else "is started again"
        why = f"rank {rank} {how}, because its process cannot go on ({fault})"
        code = EXIT_MOVED if moves else EXIT_REBORN
        order = self._desk.issue(rank, OrderKind.EXIT, {"code": code, "summary": why})
        self._sent[rank] = info, order
        self._reports.pop(rank, None)
        self._missed.discard(rank)
        if self._roster.newcomers.pop(rank, None) is None:
            self._roster.lose(rank, "left to be started again")
        self._desk.note(why, warn=True)


def _bare(rank: int, epoch: int = 0) -> RankReport:
    """What a newcomer has to say."""
    return RankReport(rank, 0, Commit.NONE, Update.UNTOUCHED, trusted=False, epoch=epoch)


def _differs(newcomer: RankInfo, old: RankInfo) -> bool:
    """They are not the same place in the layout."""
    return replace(newcomer, host=old.host, pid=old.pid) != old


def describe(replaced: Collection[Replaced]) -> str:
    """Who was replaced by whom, as a sentence; "" for nobody."""
    text = some((str(one) for one in replaced), separator="; ")
    return f"{text[0].upper()}{text[1:]}. " if text else ""
