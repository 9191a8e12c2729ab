"""TaskD's worker lines in a script of MindSpore, under an unmodified msrun: nothing else of the script is changed."""

from __future__ import annotations

import os
from pathlib import Path

from mindspore_jobs import NAMES, ROOT, Final, Jobs


def test_the_worker_lines_protect_a_job(jobs: Jobs, unbroken: Final, tmp_path: Path) -> None:
    """A rank is killed: the agent that msrun finds under TaskD's name starts the job again, and every byte is right."""
    fault = {"step": 9, "rank": 1, "signal": "SIGKILL", "mark": str(tmp_path / "mark")}
    env = {"TFT_MS_SAVE": str(tmp_path / "save"), "PYTHONPATH": os.pathsep.join(map(str, (NAMES, ROOT)))}
    job = jobs.start(tft="{TTP:1}", fault=fault, program="taskd_worker.py", env=env)
    assert job.end() == 0, job.told()
    for rank in (0, 1):
        assert f"TaskD's worker of rank {rank}: True" in job.log(rank), job.told()
        assert len(unbroken[rank]) > 15 and job.final(rank) == unbroken[rank], job.told()
    assert "the job is started again, 1 of 3 times" in job.output
    assert (tmp_path / "save" / "latest_step.txt").read_text() != "0"
    assert job.left() == []
