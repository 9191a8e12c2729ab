"""Short English for long lists: texts of an incident must stay readable with thousands of ranks."""

from __future__ import annotations

from collections.abc import Iterable


def some(things: Iterable[object], limit: int = 3, separator: str = ", ") -> str:
    """The first few of many, and how many more there are."""
    every = [str(thing) for thing in things]
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return separator.join(every[:limit]) + more


def ranks(numbers: Iterable[int], limit: int = 8) -> str:
    """`rank 3`, or `ranks 1, 2, 5 and 7 more`."""
    every = sorted(numbers)
    return ("rank " if len(every) == 1 else "ranks ") + some(every, limit)


def count(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
