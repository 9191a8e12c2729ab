"""The hash that each shard of this rank has had since its last change, so that a bit that flips later is noticed.

After every update a thread of its own reads the shards once more, while the main thread is in the next forward pass.
Nobody ever waits for it: when the next update begins before it is through, there is no hash for that step. What a
difference means is not decided here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from mindspeed_tft.replica.digest import Reader, Shard

log = logging.getLogger(__name__)

# step: a hash after every update, and one at a stop. auto: the same, after as many updates as BUDGET allows. stop: at a
# stop alone.
Mode = Literal["auto", "step", "stop", "never"]
BUDGET = 0.005  # of the time
Shards = Callable[[], Mapping[str, Shard]]
Place = Callable[[], AbstractContextManager[Any]]


class Stamps:
    """The hashes of this rank's shards. All methods are for the main thread, and none waits but `now` and `settle`."""

    def __init__(self, shards: Shards, mode: Mode = "step", beside: Callable[[], Place | None] | None = None) -> None:
        """`shards()` gives this rank's shards by their ids, as they lie now. `beside`: see `Platform.beside`; where it
        knows no place, hashes are taken at a stop alone."""
        self._shards, self._mode, self._beside = shards, mode, beside or (lambda: nullcontext)
        self._readers: dict[str, Reader] | None = None
        self._lasting = False  # the tensors lay in the same places twice in a row
        self._known: dict[str, str] = {}
        self._wake = threading.Condition()
        self._round = 0  # grows with every change: a hash that was begun before it says nothing
        self._job: tuple[int, dict[str, Reader], Place] | None = None
        self._busy = False
        self._thread: threading.Thread | None = None
        self._begun = 0.0  # when the first hash was wanted; 0: none was
        self._spent = 0.0  # seconds of hashing since then

    @property
    def known(self) -> dict[str, str]:
        """Shard id to digest, of the shards whose hash was taken since they changed last."""
        with self._wake:
            return dict(self._known)

    def changing(self) -> None:
        """The shards are about to change: what is known of them is void."""
        with self._wake:
            self._round += 1
            self._job, self._known = None, {}

    def moved(self) -> None:
        """The tensors may be others from now on, and are changed."""
        self.changing()
        self._readers, self._lasting = None, False

    def changed(self) -> None:
        """The shards are what they will be until the next update: let their hashes be taken."""
        self.changing()
        place = self._beside() if self._mode == "step" or (self._mode == "auto" and self._affordable()) else None
        if place is None:
            if self._mode == "step":
                self.keep(self.now())
            return
        if not self._lasting:  # the first update makes moments, which are read as well from then on
            before, self._readers = self._readers, self._read()
            self._lasting = before is not None and all(
                shard in before and reader.like(before[shard]) for shard, reader in self._readers.items()
            )
        assert self._readers is not None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tft-shard-hash", daemon=True)
            self._thread.start()
        with self._wake:
            self._job = (self._round, self._readers, place)
            self._wake.notify()

    def _affordable(self) -> bool:
        now = time.monotonic()
        self._begun = self._begun or now
        return self._spent <= BUDGET * (now - self._begun)

    def now(self) -> dict[str, str]:
        """The digests of all shards as they are, read at once; none with "never"."""
        if self._mode == "never":
            return {}
        with self._wake:
            self._job = None  # one that is running adds nothing to what is found here
        before, readers = self._readers or {}, self._read()
        for shard, reader in readers.items():
            if shard in before and not reader.like(before[shard]):  # another tensor was put in its place
                log.warning("shard %s does not lie where it was hashed: that hash is not used", shard)
                with self._wake:
                    self._round += 1
                    self._known.pop(shard, None)
                self._readers, self._lasting = None, False
        return {shard: str(reader.digest()) for shard, reader in readers.items()}

    def _read(self) -> dict[str, Reader]:
        try:
            return {shard: Reader(parts) for shard, parts in self._shards().items()}
        except ValueError as exc:  # never worse than without hashes
            log.error("no hashes of shards are taken in this job: %s", exc)
            self._mode = "never"
            return {}

    def keep(self, digests: Mapping[str, str]) -> None:
        """These are the hashes to be true to from now on."""
        with self._wake:
            self._round += 1
            self._known.update(digests)

    def settle(self, timeout: float) -> bool:
        """Wait until the thread is through; False: not in time."""
        with self._wake:
            return self._wake.wait_for(lambda: self._job is None and not self._busy, timeout)

    def end(self, timeout: float = 5.0) -> None:
        """The process is about to end. A thread that comes back from torch then would abort it."""
        self._mode = "never"
        self.changing()  # it stops before its next row
        self.settle(timeout)

    # ------------------------------------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._job is not None)
                assert self._job is not None
                number, readers, place = self._job
                self._job, self._busy = None, True
            # What this costs on a host is processor time. A device is used, and this thread waits for it.
            clock = time.thread_time if all(reader.on_host for reader in readers.values()) else time.monotonic
            begun = clock()
            try:
                self._take(number, readers, place)
            except Exception as exc:  # the device may be stopped, or its memory be broken: the main thread will see
                log.warning("the hashes of this step's shards could not be taken: %s", exc)
            self._spent += clock() - begun
            del readers, place  # they would keep tensors alive that a rewind replaces

    def _take(self, number: int, readers: dict[str, Reader], place: Place) -> None:
        with place():
            for shard, reader in readers.items():
                found = reader.digest(lambda: self._round == number)
                with self._wake:
                    if found is not None and self._round == number:
                        self._known[shard] = found
