"""Real jobs of two ranks under an unmodified msrun, on CPU. What is proved ends in a comparison of all bytes."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mindspore_jobs import STEPS, Final, Job, Jobs

if TYPE_CHECKING:
    from tests.conftest import Processes


def tftctl(processes: Processes, job: Job, *words: str) -> dict[str, Any]:
    """One command to a job, and its answer."""
    command = [sys.executable, "-m", "mindspeed_tft.cli.main", *words, "--json", "--timeout", "60s"]
    answer = json.loads(processes.run(command, timeout=90))
    assert answer["ok"], f"{answer} {job.told()}"
    return answer


def steps(job: Job, rank: int) -> list[int]:
    return [int(found) for found in re.findall(r"^step (\d+) ", job.log(rank), re.M)]


def same(job: Job, unbroken: Final) -> None:
    for rank in (0, 1):
        final = job.final(rank)
        assert final.keys() == unbroken[rank].keys() and len(final) > 15
        assert [name for name, value in final.items() if value != unbroken[rank][name]] == []


def test_pause_save_and_resume_without_an_agent(jobs: Jobs, processes: Processes, unbroken: Final) -> None:
    job = jobs.start(plugin={}, slow=0.25)
    job.wait_for_step(3)
    assert "no dying gasp is possible" in job.log(0) and "no dying gasp is possible" not in job.log(1)

    paused = tftctl(processes, job, "pause")["data"]["step"]
    time.sleep(1.5)  # six steps, if they were not held
    assert steps(job, 0)[-1] == steps(job, 1)[-1] == paused
    held = tftctl(processes, job, "dump")["data"]
    assert held["step"] == paused and Path(held["path"]).is_dir()
    assert tftctl(processes, job, "resume")["data"]["step"] == paused
    training = tftctl(processes, job, "dump")["data"]
    assert paused < training["step"] < STEPS
    assert job.end() == 0, job.told()
    same(job, unbroken)

    for saved in (held, training):
        tracker = job.save / "latest_step.txt"
        tracker.write_text(str(saved["step"]))
        again = jobs.start(plugin={"save": str(job.save)})
        assert again.end() == 0, again.told()
        assert steps(again, 0) == list(range(saved["step"] + 1, STEPS + 1))
        same(again, unbroken)


def test_a_wrong_bit_is_seen_by_the_comparison(jobs: Jobs, unbroken: Final) -> None:
    job = jobs.start(spoil=True)
    assert job.end() == 0, job.told()
    with pytest.raises(AssertionError):
        same(job, unbroken)


@pytest.mark.parametrize(("name", "mode"), [("SIGKILL", 0), ("SIGSTOP", 0), ("SIGKILL", 1)])
def test_a_lost_rank_costs_no_completed_step(jobs: Jobs, unbroken: Final, tmp_path: Path, name: str, mode: int) -> None:
    fault = {"step": 9, "rank": 1, "signal": name, "mark": str(tmp_path / "mark")}
    job = jobs.start(plugin={"tft_hang_seconds": 3.0}, tft="{TTP:1}", agent=True, fault=fault, mode=mode)
    assert job.end() == 0, job.told()
    assert "from step 8" in job.log(0) and "from step 8" in job.log(1), job.told()
    assert "the job is started again, 1 of 3 times" in job.output
    if mode == 0:
        same(job, unbroken)
    (incident,) = (job.save / "tft_incidents").glob("*.json")
    assert json.loads(incident.read_text())["outcome"] == "dumped"
    assert job.left() == []


def test_a_job_that_is_not_started_again_says_so_by_its_status(jobs: Jobs, tmp_path: Path) -> None:
    fault = {"step": 9, "rank": 0, "signal": "SIGKILL", "mark": str(tmp_path / "mark")}
    env = {"TFT_MSRUN_RESTARTS": "0"}
    job = jobs.start(plugin={}, tft="{TTP:1}", agent=True, fault=fault, env=env)
    assert job.end() == 75, job.told()
    assert (job.save / "latest_step.txt").read_text() == "8"
    assert job.left() == []
