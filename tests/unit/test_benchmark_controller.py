"""The benchmark of the controller: it measures what it says, and gives no number for what did not happen."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "controller.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(PROGRAM.parent))  # as for a program that is run
    spec = importlib.util.spec_from_file_location("benchmark_of_the_controller", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(PROGRAM.parent))
    return module


def test_a_quick_run_leads_256_ranks_through_a_reboot_and_a_dump(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, str(PROGRAM), "--quick", "--json", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (size,) = json.loads(file.read_text())["sizes"]
    carried: dict[str, Any] = size["carried"]
    (repair,) = carried["repairs"]
    assert size["ranks"] == 256 and size["hosts"] == 32
    assert (
        repair["orders"] == 3 * 256 + 3
    )  # regroup, rollback, resume; repair: one rank, who gives a shard, who the rest
    assert 0 < repair["stop"] < repair["first_order"] + repair["stop"] < repair["repair"] < repair["settled"]
    assert 0 < repair["cpu_stop"] + repair["cpu_first_order"] < repair["cpu"]
    assert carried["dump"] > 0 and carried["cpu_dump"] > 0 and 0 < carried["healthy"] < 1
    (engine,), (codec,), (recorder,) = (size["layers"][name] for name in ("engine", "codec", "recorder"))
    assert 0 < engine < codec < recorder
    assert "whole repair" in ended.stdout and "first order" in ended.stdout


def test_a_stage_is_over_with_the_last_rank_only(bench: ModuleType) -> None:
    said: list[str] = []
    tally = bench.Tally(3, bench.t.OrderKind.RESUME, said.append)
    for rank in (0, 1, 1, 1):
        tally.stopped(rank)
    assert not tally.at and not said
    tally.stopped(2)
    for rank in (2, 0):
        tally.ordered(rank, "regroup")
        tally.ordered(rank, "resume")
    assert said == ["stop"]
    tally.ordered(1, "regroup")
    assert said == ["stop", "first order"]
    tally.ordered(1, "resume")
    assert said == ["stop", "first order", "last order"]
    assert tally.at["stop"] <= tally.at["first order"] <= tally.at["last order"]


def test_growth_is_that_of_one_rank_more(bench: ModuleType) -> None:
    assert bench.growth([256, 1024, 4096], [0.5 + 0.001 * n for n in (256, 1024, 4096)]) == pytest.approx(0.001)
    assert bench.growth([256], [0.512]) == pytest.approx(0.002)


def test_a_controller_that_dies_has_no_numbers(bench: ModuleType, tmp_path: Path) -> None:
    job = bench.Bench(bench.Shape(64, 8, 0.1), tmp_path)
    os.kill(job._process._process.pid, signal.SIGKILL)
    with pytest.raises(bench.NotCarried, match="ended with -9"):
        asyncio.run(job.run(1, 0.1))


def test_a_size_that_is_no_whole_number_of_hosts_is_refused() -> None:
    command = [sys.executable, str(PROGRAM), "--ranks", "100"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "--ranks 100: expected a multiple of 64" in ended.stderr
