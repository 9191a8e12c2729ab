"""Whether a dead worker is started again, and when. Pure: no clock, no process, no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_tft.engine.incident import EXIT_MOVED, EXIT_REBORN, EXIT_SAVED, EXIT_UNDECIDED, EXIT_UNSAVED

ENV_LIMIT = "TFT_REBOOT_LIMIT"

EXIT_REFUSED = 2  # wrong flags, said at start-up
LEAVING = frozenset({EXIT_SAVED, EXIT_UNSAVED, EXIT_UNDECIDED, EXIT_MOVED})
NEVER = frozenset({0, EXIT_REFUSED, *LEAVING})


@dataclass(frozen=True)
class Again:
    """Start it again."""

    delay: float  # seconds from now


@dataclass(frozen=True)
class Report:
    """Let the launcher see the failure."""

    why: str


@dataclass(frozen=True)
class Limits:
    """When a node gives up."""

    total: int = 100  # restarts per node
    burst: int = 3  # restarts of one worker ...
    window: float = 60.0  # ... within so many seconds


def limits(environ: Mapping[str, str]) -> Limits:
    """The limits that the user set.

    Raises:
        ValueError: TFT_REBOOT_LIMIT is not a number, or negative.
    """
    text = environ.get(ENV_LIMIT, "") or str(Limits.total)
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{ENV_LIMIT}={text!r}: how many workers a node may start again is a number, 0 or more")
    return Limits(total=int(text))


def leaving(peers: Mapping[int, int]) -> str:
    """Why nobody can be started again any more, given the statuses with which other workers ended; "" if one can.

    A peer that has finished (0), or saves and leaves, does not take a newcomer in.
    """
    for rank, status in peers.items():
        if status == 0:
            return f"worker {rank} has finished already"
        if status == EXIT_MOVED:
            return f"this node leaves the job: worker {rank} has left with status {status}, for another node"
        if status in LEAVING:
            return f"the job is ending: worker {rank} has left with status {status}"
    return ""


@dataclass
class Policy:
    """The decisions of one node, from one start of all its workers to the next."""

    limits: Limits = field(default_factory=Limits)
    _starts: dict[int, list[float]] = field(default_factory=dict)  # by local rank: when it was, or will be, started

    def decide(
        self, local_rank: int, status: int, *, marked: bool, peers: Mapping[int, int], now: float
    ) -> Again | Report:
        """Decide about a worker that has ended; `Again` counts as one restart.

        status: of the process, negative for a signal (as `subprocess.Popen.returncode`)
        marked: it had declared itself rebootable
        peers:  rank to status of the other workers that have ended for good
        now:    seconds of any clock that does not go back
        """
        if status in NEVER:
            return Report(f"status {status} says that it is not to be started again")
        if not marked:
            return Report("it had not come far enough to join the running job")
        why = leaving(peers)
        if why:
            return Report(why)
        if sum(map(len, self._starts.values())) >= self.limits.total:
            return Report(f"this node has used up its {self.limits.total} restarts ({ENV_LIMIT})")
        starts = self._starts.setdefault(local_rank, [])
        recent = sum(now - start < self.limits.window for start in starts)
        if recent >= self.limits.burst and status != EXIT_REBORN:
            return Report(f"it was started again {recent} times within {self.limits.window:g} s")
        delay = float(recent)  # none, 1 s, 2 s, ...
        starts.append(now + delay)
        return Again(delay)
