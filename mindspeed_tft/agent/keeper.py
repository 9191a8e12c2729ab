"""A thread of the launcher that keeps the job's store usable while nodes come and go.

The store lives in one node's launcher and ends with it. Each launcher keeps copies of what a node that comes later has
to find: the bookkeeping of the rendezvous, and the start-up journals of its own ranks and of those of the next node, so
that each of them is on two nodes. When somebody serves the store's address again, and the store does not know us, it is
filled again. No trouble with the store ends a worker.

Imports no torch: connections are made by the caller.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mindspeed_tft.agent.places import Keys, Owner, Store, Watch, claim, owner_of
from mindspeed_tft.agent.supervisor import say

KEPT_BYTES = 8 << 20  # of one journal: 4 MiB of results as text
LOOK = 0.1  # seconds between two looks at who is still there


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
    token: str  # of the generation: one that began in an empty store, while we were away, has another one
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
        forgotten: float,
        complete: Callable[[int], None],
    ) -> None:
        """
        Args:
            period: seconds between two beats.
            patience: seconds without one after which a launcher counts as gone.
            forgotten: seconds without a store after which the job is over for a launcher that holds no place.
            complete: called with the number of entries, in the keeper's thread, when everything that is to be kept
                has been read.
        """
        self._place, self._me, self._rendezvous = place, me, rendezvous
        self._complete = complete
        self._period, self._patience, self._forgotten = period, patience, forgotten
        self._greeting = place.keys.greeting(place.node, f"{me.host}-{me.pid}-{place.generation}")
        self._kept: dict[str, str] = {}
        self._wanted = {place.keys.started(place.generation), place.keys.begun(place.generation), *place.copied}
        self._wanted.update(place.journals)
        self._store: Store | None = None
        self._met = self._lost = self._told = False
        self._holds = not place.replaced
        self._spare = self._counted = self._overtaken = self._over = False
        self._seen = time.monotonic()  # the store
        self._watch = Watch(patience)
        self._training, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tft-keeper", daemon=True)

    @property
    def holds(self) -> bool:
        """Whether the place of this node is ours: no other launcher has it, or had it until a moment ago."""
        return self._holds

    @property
    def spare(self) -> bool:
        """Whether another launcher holds this node's place, and has been seen to live."""
        return self._spare

    @property
    def over(self) -> bool:
        """Whether the job has ended without a need for this launcher."""
        return self._over

    @property
    def overtaken(self) -> bool:
        """Whether those who train have come back to a store in which our generation began without them."""
        return self._overtaken

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

    def farewell(self) -> None:
        """The job has finished. Launchers that hold no place have to see it, and the store may end with this process.

        Takes at most as long as a launcher may be silent, and a request.
        """
        self.close()
        place, store, end = self._place, self._store, time.monotonic() + self._patience
        if store is None or not self._holds:
            return
        try:
            store.set(place.keys.over(place.generation), "")
            while store.add(place.keys.guests(place.generation), 0) > 0 and time.monotonic() < end:
                time.sleep(LOOK)
        except (RuntimeError, OSError):  # another one served it, and has left
            return

    def settle(self) -> None:
        """Find out whether the place is ours, where its last owner has not been silent for long enough to tell.

        Takes at most as long as that, and two beats.
        """
        self.close()
        store, end = self._store, time.monotonic() + self._patience + 2 * self._period
        if store is None:
            return
        with contextlib.suppress(RuntimeError, OSError):  # whoever served it has left
            while not (self._holds or self._spare or self._over) and time.monotonic() < end:
                self._beat(store)
                time.sleep(LOOK)
            self._count(store, False)

    def gone_at_the_end(self, limit: float) -> list[int]:
        """All workers of this node have finished: wait, at most `limit` seconds, until each other launcher has said so
        of its own, too. Nodes whose launchers give no sign of life any more, for which nobody has to wait."""
        self.close()
        place, store, end = self._place, self._store, time.monotonic() + limit
        if store is None or not self._holds or not self._training.is_set():
            return []
        watches = {node: Watch(self._patience) for node in range(place.nodes) if node != place.node}
        gone = []
        try:
            store.set(place.keys.left(place.generation, place.node), "")
            while watches and time.monotonic() < end:
                for node, watch in list(watches.items()):
                    owner = owner_of(store, place.keys, node)
                    if store.check([place.keys.left(place.generation, node)]):
                        del watches[node]
                    elif owner is not None and watch.gone(owner):
                        gone.append(node)
                        del watches[node]
                if watches:
                    time.sleep(LOOK)
        except (RuntimeError, OSError):  # whoever served it has left
            return gone
        return gone

    def close(self) -> None:
        """Wait for the thread, at most as long as one request may take."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(self._patience + self._period)

    # ------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._store is None:
                    self._store = self._reach()
                self._beat(self._store)
                self._copy(self._store)
                self._seen = time.monotonic()
            except (RuntimeError, OSError) as exc:  # torch's own errors of a store are RuntimeErrors
                self._store = None
                if not self._stop.is_set() and self._training.is_set():
                    self._complain(exc)
                if not self._holds and time.monotonic() > self._seen + self._forgotten:
                    self._over = True
            # Training may lose a node in its first second: what is to be kept is copied as soon as it begins.
            (self._stop if self._training.is_set() else self._training).wait(self._period)
        if self._store is not None:
            with contextlib.suppress(RuntimeError, OSError):  # who serves it does not wait for us
                self._count(self._store, False)

    def _reach(self) -> Store:
        store = self._rendezvous.connect(self._period)
        empty = self._met and not store.check([self._greeting])
        if empty:
            self._counted = False
            for key, value in self._kept.items():
                store.compare_set(key, "", value)
        if self._lost:
            if empty:
                self._claim_all(store)
            self._rendezvous.adopt(empty)
        store.set(self._greeting, "")
        if self._lost:
            filled = f"another one, filled again with {len(self._kept)} entries" if empty else "as it was"
            say(f"the job's store is reached again: {filled}")
        self._met, self._lost = True, False
        return store

    def _claim_all(self, store: Store) -> None:
        """Others may have begun in the empty store without us: what they wrote does not count, because we train."""
        place = self._place
        store.set(place.keys.started(place.generation), place.token)
        if self._holds:
            store.set(place.keys.node(place.node), self._me.to_json())

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
        token = store.compare_set(place.keys.started(place.generation), "", place.token).decode()
        self._overtaken = token != place.token
        self._me = replace(self._me, beat=self._me.beat + 1)
        owner = owner_of(store, place.keys, place.node)
        if owner is None or owner.same(self._me) or self._watch.gone(owner):
            if claim(store, place.keys, place.node, owner, self._me):
                self._holds, self._spare = True, False
                self._count(store, False)
            return  # who was faster is looked at with the next beat
        self._holds = False
        self._over = self._over or store.check([place.keys.over(place.generation)])
        self._count(store, not self._over)
        self._spare = self._watch.moved
        if self._spare and not self._told:
            self._told = True
            say(
                f"the place of node {place.node} is held by {owner}, which lives: the workers of this launcher wait"
                " for its end"
            )

    def _count(self, store: Store, guest: bool) -> None:
        if guest != self._counted:
            store.add(self._place.keys.guests(self._place.generation), 1 if guest else -1)
            self._counted = guest

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
