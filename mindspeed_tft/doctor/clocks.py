"""How far apart the clocks of hosts are. Arithmetic only.

A host is asked for its time, which it told at some moment between the question and its answer. So each round trip
proves that the host's clock is ahead of ours by at least (told - received) and at most (told - sent); what several
prove together is the overlap. A median of midpoints would be as near, but its error would be a guess.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLIGHT = 0.5  # seconds: the times in incidents and logs of two hosts can no longer be put in order
GREAT = 60.0  # seconds: a certificate that was just made is not valid yet on the host that is behind


@dataclass(frozen=True)
class RoundTrip:
    """Seconds; sent and received by our clock, told by that of the host."""

    sent: float
    told: float
    received: float


@dataclass(frozen=True)
class Offset:
    """A host's clock is ahead of ours by `seconds`, surely within +- `bound`."""

    seconds: float
    bound: float


def offset(trips: Sequence[RoundTrip]) -> Offset:
    """What several round trips prove together; where a clock was set between them, their median, and its spread."""
    low = max(trip.told - trip.received for trip in trips)
    high = min(trip.told - trip.sent for trip in trips)
    if low <= high:
        return Offset((low + high) / 2, (high - low) / 2)
    middles = [trip.told - (trip.sent + trip.received) / 2 for trip in trips]
    return Offset(statistics.median(middles), max(middles) - min(middles))


@dataclass(frozen=True)
class Apart:
    """Two hosts whose clocks differ most; `behind` shows an earlier time."""

    ahead: str
    behind: str
    seconds: float
    bound: float

    @property
    def surely(self) -> float:
        """Seconds by which they differ at least."""
        return max(0.0, self.seconds - self.bound)


def farthest(offsets: Mapping[str, Offset]) -> Apart | None:
    """None with fewer than two hosts."""
    if len(offsets) < 2:
        return None
    ahead = max(offsets, key=lambda host: offsets[host].seconds)
    behind = min(offsets, key=lambda host: offsets[host].seconds)
    first, last = offsets[ahead], offsets[behind]
    return Apart(ahead, behind, first.seconds - last.seconds, first.bound + last.bound)
