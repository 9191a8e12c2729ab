"""What the flags of a drill are in the releases of Megatron that do not know all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mindspeed_tft.registry.versions import fits


class Release(NamedTuple):
    """What holds for a range of releases."""

    versions: str
    absent: tuple[str, ...]  # flags that they do not have, each with one value
    added: tuple[str, ...]
    least: Mapping[str, int]  # the least value that a flag may have


RELEASES = (
    Release(
        ">=0.6,<0.7",
        absent=("--ckpt-format", "--rerun-mode", "--num-distributed-optimizer-instances"),
        added=("--use-mcore-models",),
        least={"--eval-iters": 1},  # a validation set without samples is an error
    ),
)


def knows(version: str, flag: str) -> bool:
    """Whether this release has one of the flags of a drill."""
    return not any(flag in release.absent for release in _of(version))


def flags(version: str, words: Sequence[str]) -> list[str]:
    """A drill's own flags as this release wants them."""
    found = list(words)
    for release in _of(version):
        for place in range(len(found) - 2, -1, -1):
            if found[place] in release.absent:
                del found[place : place + 2]
            elif found[place] in release.least:
                found[place + 1] = str(max(int(found[place + 1]), release.least[found[place]]))
        found += release.added
    return found


def _of(version: str) -> list[Release]:
    return [release for release in RELEASES if fits(version, release.versions)]
