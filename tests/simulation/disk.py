"""A shared file system as far as it matters: files of dead writers are torn, only a rename is atomic."""

from __future__ import annotations

from dataclasses import dataclass, field

Version = int | None  # step whose state a shard holds; None: half updated, damaged or half written
FLIPPED = -1  # a bit of it flipped before its rank updated it: wrong from then on, and its own hash is that of today


@dataclass
class PartFile:
    """One checkpoint file: the version of each shard in it, and the random state."""

    shards: dict[str, Version]
    rng: str


@dataclass
class Directory:
    """What one attempt wrote."""

    staged: dict[tuple[str, int], Version] = field(default_factory=dict)  # (shard, source)
    parts: dict[str, PartFile | None] = field(default_factory=dict)


@dataclass
class Published:
    """A checkpoint as it was at the moment of its rename."""

    step: int
    parts: dict[str, PartFile | None]
    tracked: bool = False


@dataclass
class Saved:
    """What one rank wrote into a periodic checkpoint."""

    versions: dict[str, Version]
    taints: set[str]  # faults that may have spread wrong numbers into it
    flips: dict[str, str] = field(default_factory=dict)  # shards in which a bit had flipped unnoticed


class Disk:
    """Directories of attempts, published checkpoints in order, and periodic checkpoints."""

    def __init__(self) -> None:
        self.directories: dict[str, Directory] = {}
        self.published: list[Published] = []
        self.periodic: dict[int, dict[int, Saved]] = {}  # step -> rank -> what it wrote

    def directory(self, name: str) -> Directory:
        return self.directories.setdefault(name, Directory())

    def discard(self, name: str) -> None:
        self.directories.pop(name, None)

    def exists(self, step: int) -> bool:
        return step in self.periodic or any(found.step == step and found.tracked for found in self.published)

    def complete(self, name: str, parts: list[str]) -> bool:
        """What a publisher checks against the manifests before it renames."""
        here = self.directories.get(name)
        return here is not None and all(here.parts.get(part) is not None for part in parts)

    def rename(self, name: str, step: int) -> Published:
        """Takes what is there now, complete or not."""
        here = self.directories.pop(name, Directory())
        found = Published(step, dict(here.parts))
        self.published.append(found)
        return found
