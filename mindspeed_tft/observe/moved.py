"""What moved between ranks, what was written, and which hashes were compared. Pure: from an incident's content."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from mindspeed_tft.engine.repair import DIGEST, MOVED

Content = Mapping[str, Any]


def transfers(content: Content) -> list[dict[str, Any]]:
    """Each shard that went from a holder to another rank: {shard, source, source_host, target, target_host, bytes,
    seconds, gb_per_s, ok}; GB are 10^9 bytes.

    Bytes, seconds and rate are None where nobody told them. The seconds are those of the target, from the moment at
    which it turned to this transfer until the shard was in place and its hash checked.
    """
    host = {info["rank"]: info["host"] for info in content["ranks"]}
    told: dict[str, dict[int, tuple[int, float]]] = defaultdict(dict)
    wanted: dict[str, bool] = {}
    for order in content["orders"]:
        if order["kind"] != "repair":
            continue
        for name in order["payload"]["transfers"]:
            if str(order["rank"]) in name.split("|")[1:]:
                wanted[name] = wanted.get(name, True) and bool(order.get("ok"))
        for key, value in order.get("result", {}).items():
            if key.startswith(MOVED):
                moved, seconds = value.split()
                told[key.removeprefix(MOVED)][order["rank"]] = int(moved), float(seconds)
    found = []
    for name, ok in wanted.items():
        shard, source, target = name.split("|")
        sides = told.get(name, {})
        moved = max((side[0] for side in sides.values()), default=None)
        seconds = sides.get(int(target), sides.get(int(source), (0, None)))[1]
        found.append(
            {
                "shard": shard,
                "source": int(source),
                "source_host": host.get(int(source), ""),
                "target": int(target),
                "target_host": host.get(int(target), ""),
                "bytes": moved,
                "seconds": seconds,
                "gb_per_s": rate(moved, seconds),
                "ok": ok,
            }
        )
    return found


def writes(content: Content) -> list[dict[str, Any]]:
    """Each part of a checkpoint that was written: {part, writer, host, sources, files, bytes, seconds, gb_per_s, ok}.
    `sources`: shard id -> "self" or "rank:<r>"."""
    host = {info["rank"]: info["host"] for info in content["ranks"]}
    found = []
    for order in content["orders"]:
        if order["kind"] != "write_part":
            continue
        result, seconds = order.get("result", {}), order.get("seconds")
        size = int(result["bytes"]) if "bytes" in result else None
        found.append(
            {
                "part": order["payload"]["part"],
                "writer": order["rank"],
                "host": host.get(order["rank"], ""),
                "sources": order["payload"]["sources"],
                "files": int(result["files"]) if "files" in result else None,
                "bytes": size,
                "seconds": seconds,
                "gb_per_s": rate(size, seconds),
                "ok": bool(order.get("ok")),
            }
        )
    return found


def rate(size: int | None, seconds: float | None) -> float | None:
    """GB/s, GB being 10^9 bytes."""
    return round(size / seconds / 1e9, 4) if size and seconds else None


def hashes(content: Content) -> list[dict[str, Any]]:
    """What holders of a shard said of it, for each shard and step: {shard, step, holders, compared, agree}.

    A holder is [rank, hash now, hash after its last update or ""]. `agree`: all that was told of this shard at this
    step is equal; `compared`: there was more than one word of it. Those that differ come first.
    """
    found: dict[tuple[str, int], list[list[Any]]] = defaultdict(list)
    for report in content["reports"]:
        step = report["step"] if report["update"] == "done" else report["step"] - 1
        for shard, now in report.get("digests", {}).items():
            found[shard, step].append([report["rank"], now, report.get("stamps", {}).get(shard, "")])
    for order in content["orders"]:  # hashes that are known only since an update was finished
        if order["kind"] == "finish_update":
            for key, now in order.get("result", {}).items():
                if key.startswith(DIGEST):
                    found[key.removeprefix(DIGEST), order["payload"]["step"]].append([order["rank"], now, ""])
    rows = [
        {
            "shard": shard,
            "step": step,
            "holders": holders,
            "compared": sum(bool(value) for _, *values in holders for value in values) > 1,
            "agree": _agree(holders),
        }
        for (shard, step), holders in sorted(found.items())
    ]
    return sorted(rows, key=lambda row: bool(row["agree"]))


def _agree(holders: list[list[Any]]) -> bool:
    """Stamps may lack the count of updates behind the colon: then only the hash itself is compared."""
    return len({value.partition(":")[0] for _, *values in holders for value in values if value}) <= 1
