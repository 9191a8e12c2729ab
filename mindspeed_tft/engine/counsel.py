"""Whom the engine asks where a cluster manager steers the job: what is possible now, what was decided, until when.

The manager chooses among the strategies that the state of the job allows, so it can never make a state right that is
not. It is asked after each stop, and once more when what it decided for did not lead on. If it is lost or late, the
engine decides as it does without it. Nothing here is used where nobody steers.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_tft.engine.agreement import agree
from mindspeed_tft.engine.desk import Desk
from mindspeed_tft.engine.planning import NoPlan, plan_dump
from mindspeed_tft.engine.reboot import Reboots
from mindspeed_tft.engine.repair import SPOILING, Repairs, unrepairable
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.types import Advised, Consult, Deadlines, RankReport, Steered, Told, Unadvised
from mindspeed_tft.engine.words import ranks

RETRY, RECOVER, DUMP, EXIT = "retry", "recover", "dump", "exit"
_ONLINE = (RETRY, RECOVER)  # after these training goes on
MAX_DECISIONS = 10  # in one incident: whoever decides for ever the same must not hold the job up


class Counsel:
    """The books of one job's cluster manager."""

    def __init__(self, desk: Desk, roster: Roster, deadlines: Deadlines) -> None:
        self.on = False
        self.open = False  # a decision is awaited
        self.chosen = ""  # what is carried out in this incident, because it was decided for
        self.leaving: frozenset[int] = frozenset()  # ranks whose nodes go
        self.stale = False  # what was asked is to be asked again, with the next tick: thousands may be lost at once
        self._desk, self._roster, self._deadlines = desk, roster, deadlines
        self._who = "the cluster manager"
        self._reasons: dict[str, str] = {}  # why a strategy was not offered
        self._offered: tuple[str, ...] = ()
        self._until: float | None = None
        self._decisions = 0
        self._asked = ""
        self._suspects: dict[int, str] = {}  # ranks whose memory is damaged, though they do not know

    # ------------------------------------------------------------------------------------------------ what is heard

    def steered(self, event: Steered) -> bool:
        """Somebody steers from now on, or nobody. True where a decision was awaited that will not come."""
        was, self.on = self.on, event.on
        self._who = event.who or self._who
        if event.on and not was:
            self._desk.note(f"{self._who} decides from now on how faults are answered")
        elif was and not event.on:
            self._desk.note(f"{self._who} decides no more: {event.why}. Our own rules hold", warn=True)
        if event.on or not self.open:
            return False
        self.open = False
        return True

    def told(self, event: Told) -> list[tuple[int, str]]:
        """The faults of these that are news."""
        roster, incident = self._roster, self._desk.incident
        known = {(fault.rank, fault.kind) for fault in incident.current() if fault.own}
        here = {rank for rank in roster.alive if rank not in roster.newcomers}
        found = []
        for rank, kind in event.faults:
            if kind == "memory" and rank in here:
                self._suspects[rank] = f"has a memory fault, as {event.who or self._who} says"
            news = (rank, kind) not in known if kind == "memory" else not incident.blames(rank)
            if rank in here and news:
                found.append((rank, kind))
        return found

    def suspects(self, reports: Mapping[int, RankReport]) -> list[tuple[int, str]]:
        """Whose report is not to be trusted, and why."""
        return [(rank, why) for rank, why in sorted(self._suspects.items()) if rank in reports]

    def advised(self, event: Advised) -> str:
        """Why this decision cannot be carried out; "" where it can, or was not asked for (then `open` stays)."""
        self.open, self._until = False, None
        self._decisions += 1
        if event.strategy not in self._offered:
            known = event.strategy in (RETRY, RECOVER, DUMP, EXIT)
            reason = (
                self._reasons.get(event.strategy, "it is not switched on") if known else "it is not in this version"
            )
            return f"{self._who} decided for {event.strategy!r}: {reason}"
        self.chosen, self.leaving = event.strategy, frozenset(event.leaving)
        also = f"; the nodes of {ranks(self.leaving)} go" if self.leaving else ""
        self._desk.note(f"{self._who} decides for {event.strategy}{also}")
        return ""

    def lacking(self, *strategies: str) -> str:
        """Which of these could not be, and why, as the end of a sentence; "" where all could."""
        found = [f"{each} ({self._reasons[each]})" for each in strategies if self._reasons.get(each)]
        return f"; not possible: {'; '.join(found)}" if found else ""

    # ------------------------------------------------------------------------------------------------ what is asked

    def ask(self, possible: Mapping[str, str], failed: str, why: str, furthest: int) -> None:
        """Have it decide; the time that it has does not begin anew while it is asked the same again."""
        self._reasons = {strategy: reason for strategy, reason in possible.items() if reason}
        self._offered = (*(strategy for strategy, reason in possible.items() if not reason), EXIT)
        self.open, self.chosen, self.stale = True, "", False
        if self._until is None:
            self._until = self._desk.now + self._deadlines.consult
        before = f"; {failed} did not lead on: {why}" if failed else ""
        told = "".join(f"; not {strategy}: {reason}" for strategy, reason in self._reasons.items())
        asked = f"{self._who} is asked to decide, possible are {', '.join(self._offered)}{told}{before}"
        if asked != self._asked:  # it may be asked the same again, because it told of faults that are known
            self._asked = asked
            self._desk.note(asked)
        self._desk.put(Consult(self._offered, self._faults(), failed, why, furthest))

    def late(self) -> bool:
        """It does not decide in time: nobody waits for it any more in this incident."""
        if not self.open or self._until is None or self._desk.now < self._until:
            return False
        self._part(f"{self._who} did not decide within {self._deadlines.consult:g} s (--tft-clusterd-wait)")
        return True

    def tired(self) -> bool:
        """It has decided so often in this incident that it is not asked any more."""
        if not self.on or self._decisions < MAX_DECISIONS:
            return False
        self._part(f"{self._who} has decided {self._decisions} times, and nothing led on")
        return True

    def _part(self, why: str) -> None:
        self.on = self.open = False
        self._desk.note(f"{why}. For this fault our own rules hold", warn=True)
        self._desk.put(Unadvised(why))

    def asks_again(self) -> str:
        """The strategy that was decided for and did not lead on, so that another decision is needed; "" if not."""
        return self.chosen if self.on and self.chosen in _ONLINE else ""

    def stopped(self) -> None:
        """Everybody is stopped (anew): what was possible counts no more."""
        self.open = self.stale = False
        self._until, self.leaving, self._asked = None, frozenset(), ""

    def over(self) -> None:
        """The incident is."""
        self.stopped()
        self.chosen, self._decisions = "", 0
        self._suspects.clear()

    def _faults(self) -> tuple[tuple[int, str], ...]:
        current = self._desk.incident.current()
        found = {fault.rank: fault.kind for fault in current if fault.own and fault.rank >= 0}
        found |= dict.fromkeys(self._roster.lost, "lost")
        if not found:  # a link, which nobody is to blame for: those who noticed, or anybody
            noticed = [fault.rank for fault in current if fault.rank >= 0] or sorted(self._roster.alive)[:1]
            found = dict.fromkeys(noticed, "link")
        return tuple(sorted(found.items()))


