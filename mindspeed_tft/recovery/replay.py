"""Data that a broken step consumed comes again: an iterator that remembers what it gave since the step began."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class _Generators(NamedTuple):
    """The states of this process's generators of random numbers."""

    python: Any
    numpy: Any
    torch: Any

    @classmethod
    def now(cls) -> _Generators:
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def put(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


class _Given(NamedTuple):
    batch: Any
    after: _Generators  # the states once the batch was made


class ReplayIterator(Iterator[Any]):
    """Wraps the iterator of micro-batches. Holds the batches of one step, which training holds anyway.

    A source may draw from the generators of this process (a dataset that masks at random, a loader that begins a new
    epoch). With a batch that comes again, they are put to where they were after it, or the rest of the step would see
    other numbers. That asks for one look at them a batch; to find out whether it drew at all takes two.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._given: list[_Given] = []
        self._again: list[_Given] = []

    def __next__(self) -> Any:
        if self._again:
            found = self._again.pop(0)
            found.after.put()
        else:
            found = _Given(next(self._source), _Generators.now())
        self._given.append(found)
        return found.batch

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
