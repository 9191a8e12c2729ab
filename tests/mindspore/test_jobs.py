"""Real jobs of two ranks under an unmodified msrun, on CPU. What is proved ends in a comparison of all bytes."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_clusterd import Cluster, Server
from mindspore_jobs import STEPS, Final, Job, Jobs
from ports import free_port

if TYPE_CHECKING:
    from tests.conftest import Processes


def tftctl(processes: Processes, job: Job, *words: str, ok: bool = True) -> dict[str, Any]:
    """One command to the one job of this host that the test has started, and its answer."""
    command = [sys.executable, "-m", "mindspeed_tft.cli.main", *words, "--json", "--timeout", "60s", "--job", job.run]
    output, _ = processes.start(command).communicate(timeout=90)
    answer: dict[str, Any] = json.loads(output)
    assert answer["ok"] is ok, f"{answer} {job.told()}"
    return answer


def steps(job: Job, rank: int) -> list[int]:
    return [int(found) for found in re.findall(r"^step (\d+) ", job.log(rank), re.M)]


def same(job: Job, unbroken: Final) -> None:
    for rank in (0, 1):
        final = job.final(rank)
        assert final.keys() == unbroken[rank].keys() and len(final) > 15
        assert [name for name, value in final.items() if value != unbroken[rank][name]] == []


def test_pause_save_and_resume_without_an_agent(jobs: Jobs, processes: Processes, unbroken: Final) -> None:
    job = jobs.start(plugin={}, slow=0.8)
    job.wait_for_step(3)
    assert "no dying gasp is possible" in job.log(0) and "no dying gasp is possible" not in job.log(1)

    paused = tftctl(processes, job, "pause")["data"]["step"]
    time.sleep(2.5)  # three steps, if they were not held
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
    job = jobs.start(plugin={"tft_hang_seconds": 3.0}, tft="{TTP:1}", agent=True, fault=fault, mode=mode, late=True)
    assert job.end() == 0, job.told()
    assert "from step 8" in job.log(0) and "from step 8" in job.log(1), job.told()
    assert "the job is started again, 1 of 3 times" in job.output
    kept = (job.logs / "worker_0.log.0").read_text(errors="replace")
    assert "from step 0" in kept and "from step 0" not in job.log(0)
    if mode:  # by the agent alone, because msrun waits 30 s for such workers, and says that they failed
        plain = jobs.start(tft="{RSC:1}", agent=True, mode=mode)
        assert plain.end() == 0, plain.told()
        unbroken = {rank: plain.final(rank) for rank in (0, 1)}
    same(job, unbroken)
    (incident,) = (job.save / "tft_incidents").glob("*.json")
    assert json.loads(incident.read_text())["outcome"] == "dumped"
    assert job.left() == []


def test_clusterd_decides_what_a_lost_rank_leads_to(jobs: Jobs, unbroken: Final, tmp_path: Path) -> None:
    """It is offered what this framework can do, a dump or an exit, and told what came of it."""
    server = Server(Cluster(job="ms")).start()
    try:
        fault = {"step": 9, "rank": 1, "signal": "SIGKILL", "mark": str(tmp_path / "mark")}
        plugin = {"tft_clusterd": f"http://{server.target}", "tft_clusterd_job": "ms"}
        job = jobs.start(plugin=plugin, tft="{TTP:1}", agent=True, fault=fault)
        assert job.end() == 0, job.told()
    finally:
        server.stop()
    assert (server.cluster.offered, server.cluster.log) == (("dump", "exit"), ["dump", "dump 0"]), job.told()
    assert server.cluster.violations == []
    assert "from step 8" in job.log(0) and "the job is started again, 1 of 3 times" in job.output
    same(job, unbroken)


def test_a_job_that_is_not_started_again_says_so_by_its_status(jobs: Jobs, tmp_path: Path) -> None:
    fault = {"step": 9, "rank": 0, "signal": "SIGKILL", "mark": str(tmp_path / "mark")}
    env = {"TFT_MSRUN_RESTARTS": "0"}
    job = jobs.start(plugin={}, tft="{TTP:1}", agent=True, fault=fault, env=env)
    assert job.end() == 75, job.told()
    assert (job.save / "latest_step.txt").read_text() == "8"
    assert job.left() == []


def asked(job: Job, rank: int) -> list[list[list[int]]]:
    """What the handler of link switches was asked for on a rank."""
    path = job.out.with_name(f"links-{rank}")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("tsp", [False, True], ids=["callback", "TrainFaultTolerance"])
def test_links_are_switched_between_two_steps_and_back(
    jobs: Jobs, processes: Processes, unbroken: Final, tmp_path: Path, tsp: bool
) -> None:
    links = str(tmp_path / "job0" / "links")
    env = {"MS_TFT_IP": "127.0.0.1", "MS_TFT_PORT": str(free_port())}
    words: dict[str, Any] = {"tft": "{TSP:1}", "env": env, "tsp": True} if tsp else {"plugin": {}}
    job = jobs.start(links=links, slow=0.8, **words)
    job.wait_for_step(2)
    paused = tftctl(processes, job, "pause")["data"]["step"]
    moved = tftctl(processes, job, "switch-link", "backup")["data"]
    assert (moved["link"], moved["before"], moved["step"]) == ("backup", "default", paused)
    assert tftctl(processes, job, "resume")["data"]["step"] == paused
    back = tftctl(processes, job, "switch-back")["data"]
    assert (back["link"], back["before"]) == ("default", "backup") and back["step"] > paused
    assert job.end() == 0, job.told()
    assert asked(job, 0) == asked(job, 1) == [[[0, 1], [True, True]], [[0, 1], [False, False]]]
    same(job, unbroken)


def test_a_link_that_cannot_be_used_is_put_back(
    jobs: Jobs, processes: Processes, unbroken: Final, tmp_path: Path
) -> None:
    job = jobs.start(plugin={}, links=str(tmp_path / "job0" / "links"), refuse=True, slow=0.6)
    job.wait_for_step(2)
    answer = tftctl(processes, job, "switch-link", "backup", ok=False)
    assert "Link default is put back" in answer["text"]
    assert job.end() == 0, job.told()
    assert asked(job, 0)[-1] == [[0, 1], [False, False]]
    same(job, unbroken)


def test_a_script_that_nobody_edits(jobs: Jobs, unbroken: Final, tmp_path: Path) -> None:
    fault = {"step": 9, "rank": 1, "signal": "SIGKILL", "mark": str(tmp_path / "mark")}
    job = jobs.start(tft="{TTP:1,TSP:1}", agent=True, edited=False, fault=fault)
    assert job.end() == 0, job.told()
    assert (job.save / "latest_step.txt").read_text() == "8"
    assert "the job is started again, 1 of 3 times" in job.output
    same(job, unbroken)


@pytest.mark.parametrize("calls", [False, True])
def test_epochs_go_on_where_they_were(jobs: Jobs, tmp_path: Path, calls: bool) -> None:
    """The rest of an epoch first, then the others whole; also where each is a call of `Model.train` of its own, of
    which only the first may load anything."""
    whole = jobs.start(epochs=4, ranks=1, calls=calls)
    assert whole.end() == 0, whole.told()
    fault = {"step": 7, "rank": 0, "signal": "SIGTERM", "mark": str(tmp_path / "mark")}
    job = jobs.start(tft="{TTP:1}", agent=True, edited=False, epochs=4, ranks=1, fault=fault, slow=0.3, calls=calls)
    assert job.end() == 0, job.told()
    assert int((job.save / "latest_step.txt").read_text()) in range(6, 10)
    assert len(whole.final(0)) > 15 and job.final(0) == whole.final(0)
