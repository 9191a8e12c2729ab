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
    for fault in own:
        follows = fault["kind"] == "lost" and any(
            other["rank"] == fault["rank"] and other["kind"] in _ENDS for other in causes
        )
        if fault["kind"] != "terminated" and not follows:
            causes.append(fault)
    return causes or own


def losses(content: Content) -> list[dict[str, Any]]:
    """Processes that were lost, in order: of those that had been told to leave, the end is none."""
    told = {order["rank"]: float(order["t"]) for order in content["orders"] if order["kind"] == "exit"}
    lost = [fault for fault in content["faults"] if fault.get("what") == "RankLost"]
    return [fault for fault in lost if float(fault["t"]) < told.get(fault["rank"], float("inf"))]


def flipped(fault: Mapping[str, Any]) -> bool:
    """The rank found that a shard has another hash than after its last update."""
    return "has hash" in fault["message"] and "shard" in fault["message"]
