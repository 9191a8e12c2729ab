"""Real Megatron, one job, many faults: it ends exact, and what a recovery leaves behind does not add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_tft.faults.spec import parse_fault

FAULTS = 50


@pytest.mark.megatron
@pytest.mark.full
@pytest.mark.parametrize("preset", ["retry", "recover"])
def test_one_job_survives_many_faults_and_nothing_adds_up(references: Path, tmp_path: Path, preset: str) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "mindspeed_tft.cli.main", "soak", "--preset", preset]
    command += ["--faults", str(FAULTS), "--json", str(file)]
    environ = {**os.environ, "TFT_DRILL_CACHE": str(references), "COLUMNS": "160"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800)
    output = ended.stdout + ended.stderr
    assert file.exists(), output
    report = json.loads(file.read_text())
    assert (ended.returncode, report["verdict"], report["reasons"]) == (0, "exact", []), output
    assert len(report["faults_fired"]) == FAULTS
    assert report["tries_of_all"] >= report["repairs"] > FAULTS / 2
    assert (report["compared"]["different"], report["steps_lost"]) == (0, 0)
    died = {fault.rank for fault in map(parse_fault, report["faults_fired"]) if fault.ends_process}
    assert report["processes_restarted"] == sorted(died)
    assert bool(died) is (preset == "recover")
    assert report["compared"]["tensors"] > 30
    assert report["levels"]  # a rank that is still destroying an old group at the end is not judged
    for levels in report["levels"].values():
        for name in ("threads", "files", "groups"):
            assert levels["first"][name] == levels["last"][name] > 0
