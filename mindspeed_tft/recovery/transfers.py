"""A rank's side of the transfers of a repair: what it gave, what it took, and how fast, for the incident."""

from __future__ import annotations

import time
from collections.abc import Callable

from mindspeed_tft.engine.repair import MOVED
from mindspeed_tft.recovery.host import Host
from mindspeed_tft.recovery.record import SmallState

SMALL_STATE = "/small"  # end of the name under which a part's small state is transferred like a shard


class Courier:
    """Carries out the transfers of one order, one after the other."""

    def __init__(self, host: Host, rank: int, state: Callable[[], SmallState]) -> None:
        """`state`: this rank's small state of S, for a newcomer that needs it."""
        self._host, self._rank, self._state = host, rank, state
        self.given: list[str] = []  # shards
        self.taken: list[str] = []
        self.small: SmallState | None = None  # that was taken
        self.told: dict[str, str] = {}  # for the answer: bytes and seconds of each transfer

    def carry(self, transfer: str) -> None:
        """Do this rank's part of a transfer ("shard|source rank|target rank"), if it has one.

        The seconds are from the moment at which this rank turned to the transfer: of a target they include waiting for
        the source, the check of the hash, and putting the tensors in place.
        """
        shard, source, target = transfer.split("|")
        if self._rank not in (int(source), int(target)):
            return
        begin = time.perf_counter()
        moved = self._give(shard, int(target)) if int(source) == self._rank else self._take(shard, int(source))
        self.told[MOVED + transfer] = f"{moved} {time.perf_counter() - begin:.6f}"

    def _give(self, shard: str, target: int) -> int:
        if shard.endswith(SMALL_STATE):
            return self._host.send_state(self._state(), target)
        moved = self._host.send_shard(shard, target)
        self.given.append(shard)
        return moved

    def _take(self, shard: str, source: int) -> int:
        """The bytes, as far as the target knows them: of a small state its source tells them."""
        if shard.endswith(SMALL_STATE):
            self.small = self._host.receive_state(source)
            return 0
        moved = self._host.receive_shard(shard, source)
        self.taken.append(shard)
        return moved
