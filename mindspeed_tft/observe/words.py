"""Numbers for the eye: seconds, bytes, moments, ranges of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable


def seconds(value: float | None) -> str:
    """`18 ms`, `5.64 s`, `2 min 5 s`; "" for None."""
    if value is None:
        return ""
    length = abs(value)
    if length < 0.0000005:
        return "0 s"
    if length < 0.001:
        return f"{value * 1e6:.0f} µs"
    if length < 0.1:
        return f"{value * 1000:.{1 if length < 0.01 else 0}f} ms"
    if length < 120:
        return f"{value:.{2 if length < 10 else 1}f} s"
    minutes, rest = divmod(round(length), 60)
    return f"{'-' if value < 0 else ''}{minutes} min {rest} s"


def size(value: float | None) -> str:
    """`740 kB`, `12.4 GB`: powers of 1000; "" for None."""
    if value is None:
        return ""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def clock(at: float) -> str:
    """A moment in the time of this host, with its zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))


def spans(numbers: Iterable[int], limit: int = 6) -> str:
    """`0-3, 8, 12-15 and 4 more`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    told = [f"{first}" if first == last else f"{first}-{last}" for first, last in found]
    return ", ".join(told[:limit]) + (f" and {len(told) - limit} more" if len(told) > limit else "")
