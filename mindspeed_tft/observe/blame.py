"""Which of the faults of an incident are causes. Pure: from the content of an incident file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Content = Mapping[str, Any]

_ENDS = (
    "hang",
    "exception",
    "stopped",
    "device",
)  # after these the process goes: that it is lost then says nothing new


def own_faults(content: Content) -> list[dict[str, Any]]:
    """Faults that are a rank's own, in the order in which they were seen, each with its kind ("hang", "lost", ...).

    What only follows is left out: signals that a launcher sends to the others after a fault, and the end of a process
    after a fault that ends it.
    """
    told = content.get("engine", {}).get("faults") or content["faults"]
    own = [{"kind": "lost", **fault} for fault in told if fault.get("own", True)]
    causes: list[dict[str, Any]] = []
    ended: set[int] = set()
    for fault in own:
        follows = fault["kind"] == "lost" and fault["rank"] in ended
        if fault["kind"] != "terminated" and not follows:
            causes.append(fault)
        if fault["kind"] in _ENDS:
            ended.add(fault["rank"])
    return causes or own


def own_words(content: Content) -> list[dict[str, Any]]:
    """What was said of ranks themselves, in order: faults of their own, and processes that were lost. Of those that had
    been told to leave, the end is no loss."""
    left = {order["rank"]: float(order["t"]) for order in content["orders"] if order["kind"] == "exit"}
    return [
        fault
        for fault in content["faults"]
        if fault.get("own") or (lost(fault) and float(fault["t"]) < left.get(fault["rank"], float("inf")))
    ]


def lost(fault: Mapping[str, Any]) -> bool:
    """The process of the rank is gone."""
    return bool(fault.get("what") == "RankLost")


def flipped(fault: Mapping[str, Any]) -> bool:
    """The rank found that a shard has another hash than after its last update."""
    return "has hash" in fault["message"] and "shard" in fault["message"]
