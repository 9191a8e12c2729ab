"""The examples come to command lines that the plugin takes, and what is wrong with one is seen."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Processes


@pytest.fixture(scope="module")
def checker(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_examples", root / "scripts" / "check_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_all_examples_hold(checker: ModuleType) -> None:
    assert list(checker.check_all(megatron=False)) == []


@pytest.mark.full
@pytest.mark.megatron
def test_megatron_knows_their_other_flags(processes: Processes, root: Path) -> None:
    said = processes.run([sys.executable, root / "scripts" / "check_examples.py", "--megatron"], timeout=120)
    assert "0 things wrong" in said


BROKEN: list[tuple[str, str, str, str]] = [
    ("llama2_70b_npu.sh", "--tft-deadline 600", "--tft-dedline 600", "did you mean --tft-deadline"),
    ("llama2_70b_npu.sh", "--nproc-per-node 16", "--nproc-per-node 8", "makes 64 ranks, not 128"),
    ("llama2_70b_npu.sh", "WHAT IS NOT PROVED YET", "WHAT WORKS", "does not say"),
    ("llama2_70b_npu.sh", "set -euo pipefail", "", "does not end at its first error"),
    ("slurm.sbatch", "--tft-config recover", "--tft-config recovery", "neither a preset nor a file"),
    ("slurm.sbatch", '-- "${FLAGS[@]}"', '-- "${FLAGS[@]:1}"', "looks at other flags"),
    ("slurm.sbatch", "exec tftrun", "exec torchrun", "starts ['tftctl', 'torchrun']"),
    ("slurm.sbatch", "  --mock-data", ")\n  --mock-data", "line "),
    ("kubernetes/job.yaml", "subdomain: gpt", "subdomain: other", "subdomain is not the service gpt"),
    ("kubernetes/job.yaml", "tls/gpt-$(NODE)", "tls/gpt-$(NOD)", "there is no variable NOD"),
    ("kubernetes/job.yaml", "completions: 4", "completions: 3", "completions = parallelism"),
    ("kubernetes/job.yaml", "clusterIP: None", "type: ClusterIP", "headless"),
    ("kubernetes/volcano.yaml", "minAvailable: 4", "minAvailable: 3", "minAvailable 3 of 4"),
    ("kubernetes/volcano.yaml", "action: RestartPod", "action: RestartJob", "a lost pod alone"),
    ("kubernetes/volcano.yaml", "- name: memory", "- name: memori", "there is no volume memory"),
    ("kubernetes/ascendjob-pytorch.yaml", "retry,recover-in-place", "retry,recover-inplace", "'retry,recover-inplace"),
    ("kubernetes/ascendjob-pytorch.yaml", 'fault-scheduling: "force"', 'fault-scheduling: "hard"', "use one of grace"),
    ("kubernetes/ascendjob-pytorch.yaml", "    recover-strategy:", "    strategy:", "ClusterD leaves the job alone"),
    ("kubernetes/ascendjob-pytorch.yaml", "containerPort: 9601", "containerPort: 9602", "port taskd-port is not 9601"),
    ("kubernetes/ascendjob-pytorch.yaml", "name: ascend  #", "name: train  #", "by its name: ascend"),
    ("kubernetes/ascendjob-pytorch.yaml", "minAvailable: 8", "minAvailable: 7", "minAvailable is not 8"),
    ("kubernetes/ascendjob-mindspore.yaml", "{TTP:1,TSP:1}", "TTP,TSP", "MS_ENABLE_TFT"),
    ("kubernetes/ascendjob-mindspore.yaml", "    Scheduler:", "    Master:", "['Scheduler', 'Worker']"),
    ("kubernetes/ascendjob-mindspore.yaml", "reset-config-llama-ms", "reset-config", "is not mounted at"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "right", "wrong", "said"), BROKEN, ids=[f"{row[0]}-{row[3][:20]}" for row in BROKEN])
def test_what_is_broken_is_seen(
    checker: ModuleType,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    right: str,
    wrong: str,
    said: str,
) -> None:
    """The control of the test above: one change to one example, each caught."""
    copy = tmp_path / "examples"
    shutil.copytree(root / "examples", copy)
    text = (copy / path).read_text()
    assert right in text
    (copy / path).write_text(text.replace(right, wrong))
    monkeypatch.setattr(checker, "EXAMPLES", copy)
    check: Callable[..., list[str]] = checker.check_shell if not path.endswith(".yaml") else checker.check_manifest
    found = [*check(copy / path)]
    found += [text for example in checker.RUNS if example.path == path for text in checker.check_run(example, False)]
    assert any(said in text for text in found), found


def test_an_example_that_nobody_runs_is_seen(
    checker: ModuleType, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root / "examples", tmp_path / "examples")
    (tmp_path / "examples" / "new.sh").write_text("#!/usr/bin/env bash\n")
    monkeypatch.setattr(checker, "EXAMPLES", tmp_path / "examples")
    monkeypatch.setattr(checker, "RUNS", ())
    assert ("new.sh", "nothing says how it is run: add it to RUNS") in list(checker.check_all(megatron=False))
