"""A thread of the launcher that keeps the job's store usable while nodes come and go.

The store lives in one node's launcher and ends with it. Each launcher keeps copies of what a node that comes later has
to find: the bookkeeping of the rendezvous, and the start-up journals of its own ranks and of those of the next node, so
that each of them is on two nodes. When somebody serves the store's address again, and the store does not know us, it is
filled again. No trouble with the store ends a worker.

Imports no torch: connections are made by the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mindspeed_tft.agent.places import Keys, Owner, Store, Watch, owner_of
from mindspeed_tft.agent.supervisor import say

KEPT_BYTES = 8 << 20  # of one journal: 4 MiB of results as text


class Rendezvous(Protocol):
    """What the launcher's rendezvous has to do with the store."""

    def connect(self, seconds: float) -> Store:
        """A new connection; RuntimeError if nobody serves the store within `seconds`."""

    def adopt(self, empty: bool) -> None:
        """The store is reached again: whoever held a broken connection gets a new one. `empty`: it is another store,
        into which all that this launcher keeps has been written."""


@dataclass(frozen=True)
class Place:
    """The place that a launcher has in its job."""

    keys: Keys
    node: int
    nodes: int
    generation: int
    replaced: bool  # its workers take the places of others, in a job that trains
    life: int  # how often this place was taken before
    copied: Sequence[str]  # keys to keep, beside the journals
    journals: Sequence[str]


class Keeper:
    """The copies of one launcher, for one generation of its workers."""

    def __init__(
        self,
        place: Place,
        me: Owner,
        rendezvous: Rendezvous,
        *,
        period: float,
        patience: float,
        complete: Callable[[int], None],
    ) -> None:
        """`period`: seconds between two beats; `patience`: seconds without one after which a launcher counts as gone;
        `complete(entries)` is called, in the keeper's thread, when everything that is to be kept has been read."""
        self._place, self._me, self._rendezvous = place, me, rendezvous
        self._complete = complete
        self._period, self._patience = period, patience
        self._greeting = place.keys.greeting(place.node, f"{me.host}-{me.pid}-{place.generation}")
        self._kept: dict[str, str] = {}
        self._wanted = {place.keys.started(place.generation), place.keys.begun(place.generation), *place.copied}
        self._wanted.update(place.journals)
        self._store: Store | None = None
        self._met = self._lost = self._told = False
        self._spare = False
        self._watch = Watch(patience)
        self._training, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tft-keeper", daemon=True)

    @property
    def spare(self) -> bool:
        """Whether another launcher holds this node's place, and lives."""
        return self._spare

    def start(self) -> None:
        self._thread.start()

    @property
    def training(self) -> bool:
        """Whether a node that joins now takes somebody's place."""
        return self._training.is_set()

    def training_begins(self) -> None:
        """All workers of this node train: from now on a node that joins takes somebody's place."""
        self._training.set()

    def stop(self) -> None:
        """The workers end: an empty store is none of our business any more."""
        self._stop.set()

    def close(self) -> None:
        """Wait for the thread, at most as long as one request may take."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(self._patience + self._period)

    # ------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            try:
                if self._store is None:
                    self._store = self._reach()
                self._beat(self._store)
                self._copy(self._store)
            except (RuntimeError, OSError) as exc:  # torch's own errors of a store are RuntimeErrors
                self._store = None
                if not self._stop.is_set() and self._training.is_set():
                    self._complain(exc)

    def _reach(self) -> Store:
        store = self._rendezvous.connect(self._period)
        empty = self._met and not store.check([self._greeting])
        if empty:
            for key, value in self._kept.items():
                store.compare_set(key, "", value)
        if self._lost:
            self._rendezvous.adopt(empty)
        store.set(self._greeting, "")
        if self._lost:
            filled = f"another one, filled again with {len(self._kept)} entries" if empty else "as it was"
            say(f"the job's store is reached again: {filled}")
        self._met, self._lost = True, False
        return store

    def _complain(self, exc: Exception) -> None:
        if not self._lost:
            reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
            say(
                f"*** the job's store is gone ({reason}): training goes on; a node that starts with the command of the"
                " one that was lost brings it back ***"
            )
        self._lost = True

    def _beat(self, store: Store) -> None:
        """Show that we live, if the place is ours; take it when its owner does not live any more."""
        place = self._place
        self._me = replace(self._me, beat=self._me.beat + 1)
        owner = owner_of(store, place.keys, place.node)
        if owner is None or owner.same(self._me) or self._watch.gone(owner):
            self._spare = False
            store.set(place.keys.node(place.node), self._me.to_json())
            return
        self._spare = self._watch.moved
        if self._spare and not self._told:
            self._told = True
            say(
                f"the place of node {place.node} is held by {owner}, which lives: the workers of this launcher wait"
                " for its end"
            )

    def _copy(self, store: Store) -> None:
        if not self._training.is_set() or not self._wanted:
            return
        store.compare_set(self._place.keys.begun(self._place.generation), "", str(self._place.nodes))
        for key in sorted(self._wanted):
            if self._stop.is_set():
                return
            if store.check([key]):
                value = store.get(key).decode()
                self._wanted.remove(key)
                if len(value) <= KEPT_BYTES:
                    self._kept[key] = value
                else:
                    say(f"{key} is not kept beside the job's store: {len(value)} bytes are more than {KEPT_BYTES}")
        if not self._wanted:
            self._complete(len(self._kept))