def possible(
    roster: Roster,
    reports: dict[int, RankReport],
    silent: dict[int, str],
    desk: Desk,
    repairs: Repairs | None,
    reboots: Reboots | None,
) -> dict[str, str]:
    """For each strategy but "exit", the gentlest first: why the state of the job does not allow it ("": it does)."""
    found = {}
    if repairs is not None:
        found[RETRY] = unrepairable(desk.incident.current(), roster, reports, silent)
        if not found[RETRY] and isinstance(plan := repairs.outlook(reports, (), ()), NoPlan):
            found[RETRY] = plan.reason
    if reboots is not None:
        found[RECOVER] = reboots.hopeless(reports)
    found[DUMP] = _unsavable(roster, reports, silent, desk, repairs)
    return found


def _unsavable(
    roster: Roster, reports: dict[int, RankReport], silent: dict[int, str], desk: Desk, repairs: Repairs | None
) -> str:
    spoiled = next((fault for fault in desk.incident.faults if fault.own and fault.kind in SPOILING), None)
    if spoiled is not None:
        return f"the numbers of all ranks may be wrong since ({spoiled})"
    agreement = agree(reports, roster.infos, departed=repairs.evidence if repairs is not None else ())
    if not agreement.provable:
        return agreement.reason
    if agreement.step == 0:
        return "no step was completed, there is nothing to save"
    gone = {**silent, **roster.lost, **dict.fromkeys(roster.finished, "finished training")}
    plan = plan_dump(roster.infos, reports, agreement, gone)
    return plan.reason if isinstance(plan, NoPlan) else ""
