"""Swappable groups on real gloo: the same results as plain groups, and nobody stays blocked after an abort."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "groups_rank.py"
WORLD, VICTIM, FREE_WITHIN = 4, 1, 1.0
BLOCKED_IN = {0: "reduce_scatter", 1: "nothing", 2: "recv", 3: "coalesced"}  # the survivors each in another operation


def run(tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Start all ranks; once the survivors block, say abort. Returns the (word, data) lines of all ranks."""
    store = tmp_path / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(WORLD), str(store), BLOCKED_IN[rank], str(VICTIM)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    lines: list[tuple[str, dict[str, Any]]] = []
    noise: list[str] = []
    blocking = threading.Barrier(WORLD, action=(tmp_path / "store.abort").touch)

    def read(process: subprocess.Popen[str], rank: int) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word, _, data = line.partition(" ")
            if data.startswith("{"):
                lines.append((word, json.loads(data)))
            else:
                noise.append(f"{rank}: {line}")
            if word == "BLOCKING":
                blocking.wait(60)

    readers = [threading.Thread(target=read, args=(process, rank)) for rank, process in enumerate(ranks)]
    for reader in readers:
        reader.start()
    try:
        assert ranks[VICTIM].wait(60) == -9, "".join(noise)
        blocking.wait(60)
        codes = [process.wait(60) for rank, process in enumerate(ranks) if rank != VICTIM]
    finally:
        for process in ranks:
            process.kill()
        for reader in readers:
            reader.join(10)
    assert codes == [0, 0, 0], "".join(noise)
    return lines


def test_same_results_and_everybody_comes_out(tmp_path: Path) -> None:
    lines = run(tmp_path)
    results = {data["rank"]: data["values"] for word, data in lines if word == "RESULT"}
    for rank in range(WORLD):
        everybody = [float(r) for r in range(WORLD)]
        assert results[rank] == [
            "gloo", "gloo", "SwappableGroup",
            [6.0] * 3, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0],
            [4.0 * (2 * rank), 4.0 * (2 * rank + 1)], everybody, [2.0, 2.0], everybody, everybody,
            [float((rank - 1) % WORLD)] * 2, *({"rank": r} for r in range(WORLD)),
        ]  # fmt: skip
    free = {data["rank"]: data["seconds"] for word, data in lines if word == "FREE"}
    assert sorted(free) == [0, 2, 3]
    assert max(free.values()) < FREE_WITHIN, free
