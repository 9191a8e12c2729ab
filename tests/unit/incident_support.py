"""Incidents for tests: real files, and one of many ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_tft.engine import types as t
from mindspeed_tft.observe.report import Case

HERE = Path(__file__).parent / "incidents"
FILES = tuple(sorted(path.stem for path in HERE.glob("*.json")))


def content(name: str) -> dict[str, Any]:
    """A fresh copy of a real incident."""
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return found


def thousands(number: int, per_host: int, lost: Iterable[int]) -> dict[str, Any]:
    """The bare facts of a reboot of `number` ranks, in data-parallel pairs: these ranks are lost and come again."""
    infos = {
        rank: t.RankInfo(rank, f"host{rank // per_host}", 1000 + rank, "tp0-pp0", rank, (f"tp0-pp0/dense/{rank // 2}",))
        for rank in range(number)
    }
    gone = sorted(lost)
    alive = tuple(rank for rank in infos if rank not in gone)
    bare = {rank: t.RankReport(rank, 0, t.Commit.NONE, t.Update.UNTOUCHED, trusted=False) for rank in gone}
    items: list[tuple[float, t.Event | t.Action]] = [
        *((10.0, t.RankLost(10.0, rank, f"process {1000 + rank} ended", 1000 + rank)) for rank in gone),
        (10.0, t.Note("stop", f"stopping {len(alive)} ranks")),
        (10.0, t.Stop(1, alive, "a rank is gone")),
        *((10.1 + rank * 1e-5, t.Reported(0.0, _report(rank))) for rank in alive),
        *((12.0, t.Registered(12.0, replace(infos[rank], pid=9000 + rank))) for rank in gone),
        *((12.5, t.Reported(12.5, bare[rank])) for rank in gone),
    ]
    order = 0
    for when, kind in ((13.0, t.OrderKind.REGROUP), (14.0, t.OrderKind.ROLLBACK), (15.0, t.OrderKind.RESUME)):
        items.append((when, t.Note(kind.value, f"{kind.value} to everybody")))
        for rank in infos:
            order += 1
            items.append((when, t.Order(order, rank, kind, {"step": 6, "epoch": 1})))
            items.append((when + 0.5 + rank * 1e-6, t.OrderDone(0.0, rank, order, True)))
    case = Case("many", 1, 10.0, 1_700_000_000.0, items, infos)
    engine = {
        "world_size": number,
        "furthest_step": 6,
        "faults": [{"rank": rank, "kind": "lost", "message": "gone", "own": True} for rank in gone],
        "replaced": {str(rank): {} for rank in gone},
        "repairs": [],
    }
    plain = json.loads(json.dumps(case.report("rebooted", 6, "Repaired online.", 16.0), default=vars))
    return {**plain, "engine": engine}


def _report(rank: int) -> t.RankReport:
    return t.RankReport(rank, 7, t.Commit.NONE, t.Update.UNTOUCHED, epoch=1)
