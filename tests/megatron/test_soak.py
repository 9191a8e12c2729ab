"""Real Megatron, one job, many faults: it ends exact, and what a recovery leaves behind does not add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = 50


@pytest.mark.megatron
@pytest.mark.full
def test_one_job_survives_many_faults_and_nothing_adds_up(references: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "mindspeed_tft.cli.main", "soak", "--faults", str(FAULTS), "--json", str(file)]
    environ = {**os.environ, "TFT_DRILL_CACHE": str(references), "COLUMNS": "160"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    output = ended.stdout + ended.stderr
    assert file.exists(), output
    report = json.loads(file.read_text())
    assert (ended.returncode, report["verdict"], report["reasons"]) == (0, "exact", []), output
    assert len(report["faults_fired"]) == FAULTS
    assert report["tries_of_all"] >= report["repairs"] > FAULTS / 2
    assert (report["compared"]["different"], report["processes_restarted"], report["steps_lost"]) == (0, [], 0)
    assert report["compared"]["tensors"] > 30
    assert report["levels"]  # a rank that is still destroying an old group at the end is not judged
    for levels in report["levels"].values():
        for name in ("threads", "files", "groups"):
            assert levels["first"][name] == levels["last"][name] > 0
