"""A real Megatron job started by TaskD's scripts: its manager keeps our controller, the edited torchrun our relay, and
a killed rank costs no byte."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from taskd_support import MANAGER, edited_launcher

from mindspeed_tft import names
from mindspeed_tft.control.config import ENV_JOB
from mindspeed_tft.faults import gpt_job, jobs
from mindspeed_tft.faults.plans import Plan
from mindspeed_tft.faults.rehearsal import rehearse
from mindspeed_tft.faults.spec import parse_fault, parse_layout

from .conftest import Quiet

if TYPE_CHECKING:
    from tests.conftest import Processes

_JOB = "job-of-a-drill"
pytestmark = [pytest.mark.megatron, pytest.mark.full]


@pytest.mark.parametrize(
    ("preset", "fault", "launcher"),
    [("dump", "kill@1:7:update", "torchrun"), ("recover", "kill@2:7:backward", "torchrun-logs-specs")],
)
def test_a_killed_rank_under_a_manager(
    preset: str,
    fault: str,
    launcher: str,
    root: Path,
    references: Path,
    tmp_path: Path,
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, edited = jobs.LAUNCHERS[launcher], edited_launcher(tmp_path)

    def launch(size: jobs.Size, program: str, words: Sequence[str]) -> jobs.Commands:
        commands = stock(size, program, words)
        if words[0] != gpt_job.WITH_PLUGIN:
            return commands
        plain = ("-m", "torch.distributed.run")
        (command,) = commands
        assert command[1:3] == plain and program in command
        ours = [word for word in command[3:] if word not in ("--logs-specs", "mindspeed_tft")]
        # A drill drops what a cluster says: its jobs get exactly what they are given.
        named = ("/usr/bin/env", f"{ENV_JOB}={_JOB}")
        return ((*named, command[0], str(edited), *("taskd_gpt" if word == program else word for word in ours)),)

    monkeypatch.setattr(jobs, "LAUNCHERS", {**jobs.LAUNCHERS, launcher: launch})
    programs = root / "tests" / "megatron" / "programs"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(names.directory("taskd")), str(programs)]))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    manager = processes.start([sys.executable, "-c", MANAGER.format(ranks=4)], env={ENV_JOB: _JOB})
    assert manager.stdout is not None and "waits for its rank 0" in manager.stdout.readline()

    work = tmp_path / "job"
    work.mkdir()
    plan = Plan(parse_layout("dp4"), (parse_fault(fault),), preset=preset, launcher=launcher, timeout=120.0)
    report = rehearse(plan, work, references, Quiet())
    log = (work / "broken.log").read_text()
    assert "the relay of node 0 is here" in log, log[-6000:]
    told, _ = manager.communicate(timeout=60)
    compared = report.evidence.comparisons
    both = f"{log[-6000:]}\n----- manager\n{told}"
    assert (report.verdict.name, report.reasons, report.evidence.leftover) == ("EXACT", (), ()), both
    assert [entry.different for entry in compared] == [0] * len(compared) != [], both
    assert all(f"TaskD's worker of rank {rank}: True" in log for rank in range(4)), both
    assert "the controller of 4 ranks is here: no port, on a single host" in told
    assert manager.returncode == 0 and "job job-of-a-drill is over" in told and "over: True" in told, both
