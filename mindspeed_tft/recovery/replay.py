"""Data that a broken step consumed comes again: an iterator that remembers what it gave since the step began."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class ReplayIterator(Iterator[Any]):
    """Wraps the iterator of micro-batches. Holds the batches of one step, which training holds anyway."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._given: list[Any] = []
        self._again: list[Any] = []

    def __next__(self) -> Any:
        batch = self._again.pop(0) if self._again else next(self._source)
        self._given.append(batch)
        return batch

    @property
    def given(self) -> int:
        """How many batches came since the mark."""
        return len(self._given)

    def mark(self) -> None:
        """A step begins here; what was given before will not be asked for again."""
        self._given = []

    def rewind(self) -> None:
        """Give what was given since the mark once more, in the same order."""
        self._again = self._given + self._again
        self._given = []
