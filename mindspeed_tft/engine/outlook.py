"""What a fault would lead to now: for an operator who wants to know before it happens.

The words follow the very rules of `stops` and `repair`; a test holds them against what the engine then does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from mindspeed_tft.engine.types import RankInfo
from mindspeed_tft.engine.words import count, ranks, some

GOES_ON = "training goes on"
ENDS_SAVED = "a dump"
ENDS_UNSAVED = "no newer checkpoint"


@dataclass(frozen=True)
class Prospect:
    """One kind of fault, and what it would lead to."""

    fault: str  # "process", "device memory", "link", "host"
    result: str  # one of the three above
    steps_lost: int  # completed steps that would be computed again
    text: str
    reason: str


@dataclass(frozen=True)
class Situation:
    """What the engine knows of a job in training."""

    strategies: Collection[str]
    step: int  # the last one that is complete
    checkpoint: int  # the last step whose checkpoint every rank has completed or loaded; 0: none
    alive: Mapping[int, RankInfo]
    one_way: bool = False  # some rank could not load it online

    @property
    def online(self) -> bool:
        return bool({"retry", "recover"} & set(self.strategies))

    @cached_property
    def holders(self) -> dict[str, set[int]]:
        """Shard id -> the ranks that live and hold it."""
        found: dict[str, set[int]] = {}
        for rank, info in self.alive.items():
            for shard in info.holds:
                found.setdefault(shard, set()).add(rank)
        return found

    @cached_property
    def on_hosts(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for rank, info in self.alive.items():
            found.setdefault(info.host, set()).add(rank)
        return found


def outlook(now: Situation) -> tuple[Prospect, ...]:
    """The faults of one process, one device's memory, one link and one host."""
    alone = sorted(shard for shard, holding in now.holders.items() if len(holding) == 1)
    return (_process(now, alone), _memory(now, alone), _link(now), _host(now))


def _process(now: Situation, alone: list[str]) -> Prospect:
    if alone:
        return _without_holder(now, "process", f"{_shards(alone)} on one rank only", "recover" in now.strategies)
    if "recover" in now.strategies:
        text = "only that process is started again and gets its state from a replica"
        return Prospect("process", GOES_ON, 0, text, "each shard has another holder")
    return _dump("process", "each shard has another holder; --enable-worker-reboot would start it again")


def _memory(now: Situation, alone: list[str]) -> Prospect:
    if alone:
        return _without_holder(now, "device memory", f"{_shards(alone)} on one rank only", now.online)
    if now.online:
        text = "the damaged state is rebuilt from a replica, no process is started again"
        return Prospect("device memory", GOES_ON, 0, text, "each shard has another holder")
    return _dump("device memory", "each shard has another holder; --enable-hbmfault-repair would repair it online")


def _link(now: Situation) -> Prospect:
    if now.online:
        text = "all process groups are built anew, no process is started again"
        return Prospect("link", GOES_ON, 0, text, "nobody's state is touched")
    return _dump("link", "nobody's state is touched; --enable-hbmfault-repair would repair it online")


def _host(now: Situation) -> Prospect:
    """Of the hosts, the one whose loss would cost most."""
    hosts = now.on_hosts
    if len(hosts) <= 1:
        kept = f"the checkpoint of step {now.checkpoint}" if now.checkpoint else "no checkpoint of this run"
        text = f"the job ends with its only host; what is left is {kept}"
        return Prospect("host", ENDS_UNSAVED, now.step - now.checkpoint, text, "all ranks are on one host")
    held_by: dict[str, list[str]] = {host: [] for host in sorted(hosts)}  # host -> shards that no other host has
    for shard, holding in sorted(now.holders.items()):
        places = {now.alive[rank].host for rank in holding}
        if len(places) == 1:
            held_by[places.pop()].append(shard)
    worst, gone = max(held_by.items(), key=lambda found: len(found[1]))
    if gone:
        reason = f"all holders of {_named(gone)} are on {worst} ({ranks(hosts[worst])})"
        return _without_holder(now, "host", reason, "recover" in now.strategies)
    if "recover" in now.strategies:
        text = "the others wait for a spare host or a replacement, whose processes get their state from replicas"
        return Prospect("host", GOES_ON, 0, text, "no shard has all its holders on one host")
    return _dump("host", "no shard has all its holders on one host")


def _dump(fault: str, reason: str) -> Prospect:
    return Prospect(fault, ENDS_SAVED, 0, "the others save the last completed step and the job exits", reason)


def _without_holder(now: Situation, fault: str, reason: str, rewinds: bool) -> Prospect:
    lost = now.step - now.checkpoint
    if rewinds and now.checkpoint and not now.one_way:
        again = f"{count(lost, 'step')} computed again"
        text = f"all ranks load the checkpoint of step {now.checkpoint} online, {again}"
        return Prospect(fault, GOES_ON, lost, text, reason)
    last = f"the last one is of step {now.checkpoint}" if now.checkpoint else "this run has none yet"
    return Prospect(fault, ENDS_UNSAVED, lost, f"the job ends without a new checkpoint; {last}", reason)


def _named(names: Collection[str]) -> str:
    return f"shard{'' if len(names) == 1 else 's'} {some(names)}"


def _shards(names: Collection[str]) -> str:
    return f"{_named(names)} {'is' if len(names) == 1 else 'are'}"


def protection(state: str, missing: int, now: Situation, lost: Mapping[int, str]) -> dict[str, str]:
    """How well the job is protected, in one word and in words for people."""
    if missing:
        return {"level": "none", "text": f"{count(missing, 'rank')} did not register yet"}
    if state != "training":
        return {"level": "busy", "text": f"an incident is being handled: {state}"}
    alone = [shard for shard, holding in now.holders.items() if len(holding) == 1]
    ways = [way for way, on in (("repair", now.online), ("reboot", "recover" in now.strategies), ("dump", True)) if on]
    if lost or alone:
        why = f"{ranks(lost)} gone" if lost else f"{_shards(alone)} on one rank only"
        return {"level": "degraded", "text": f"{', '.join(ways)}; {why}"}
    return {"level": "full", "text": f"{', '.join(ways)}; each shard has at least two holders"}
