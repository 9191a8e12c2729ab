"""What the launchers of several nodes write into the job's store, so that a node that comes later finds its place.

Names and small records; whoever has a store reads and writes them (`agent.keeper`, `patches.torch_rendezvous`). All lie
under a prefix that is this run's own, because one store may serve several jobs. Imports no torch.

A *generation* is one start of all workers: the restart count under static rendezvous, the round under c10d.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

ENV_STORE = "TFT_JOB_STORE"  # of a worker: where its job meets, as `JobStore` says it


class Store(Protocol):
    """The part of torch's stores that is needed."""

    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...


@dataclass(frozen=True)
class JobStore:
    """The store in which the ranks of a job meet, reached by address again and again, however often it was replaced."""

    host: str
    port: int
    prefix: str  # of everything that one generation of workers writes
    patience: float  # seconds after which a silent store counts as gone

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> JobStore | None:
        """Where this worker's launcher says that its job meets; None: it says nothing."""
        text = environ.get(ENV_STORE, "")
        return JobStore(**json.loads(text)) if text else None


@dataclass(frozen=True)
class Keys:
    """The names of everything that a run of a job keeps in its store."""

    run_id: str

    def _under(self, name: str) -> str:
        return f"tft/{self.run_id}/{name}"

    def started(self, generation: int) -> str:
        """There as soon as some node begins to start workers for this generation; by its token all nodes know it."""
        return self._under(f"started/{generation}")

    def begun(self, generation: int) -> str:
        """There when training has begun: who comes now takes the place of somebody. Holds the number of nodes."""
        return self._under(f"begun/{generation}")

    def over(self, generation: int) -> str:
        """There when the job has finished."""
        return self._under(f"over/{generation}")

    def left(self, generation: int, node: int) -> str:
        """There when all workers of a node have finished."""
        return self._under(f"left/{generation}/{node}")

    def guests(self, generation: int) -> str:
        """How many launchers run that hold no place."""
        return self._under(f"guests/{generation}")

    def workers(self, generation: int) -> str:
        """The prefix of what workers write."""
        return self._under(f"workers/{generation}")

    def node(self, node: int) -> str:
        """Who holds a node's place: an `Owner`."""
        return self._under(f"node/{node}")

    def greeting(self, node: int, token: str) -> str:
        """That this launcher has been here: a store without it is another one."""
        return self._under(f"greeting/{node}/{token}")


def journal(rank: int) -> str:
    """Below the workers' prefix: what a process that takes the place of `rank` has to know of its start-up."""
    return f"start-up/{rank}"


@dataclass(frozen=True)
class Owner:
    """The launcher that holds a node's place."""

    host: str
    pid: int
    life: int  # how often the place was taken before
    beat: int = 0  # moves while the launcher lives

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes | str) -> Owner:
        return Owner(**json.loads(text))

    def same(self, other: Owner) -> bool:
        return (self.host, self.pid) == (other.host, other.pid)

    def __str__(self) -> str:
        return f"{self.host} (launcher {self.pid})"


def newest_generation(store: Store, keys: Keys, most: int) -> int | None:
    """The latest generation, up to `most`, for which some node has started workers; None: this is the first start."""
    found = (number for number in range(most, -1, -1) if store.check([keys.started(number)]))
    return next(found, None)


def owner_of(store: Store, keys: Keys, node: int) -> Owner | None:
    key = keys.node(node)
    return Owner.from_json(store.get(key)) if store.check([key]) else None


def claim(store: Store, keys: Keys, node: int, seen: Owner | None, owner: Owner) -> bool:
    """Write that `owner` holds a place, unless somebody else has written since the record was `seen`; whether it is."""
    before, after = "" if seen is None else seen.to_json(), owner.to_json()
    return store.compare_set(keys.node(node), before, after).decode() == after


def vacant(taken: Sequence[int], nodes: int) -> int | None:
    """The lowest place of a job of so many nodes that nobody holds."""
    return next((place for place in range(nodes) if place not in taken), None)


class Watch:
    """Whether somebody's beat still moves, by our own clock."""

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`patience`: seconds without a beat after which its owner counts as gone."""
        self._patience, self._clock = patience, clock
        self._last: tuple[str, int, int] | None = None
        self._since = 0.0
        self.moved = False  # at least once while we looked: not a record that somebody left behind

    def gone(self, owner: Owner) -> bool:
        """See the record once more."""
        now, seen = self._clock(), (owner.host, owner.pid, owner.beat)
        if seen != self._last:
            self.moved = self._last is not None
            self._last, self._since = seen, now
        return now - self._since > self._patience
