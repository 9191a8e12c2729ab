"""A process breaks itself as ordered: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_tft.faults import inject
from mindspeed_tft.faults.spec import SpecError

# What a training loop does, without the training.
LOOP = """
import sys
from mindspeed_tft.faults.inject import reach
for step in range(1, 6):
    for phase in ("data", "forward", "forward", "backward", "grad-reduce", "clip", "commit", "update", "param-gather"):
        reach(phase, step)
        print("passed", step, phase, flush=True)
"""


def _loop(log: Path | None = None, rank: int = 1, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TFT_")}
    if log is not None:
        environ["TFT_DRILL_LOG"] = str(log)
    return subprocess.run(
        [sys.executable, "-c", LOOP],
        env={**kept, "RANK": str(rank), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("kind", "number"), [("kill", signal.SIGKILL), ("term", signal.SIGTERM), ("segv", signal.SIGSEGV)]
)
def test_signals_end_the_process(tmp_path: Path, kind: str, number: signal.Signals) -> None:
    log = tmp_path / "faults.jsonl"
    before = time.time()
    ended = _loop(log, TFT_DRILL_FAULTS=f"{kind}@1:3:backward")
    assert ended.returncode == -number
    passed = [line for line in ended.stdout.splitlines() if line.startswith("passed")]
    assert passed[-1] == "passed 3 forward"
    (line,) = log.read_text().splitlines()
    record = json.loads(line)
    assert (record["fault"], record["rank"], record["step"]) == (f"{kind}@1:3:backward", 1, 3)
    assert before <= record["wall"] <= time.time()
    assert f"drill: rank 1 fires {kind}@1:3:backward" in ended.stdout


def test_an_exception_is_raised_in_the_training_code() -> None:
    ended = _loop(TFT_DRILL_FAULTS="exc@1:2:update")
    assert ended.returncode == 1
    assert "DrillException: drill: exc@1:2:update" in ended.stderr
    assert "passed 2 commit" in ended.stdout
    assert "passed 2 update" not in ended.stdout


def test_a_fault_fires_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ = {"RANK": "1", "TFT_DRILL_FAULTS": "exc@1:3:forward", "TFT_DRILL_LOG": str(tmp_path / "log")}
    injector = inject.from_environment(environ)
    assert injector is not None
    injector.reach("forward", 2)
    injector.reach("update", 3)
    assert injector.due("forward", 3)
    assert not injector.due("forward", 2)
    with pytest.raises(inject.DrillException, match="exc@1:3:forward"):
        injector.reach("forward", 3)
    assert not injector.due("forward", 3)
    injector.reach("forward", 3)
    started_again = inject.from_environment(environ)
    assert started_again is not None
    started_again.reach("forward", 3)


def test_only_the_named_rank_breaks() -> None:
    assert _loop(rank=0, TFT_DRILL_FAULTS="kill@1:3:backward").returncode == 0


def test_several_faults_fire_in_turn(tmp_path: Path) -> None:
    environ = {"RANK": "0", "TFT_DRILL_FAULTS": "exc@0:2:update, exc@0:2:commit,exc@1:2:update"}
    injector = inject.from_environment(environ)
    assert injector is not None
    for phase in ("commit", "update"):
        with pytest.raises(inject.DrillException, match=phase):
            injector.reach(phase, 2)


def test_a_fault_without_phase_fires_at_the_seeded_one_and_says_which() -> None:
    ended = _loop(TFT_DRILL_FAULTS="kill@1:4", TFT_DRILL_SEED="5")
    assert ended.returncode == -signal.SIGKILL
    again = _loop(TFT_DRILL_FAULTS="kill@1:4", TFT_DRILL_SEED="5")

    def said(text: str) -> str:
        return text.partition("fires ")[2].split()[0]

    assert said(ended.stdout).startswith("kill@1:4:")
    assert said(ended.stdout) == said(again.stdout)


def test_without_the_variable_nothing_is_armed() -> None:
    assert inject.from_environment({"RANK": "1"}) is None
    assert inject.from_environment({"RANK": "1", "TFT_DRILL_FAULTS": " "}) is None


def test_a_launcher_that_inherits_the_variable_is_no_rank() -> None:
    assert inject.from_environment({"TFT_DRILL_FAULTS": "kill@0:3"}) is None


def test_nonsense_in_the_environment_is_an_error() -> None:
    with pytest.raises(SpecError, match="KIND@RANK"):
        inject.from_environment({"RANK": "1", "TFT_DRILL_FAULTS": "kill"})
    with pytest.raises(SpecError, match="TFT_DRILL_SEED='x'"):
        inject.from_environment({"RANK": "1", "TFT_DRILL_FAULTS": "kill@1:3", "TFT_DRILL_SEED": "x"})
