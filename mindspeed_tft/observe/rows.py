"""The lanes of an incident for the eye: a row for each rank, or, where there are too many, for those that matter and
for each host. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Content = Mapping[str, Any]

MOST_RANKS = 64  # with a row of their own each
MOST_NOTABLE = 32  # with a row of their own where hosts have one
MOST_HOSTS = 256  # with a row of their own each


@dataclass
class Row:
    """One line of the timeline. A segment: [stage, begin, end, 1 or 0, words, more about it]."""

    label: str
    short: str
    bad: bool = False
    did: str = ""
    faults: list[list[Any]] = field(default_factory=list)
    segments: list[list[Any]] = field(default_factory=list)


def rows(content: Content) -> list[Row]:
    """All rows, from the top."""
    lanes = content["lanes"]
    words = {rank: group["text"] for group in content["did"] for rank in group["ranks"]}
    broken = set(content["answers"]["broken"])
    if len(lanes) <= MOST_RANKS:
        ordered = sorted(lanes, key=lambda lane: (lane["host"], lane["rank"])) if _hosts(lanes) > 1 else lanes
        return [_row(lane, words, broken) for lane in ordered]
    notable = set(_notable(content))
    single = [_row(lane, words, broken) for lane in lanes if lane["rank"] in notable]
    return single + _by_host(lanes, broken)


def _hosts(lanes: Iterable[Mapping[str, Any]]) -> int:
    return len({lane["host"] for lane in lanes})


def _row(lane: Mapping[str, Any], words: Mapping[int, str], broken: set[int]) -> Row:
    rank, host = lane["rank"], lane["host"]
    segments = [[*segment, ""] for segment in lane["segments"]]
    label = f"rank {rank}" + (f" · {host}" if host else "")
    faults = [list(fault) for fault in lane["faults"]]
    return Row(label, f"rank {rank}", rank in broken, words.get(rank, ""), faults, segments)


def _notable(content: Content) -> list[int]:
    """Ranks that broke, failed or had something to give or to take, the first of them."""
    found: dict[int, None] = {}
    for lane in content["lanes"]:
        if lane["faults"]:
            found[lane["rank"]] = None
    for lane in content["lanes"]:
        if any(not segment[3] for segment in lane["segments"]):
            found[lane["rank"]] = None
    for moved in content["transfers"]:
        found.update(dict.fromkeys((moved["target"], moved["source"])))
    found.update(dict.fromkeys(part["writer"] for part in content["writes"]))
    return list(found)[:MOST_NOTABLE]


def _by_host(lanes: Sequence[Mapping[str, Any]], broken: set[int]) -> list[Row]:
    """A row for each host, or for as many hosts together as it takes."""
    members: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for lane in lanes:
        members[lane["host"]].append(lane)
    hosts = list(members)  # in the order of their ranks
    together = -(-len(hosts) // MOST_HOSTS)
    found = []
    for first in range(0, len(hosts), together):
        names = hosts[first : first + together]
        every = [lane for name in names for lane in members[name]]
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        found.append(_merged(f"{label} · {len(every)} ranks", names[0], every, broken))
    return found


def _merged(label: str, short: str, lanes: Sequence[Mapping[str, Any]], broken: set[int]) -> Row:
    """One row from the first to the last of these ranks, for each stage they went through."""
    groups: dict[tuple[str, int], list[tuple[float, float, int, int, str]]] = defaultdict(list)
    for lane in lanes:
        seen: dict[str, int] = defaultdict(int)
        for stage, begin, end, good, text in lane["segments"]:
            groups[stage, seen[stage]].append((begin, end, good, lane["rank"], text))
            seen[stage] += 1
    row = Row(label, short)
    for (stage, _), every in sorted(groups.items(), key=lambda item: min(item[1])[0]):
        begin, end = min(one[0] for one in every), max(one[1] for one in every)
        failed = [one for one in every if not one[2]]
        slowest = max(every, key=lambda one: one[1] - one[0])
        more = f"{len(every)} ranks; slowest rank {slowest[3]}: {slowest[1] - slowest[0]:.3f} s"
        text = f"{len(failed)} failed, rank {failed[0][3]}: {failed[0][4]}"[:200] if failed else ""
        row.segments.append([stage, begin, end, int(not failed), text, more])
    row.faults = [[at, f"rank {lane['rank']}: {text}"] for lane in lanes for at, text in lane["faults"]][:8]
    row.bad = any(lane["rank"] in broken for lane in lanes)
    return row
