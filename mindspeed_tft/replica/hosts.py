"""Failure domains: which shards are lost with one host, and what would put their holders on different ones.

A shard survives the loss of a host if one of its holders runs on another. Where a job's ranks run is known from the
launcher before they have met (`pretended`), and for certain once they have. Arithmetic and words only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_tft.engine.words import count, some
from mindspeed_tft.replica.holders import FLAG, holders
from mindspeed_tft.replica.layout import ORDER_FLAG, Sizes, data_parallel_lists

WANTED = "--tft-require-separate-hosts"

Lists = Mapping[str, Sequence[int]]  # what ids of shards begin with -> ranks of the data-parallel list


@dataclass(frozen=True)
class Finding:
    """What one host can take away. Words for a message, without full stops."""

    reason: str
    remedy: str
    alone: bool = False  # there is only one host


def pretended(environ: Mapping[str, str]) -> list[str]:
    """A name for the host of each rank, as torchrun places them: each node has a run of ranks. Empty where that cannot
    be told: another launcher, or nodes with different numbers of ranks."""
    try:
        world, local = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
        nodes = int(environ["GROUP_WORLD_SIZE"])
    except (KeyError, ValueError):
        return []
    return [f"node {rank // local}" for rank in range(world)] if world == local * nodes else []


def lost_with_host(lists: Lists, replicas: int | None, hosts: Sequence[str]) -> dict[str, list[str]]:
    """Host -> the shards that only its ranks hold.

    Args:
        replicas: holders of each shard; None: all ranks of a list hold its one shard.
        hosts: of each rank.
    """
    found: dict[str, list[str]] = {}
    for name, ranks in lists.items():
        for shard, positions in enumerate(holders(len(ranks), replicas or len(ranks))):
            around = {hosts[ranks[position]] for position in positions}
            if len(around) == 1:
                found.setdefault(around.pop(), []).append(f"{name}/{shard}")
    return found


def fitting(lists: Lists, hosts: Sequence[str]) -> list[int]:
    """Numbers of replicas with which no shard is lost with one host."""
    common = math.gcd(*(len(ranks) for ranks in lists.values()))
    numbers = (n for n in range(2, common + 1) if common % n == 0)
    return [n for n in numbers if not lost_with_host(lists, n, hosts)]


def judge(sizes: Sizes, replicas: int | None, hosts: Sequence[str]) -> Finding | None:
    """What is lost with one host, and the remedy; None: nothing is.

    Args:
        replicas: at least 2; None and `hosts` as for `lost_with_host`.
    """
    lists = data_parallel_lists(sizes)
    lost = lost_with_host(lists, replicas, hosts)
    if not lost:
        return None
    if len(set(hosts)) == 1:
        return Finding(
            f"all {len(hosts)} ranks run on one host ({hosts[0]}), whose loss takes all holders of every shard along",
            "use two or more hosts",
            alone=True,
        )
    host, shards = max(lost.items(), key=lambda item: len(item[1]))  # the first of the worst
    others = f", and {count(len(lost) - 1, 'more host')} would take shards along as well" if len(lost) > 1 else ""
    reason = f"with host {host} all holders of {count(len(shards), 'shard')} would be lost ({some(shards)}){others}"
    return Finding(reason, _remedy(sizes, replicas, hosts))


def _remedy(sizes: Sizes, replicas: int | None, hosts: Sequence[str]) -> str:
    """What works with these hosts, if anything does."""
    order = f"{'leave out' if sizes.data_last else 'add'} {ORDER_FLAG}"
    lists, exchanged = data_parallel_lists(sizes), sizes.exchanged()
    others = data_parallel_lists(exchanged) if exchanged else {}
    ways = [order] if others and not lost_with_host(others, replicas, hosts) else []
    if replicas is not None:
        ways += [f"set {FLAG} to {n}" for n in fitting(lists, hosts)[:1]]
        if not ways and others:
            ways += [f"{order} and set {FLAG} to {n}" for n in fitting(others, hosts)[:1]]
    if ways:
        return " or ".join(ways)
    for name, ranks in lists.items():
        if len({hosts[rank] for rank in ranks}) == 1:
            place = f"those of {name} are the ranks {some(ranks)}, all on host {hosts[ranks[0]]}"
            return f"spread the data-parallel ranks of every part over more than one host: {place}"
    return f"spread the ranks over the hosts so that the holders of each shard meet two, which no {FLAG} does here"
