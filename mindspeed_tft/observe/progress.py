"""How fast steps are computed, and how much of the time goes into steps that are kept. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_right

_WINDOW = 10.0  # seconds over which the time of a step is averaged; longer steps count one by one
_POINTS = 4096


class Pace:
    """Seconds a step, of each rank, from its heartbeats.

    A heartbeat comes once a period, so what it says of a single short step is rough: the time of a step is the mean
    over the last five to ten seconds, or over the last step or two where they take longer.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self._anchors: dict[int, tuple[int, float, int, float]] = {}  # rank -> step and time: older one, later one

    def heard(self, rank: int, step: int, at: float) -> None:
        anchors = self._anchors.get(rank)
        if anchors is None or step < anchors[2]:
            self._anchors[rank] = (step, at, step, at)
            return
        if step == anchors[2]:
            return
        old_step, old, mid_step, mid = anchors
        self.seconds[rank] = (at - old) / (step - old_step)
        if at - mid >= _WINDOW / 2:
            self._anchors[rank] = (mid_step, mid, step, at)

    def forget(self, rank: int) -> None:
        self.seconds.pop(rank, None)
        self._anchors.pop(rank, None)

    def begin(self) -> None:
        """Training goes on after a pause, which is not the time of a step."""
        self._anchors.clear()


def middle_and_most(seconds: dict[int, float]) -> tuple[float, float] | None:
    """Median over the ranks, and the most."""
    return (statistics.median(seconds.values()), max(seconds.values())) if seconds else None


class Effective:
    """The effective training time ratio (ETTR): seconds in which steps were computed that are kept, divided by the
    seconds since training began.

    The definition is that of Wan et al., "Robust LLM Training Infrastructure at ByteDance" (arXiv:2509.16293), and of
    Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (arXiv:2410.21680):
    productive time over wall time. Here it counts from the first heartbeat that this controller heard of a training
    rank; a step is productive from the end of the step before it to its own end, unless it is lost to a rewind or a
    dump later. What else takes time between two steps (an evaluation, a checkpoint of Megatron's own) belongs to the
    step after it.
    """

    def __init__(self) -> None:
        self.began: float | None = None
        self.ended: float | None = None
        self.incident = 0.0  # seconds from the first sign of a fault until training went on, or the job ended
        self.recomputed = 0.0  # seconds of steps that were lost, also of those that a fault broke
        self.paused = 0.0  # seconds in which operators had ranks wait
        self._paused_at: float | None = None
        self._since: float | None = None  # steps are being computed since then
        self._before = 0.0  # productive seconds until then
        self._steps: list[int] = []  # the step that was complete ...
        self._seconds: list[float] = []  # ... after so many productive seconds

    def begin(self, step: int, at: float) -> None:
        """Ranks compute the step after this one, for the first time that we hear of it."""
        self.began = self._since = at
        self._steps, self._seconds = [step], [0.0]

    def completed(self, step: int, at: float) -> None:
        """The step is complete. Told late, it counts as late, and its successors as shorter; told after the first sign
        of a fault, it was complete by then."""
        if not self._steps or step <= self._steps[-1]:
            return
        spent = self._before + (at - self._since if self._since is not None else 0.0)
        self._steps.append(step)
        self._seconds.append(max(spent, self._seconds[-1]))
        if len(self._steps) > _POINTS:  # what lies between two points is taken as even
            del self._steps[1:-1:2], self._seconds[1:-1:2]

    def pause(self, at: float) -> None:
        """Ranks wait between two steps, because operators want it."""
        if self._since is not None:
            self.broken(at)
            self._paused_at = at

    def resume(self, at: float) -> None:
        """They go on."""
        if self._paused_at is not None:
            self.broken(at)
            self._since = at

    def broken(self, at: float) -> None:
        """The first sign of a fault."""
        if self._paused_at is not None:
            self.paused, self._paused_at = self.paused + at - self._paused_at, None
        if self._since is not None:
            self._before, self._since = self._before + at - self._since, None

    def over(self, step: int, opened: float, at: float, trains: bool) -> None:
        """The incident is over: what was computed after `step` is lost (-1: nobody knows; nothing is taken off)."""
        if self.began is None:
            return
        self.incident += at - max(opened, self.began)
        if step >= 0:
            kept = self._at(step)
            self.recomputed += self._before - kept
            self._before = kept
            cut = bisect_right(self._steps, step)
            del self._steps[cut:], self._seconds[cut:]
            if not self._steps or self._steps[-1] < step:
                self._steps.append(step)
                self._seconds.append(kept)
        if trains:
            self._since = at
        else:
            self.ended = at

    def productive(self) -> float:
        """Seconds in which the steps were computed that are complete and kept."""
        return self._seconds[-1] if self._seconds else 0.0

    def wall(self, now: float) -> float:
        """Seconds since training began."""
        return 0.0 if self.began is None else max(0.0, (now if self.ended is None else self.ended) - self.began)

    def ratio(self, now: float) -> float | None:
        """Between 0 and 1; None before training began."""
        wall = self.wall(now)
        return min(1.0, self.productive() / wall) if wall > 0 else None

    def _at(self, step: int) -> float:
        """Productive seconds after which `step` was complete."""
        right = bisect_right(self._steps, step)
        if right == 0:  # from before this controller led: all that it saw is lost
            return 0.0
        if right == len(self._steps):
            return self._seconds[-1]
        low, high = self._steps[right - 1], self._steps[right]
        share = (step - low) / (high - low)
        return self._seconds[right - 1] + share * (self._seconds[right] - self._seconds[right - 1])
