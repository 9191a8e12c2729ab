"""What happened and when: the facts that an incident file and the last words to the user are made of.

Collects; decides nothing, writes no file and knows no clock (every entry is stamped by the caller).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from mindspeed_tft.engine.words import count, some

STAGES = ("detect", "stop", "decide", "finish", "stage", "write", "publish", "exit")
REPAIR_STAGES = ("consult", "reboot", "regroup", "repair", "rollback", "load", "resume")  # timed where they happen
_QUIET_LIMIT = 1000  # lines kept of a job without a fault; weeks of reconnects must not fill the memory


EXIT_SAVED = 75  # the state is saved: start the job again and it goes on
EXIT_UNSAVED = 76  # stopped without a new checkpoint
EXIT_UNDECIDED = 77  # no engine decided in time; said by the rank itself
EXIT_REBORN = 78  # this process cannot be repaired: its launcher starts this rank again, alone
EXIT_MOVED = 79  # the node of this process goes: its launcher ends, and the rank comes back on another node


@dataclass(frozen=True)
class Ending:
    """How an incident ends."""

    outcome: str  # as in `Closed`
    step: int  # the step that is saved, -1 if none
    code: int  # exit code of the ranks
    reason: str = ""  # why nothing was saved
    path: str = ""
    resume: str = ""


NOBODY = -1  # the rank of a fault that befell no rank in particular
_VERBS = {"hang": "hangs"}


@dataclass(frozen=True)
class Fault:
    """A fault, or what a rank noticed of one."""

    at: float
    rank: int  # or NOBODY
    kind: str
    message: str
    own: bool  # of this rank itself; False: it only noticed a peer

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "all ranks"
        return f"{who} {_VERBS.get(self.kind, self.kind)}" + (f": {self.message}" if self.message else "")


class Incident:
    """The record of one incident: quiet until the first fault, complete from then on."""

    def __init__(self) -> None:
        self.log: list[tuple[float, str, str]] = []
        self.faults: list[Fault] = []
        self.timings: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self.verdict = ""  # why training was not repaired, where it could have been
        self._told: dict[int, set[tuple[str, bool]]] = {}  # rank -> message and whether it was its own fault
        self._blamed: set[int] = set()
        self._settled: dict[int, int] = {}  # rank -> so many of the faults befell processes before its present one
        self._stage = ""
        self._since = 0.0

    def line(self, at: float, stage: str, text: str) -> None:
        if not self.faults and len(self.log) >= _QUIET_LIMIT:
            del self.log[: _QUIET_LIMIT // 2]
        self.log.append((at, stage, text))

    def fault(self, fault: Fault) -> bool:
        """Book a fault; False when it was told before."""
        told = self._told.setdefault(fault.rank, set())
        key = (fault.message, fault.own)  # the kind may differ: a fault is told by event and by report
        if key in told:
            self._name(fault)
            return False
        told.add(key)
        if fault.own:
            self._blamed.add(fault.rank)
        self.faults.append(fault)
        return True

    def _name(self, fault: Fault) -> None:
        """A report tells that its rank stopped, and not of what kind the fault was: the event may come after it."""
        for index, known in enumerate(self.faults):
            if known.kind == "stopped" and (known.rank, known.message, known.own) == (
                fault.rank,
                fault.message,
                fault.own,
            ):
                self.faults[index] = replace(known, kind=fault.kind)

    def renew(self) -> None:
        """Everybody is stopped once more: the same words tell of a new fault from now on."""
        self._told.clear()

    def resumed(self, rank: int) -> None:
        """This rank trains again, though others may not yet: the same words of it tell of a new fault."""
        self._told.pop(rank, None)

    def reborn(self, rank: int) -> None:
        """Another process stands for this rank: what was told so far is no fault of it."""
        self._settled[rank] = len(self.faults)
        self._blamed.discard(rank)
        self._told.pop(rank, None)

    def current(self) -> list[Fault]:
        """The faults of processes that were not replaced."""
        settled = self._settled
        return [fault for index, fault in enumerate(self.faults) if index >= settled.get(fault.rank, 0)]

    def blames(self, rank: int) -> bool:
        """A fault of this rank's own is known."""
        return rank in self._blamed

    def enter(self, stage: str, at: float) -> None:
        """A stage begins and the one before ends. Stages that come again add up."""
        if self._stage in (*STAGES, *REPAIR_STAGES):
            self.timings[self._stage] = self.timings.get(self._stage, 0.0) + at - self._since
        self._stage, self._since = stage, at

    def what_happened(self) -> str:
        """Faults in the order in which they were seen; what peers noticed counts only where nobody knows more."""
        told = [fault for fault in self.faults if fault.own] or self.faults
        return some((str(fault) for fault in told), separator="; then ") or "no fault"

    def summary(self, ending: Ending, furthest: int) -> str:
        """The last words to the user. `furthest`: the last step known to be complete on any rank."""
        text = f"Training stopped: {self.what_happened()}. "
        text += f"It was not repaired online: {self.verdict}. " if self.verdict else ""
        if ending.step < 0:
            text += f"No new checkpoint was written: {ending.reason}. "
            return text + "A restart begins from the last checkpoint that is on disk."
        text += f"Step {ending.step} is saved" + (f" in {ending.path}" if ending.path else "")
        text += " (it was on disk already)" if ending.outcome == "exists" else ""
        text += f"; {count(max(0, furthest - ending.step), 'completed step')} lost."
        return text + (f" Go on with:\n{ending.resume}" if ending.resume else "")

    def as_dict(self) -> dict[str, object]:
        return {
            "faults": [asdict(fault) for fault in self.faults],
            "timings": dict(self.timings),
            "timeline": [{"at": at, "stage": stage, "text": text} for at, stage, text in self.log],
        }
