"""The shards in the memory of one simulated rank: what they really hold, bits that flipped, and their hashes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mindspeed_tft.engine.types import RankInfo

from .disk import FLIPPED, Version
from .world import Job


class Shards:
    """What a rank holds. A hash tells apart all that it should: the step, and each flipped bit."""

    def __init__(self, job: Job, info: RankInfo, start: int) -> None:
        self.job, self.info, self.number = job, info, info.rank
        self.versions: dict[str, Version] = dict.fromkeys(info.holds, start)
        self.flips: dict[str, str] = {}  # shards of which a bit flipped, and which; nobody has noticed
        self.old_flips: set[str] = set()  # of these, the ones that an update or a hash came after
        self.stamps: dict[str, str] = {}  # hashes of shards after their last change
        self.saved: dict[int, dict[str, str]] = {}  # step of a checkpoint -> hashes of what was written
        self.alive, self.held = True, False
        self.damaged = False  # the device refuses to read its shards

    def _set(self, version: Version) -> None:
        for shard in self.versions:
            self.versions[shard] = version
        self.stamps = {}
        if version is not None:
            if self.flips.keys() - self.old_flips:
                self.job.flips_aged = True
            self.old_flips |= self.flips.keys()
            if self.job.scenario.hashes == "step":
                self._stamp()

    def _digest(self, shard: str) -> str:
        return f"{shard}@{self.versions[shard]}{self.flips.get(shard, '')}"

    def _digests(self) -> dict[str, str]:
        """Of the shards as they are, where they are of some step and can be read."""
        if not self.job.scenario.hashes or self.damaged or None in self.versions.values():
            return {}
        return {shard: self._digest(shard) for shard in self.versions}

    def _stamp(self) -> None:
        """From now on, a bit that flips shows."""
        for shard, digest in self._digests().items():
            if shard not in self.stamps and shard in self.flips:
                self.old_flips.add(shard)
                self.job.flips_aged = True
            self.stamps.setdefault(shard, digest)

    def _changed(self, wanted: Mapping[str, str]) -> str:
        now = self._digests()
        wrong = [shard for shard, digest in sorted(wanted.items()) if now.get(shard, digest) != digest]
        return f"shard {wrong[0]} has another hash than it should have" if wrong else ""

    def _content(self, shard: str) -> Version:
        """What somebody gets who reads this shard."""
        if shard not in self.flips:
            return self.versions[shard]
        return FLIPPED if shard in self.old_flips else None

    def _clean(self, shard: str) -> None:
        self.flips.pop(shard, None)
        self.old_flips.discard(shard)

    def flip(self, number: int) -> None:
        """A bit of a shard flips, and nobody is told."""
        shard = self.info.holds[number % len(self.info.holds)]
        if self.alive and not self.held and not self.damaged and self.versions[shard] is not None:
            self.flips[shard] = f"!{number}"
            self.old_flips.discard(shard)


def of(digests: Mapping[str, str], shards: Collection[str]) -> dict[str, str]:
    """The hashes of these shards, where they are known."""
    return {shard: digests[shard] for shard in shards if shard in digests}
