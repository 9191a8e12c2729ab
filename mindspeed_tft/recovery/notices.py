"""Ranks that are held tell each other of the end of a hold, in the job's store.

All ranks agree on a hold in a collective, and hear of its end from the controller. A host that has lost the controller
alone would stay held while the others train on, and wait for it in their next collective.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

EVERY = 1.0  # seconds between two looks of a rank
_PER_SECOND = 2000  # looks of all ranks: the store is one process of the job, with other things to do


class Board(Protocol):
    """The part of a store of torch that is used here."""

    def check(self, keys: list[str]) -> bool: ...
    def set(self, key: str, value: str) -> None: ...


class Notice:
    """Of one hold, as this rank sees it. This one sees nothing: there is nobody else, or no place to look."""

    over = False  # some rank has left the hold, so all have to

    def __init__(self, hold: int) -> None:
        self.hold = hold

    def end(self, tell: bool) -> None:
        """This rank is not held any more. `tell`: nobody is to be, because the hold is over, and not for a fault."""


class StoreNotice(Notice):
    """By a thread of its own: the store may be silent for long, and whoever is held has other things to hear."""

    def __init__(self, hold: int, place: Callable[[], Board], every: float) -> None:
        """`place()` opens a connection that nobody else uses; `every`: seconds between two looks."""
        super().__init__(hold)
        self._place, self._every = place, every
        self._ended = threading.Event()
        self._tell = False
        self.thread = threading.Thread(target=self._run, name="tft-notice", daemon=True)
        self.thread.start()

    def end(self, tell: bool) -> None:
        self._tell = tell
        self._ended.set()

    def _run(self) -> None:
        key, board = f"released-{self.hold}", None
        while True:
            ended = self._ended.wait(self._every)
            if ended and not self._tell:
                return
            try:
                board = board or self._place()
                if board.check([key]):
                    self.over = True
                    return
                if ended:
                    board.set(key, "over")
            except (RuntimeError, ValueError, OSError) as exc:  # the store is gone, or the job is ending
                log.debug("the end of hold %d cannot be looked for, or told, in the job's store: %s", self.hold, exc)
                board = None
            if ended:
                return


def in_store(place: Callable[[], Board], world_size: int) -> Callable[[int], Notice]:
    """Makes the notices of a job of so many ranks."""
    return lambda hold: StoreNotice(hold, place, max(EVERY, world_size / _PER_SECOND))
