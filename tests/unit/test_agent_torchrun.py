"""Real launchers with toy workers: who is started again, who is not, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_support import TFTRUN, TORCHRUN, TORCHRUN_WITH_LOGS_SPECS, ToyJob, alive, until

from mindspeed_tft.patches import torch_elastic

TWO = ("--nproc-per-node", "2")
SECOND = 1.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ToyJob]:
    made = ToyJob(tmp_path)
    yield made
    made.end()


def logs(folder: Path, rank: int, name: str) -> str:
    (path,) = folder.rglob(f"attempt_0/{rank}/{name}.log")
    return path.read_text()


@pytest.mark.parametrize("launcher", [TFTRUN, TORCHRUN_WITH_LOGS_SPECS], ids=["tftrun", "torchrun --logs-specs"])
def test_only_the_dead_worker_is_started_again(job: ToyJob, launcher: tuple[str, ...]) -> None:
    words = (*TWO, "--log-dir", str(job.folder / "logs"), "--redirects", "2", "--tee", "1")
    agent = job.start(launcher, *words, program=("--some", "flag"))
    first = [job.life(0), job.life(1)]
    directory = Path(first[0]["agent_dir"])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    job.kill(1)
    second = job.life(1, 1)
    (line,) = (directory / "reboots.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["local_rank"], entry["rank"], entry["status"]) == (1, 1, -signal.SIGKILL)
    assert (entry["old_pid"], entry["new_pid"]) == (first[1]["pid"], second["pid"])
    assert json.loads((directory / "exit-1").read_text())["pid"] == first[1]["pid"]
    for same in ("env", "argv", "path", "ppid"):
        assert second[same] == first[1][same]
    assert second["ppid"] == agent.pid
    assert alive(first[0]["pid"]) and not job.lived(0, 1)
    job.tell("stop")
    assert job.wait() == 0, job.output()
    output = job.output()
    line = f"worker 1 (pid {first[1]['pid']}) ended by SIGKILL: started again (pid {second['pid']}, 1st time)"
    assert output.count(f"[mindspeed_tft] {line}\n") == 1
    assert logs(job.folder, 1, "stdout") == "rank 1 life 0\nrank 1 life 1\n"
    assert logs(job.folder, 1, "stderr") == "rank 1 life 0 warns\nrank 1 life 1 warns\n"
    for life in ("rank 0 life 0", "rank 1 life 0", "rank 1 life 1"):
        assert output.count(f"]:{life}\n") == 1, "printed once"
    assert "warns" not in output and not directory.exists()


def test_control_a_plain_torchrun_fails_and_the_worker_knew(job: ToyJob) -> None:
    job.start(TORCHRUN, *TWO)
    job.life(0)
    assert "start with tftrun" in job.life(1)["why_not"]
    job.kill(1)
    assert job.wait() == 1 and not job.lived(1, 1)


def test_a_crash_loop_ends(job: ToyJob) -> None:
    job.start(TFTRUN, *TWO)
    job.life(0)
    job.tell("always-1", "1")
    assert job.wait() == 1
    output = job.output()
    assert [job.lived(1, life) for life in range(5)] == [True] * 4 + [False]
    assert output.count("ended with status 1: started again") == 3
    assert "ended with status 1: not started again, it was started again 3 times within 60 s" in output


def test_an_unmarked_death_restarts_the_group_and_one_that_leaves_ends_it(job: ToyJob) -> None:
    job.start(TFTRUN, *TWO, "--max-restarts", "1", program=("--unmarked-in-first-attempt",))
    facts = job.life(1)
    assert facts["attempt"] == "1" and not job.lived(1, 1)
    job.kill(1)
    assert job.life(1, 1)["attempt"] == "1", "and there a worker alone is started again"
    job.tell("exit-0", "75")
    assert job.wait() == 1
    assert "exitcode  : 75" in job.output() and job.output().count("started again") == 1


def test_sigterm_while_a_worker_waits_to_be_started(job: ToyJob) -> None:
    agent = job.start(TFTRUN, *TWO)
    job.life(0)
    job.kill(1)
    job.kill(1, 1)
    until(lambda: json.loads((Path(job.life(0)["agent_dir"]) / "exit-1").read_text())["pid"] == job.life(1, 1)["pid"],
          "the second death is seen")  # fmt: skip
    pids = job.descendants()
    agent.send_signal(signal.SIGTERM)
    assert job.wait() != 0
    pids += [job.life(1, number)["pid"] for number in range(3) if job.lived(1, number)]  # on a machine that stood still
    assert not [pid for pid in pids if alive(pid)]
    assert not Path(job.life(0)["agent_dir"]).exists()


def test_a_standby_takes_over_and_ctrl_c_leaves_nothing_behind(job: ToyJob) -> None:
    env = {"TFT_WARM_STANDBY": "1", "TFT_STANDBY_IMPORTS": ""}
    words = (*TWO, "--log-dir", str(job.folder / "logs"), "--redirects", "1:1", "--tee", "1:2")
    agent = job.start(TFTRUN, *words, program=("--some", "flag"), env=env)
    first = job.life(1)
    until(lambda: job.output().count("is ready") == 1, "the standby is ready")
    job.kill(1)
    seconds = until(lambda: job.lived(1, 1), "the standby took over")
    second = job.life(1, 1)
    assert f"standby (pid {second['pid']}) is ready" in job.output()
    assert "torch" in second["modules"] and "torch" not in first["modules"], "warm, and cold"
    for same in ("env", "argv", "path", "ppid", "name", "file"):
        assert second[same] == first[same]
    imports = float(re.findall(r"is ready: .* after ([0-9.]+) s", job.output())[0])
    assert seconds < max(SECOND, imports / 2), "the machine is slow, but a cold start would be slower"
    until(lambda: job.output().count("is ready") == 2, "another standby is ready")
    pids = job.descendants()
    assert len(pids) == 3 and second["pid"] in pids
    agent.send_signal(signal.SIGINT)
    assert job.wait() != 0
    assert not [pid for pid in pids if alive(pid)]
    assert logs(job.folder, 1, "stdout") == "rank 1 life 0\nrank 1 life 1\n"
    assert logs(job.folder, 1, "stderr").startswith("rank 1 life 0 warns\nrank 1 life 1 warns\n")
    assert job.output().count("]:rank 1 life 1 warns\n") == 1


def test_two_nodes(job: ToyJob, free_ports: Callable[[int], list[int]]) -> None:
    (port,) = free_ports(1)
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "toy",
             "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1")  # fmt: skip
    # Told, because two launchers of one host would both believe that the store is theirs to host.
    agents = [
        job.start(TFTRUN, *words, "--rdzv-conf", "is_host=1"),
        job.start(TORCHRUN_WITH_LOGS_SPECS, *words, "--rdzv-conf", "is_host=0"),
    ]
    first = [job.life(0), job.life(1)]
    assert {each["ppid"] for each in first} == {each.pid for each in agents}
    assert first[0]["agent_dir"] != first[1]["agent_dir"]
    job.kill(1)
    second = job.life(1, 1)
    assert second["ppid"] == first[1]["ppid"] and second["env"] == first[1]["env"]
    assert alive(first[0]["pid"]) and not job.lived(0, 1)
    job.tell("stop")
    assert [job.wait(0), job.wait(1)] == [0, 0], job.output(0) + job.output(1)
    said = [job.output(number).count("started again") for number in (0, 1)]
    assert said == [int(agent.pid == second["ppid"]) for agent in agents]


# ---------------------------------------------------------------------------------------------- the patches


def test_install_is_undone() -> None:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import api

    def state() -> list[object]:
        names = ("_start", "_poll", "_close")
        return [api._terminate_process_handler, LocalElasticAgent.__dict__["_monitor_workers"]] + [
            api.SubprocessContext.__dict__[name] for name in names
        ]

    before = state()
    torch_elastic.install()
    try:
        assert not any(now is then for now, then in zip(state(), before, strict=True))
    finally:
        torch_elastic.uninstall()
    assert all(now is then for now, then in zip(state(), before, strict=True))


def test_an_unknown_torch_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.elastic.multiprocessing import api

    before = api.SubprocessContext.__dict__["_poll"]
    monkeypatch.delattr(api, "_terminate_process_handler")
    torch_elastic.install()
    said = capsys.readouterr().err
    assert "will not be started again alone" in said and "_terminate_process_handler" in said
    assert api.SubprocessContext.__dict__["_poll"] is before
    monkeypatch.undo()  # which the next try finds, and remembers nothing of this one
    torch_elastic.install()
    torch_elastic.uninstall()


def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFT_REBOOT_LIMIT", "many")
    with pytest.raises(ValueError, match="TFT_REBOOT_LIMIT='many'"):
        torch_elastic.install()


def test_signals_wait_for_the_books() -> None:
    seen: list[str] = []
    with torch_elastic._shield.up():
        with torch_elastic._shield.up():
            assert torch_elastic._shield.holds(lambda: seen.append("first"))
        assert torch_elastic._shield.holds(lambda: seen.append("second")) and not seen
    assert seen == ["first"], "one signal ends the launcher"
    assert not torch_elastic._shield.holds(lambda: None)


def test_the_reason_of_an_earlier_life_is_kept_but_not_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    torch_elastic._keep_error_file(str(path), 1)
    path.write_text("first")
    torch_elastic._keep_error_file(str(path), 2)
    assert not path.exists() and (tmp_path / "error.json.2").read_text() == "first"
    torch_elastic._keep_error_file(os.devnull, 1)
    assert os.path.exists(os.devnull)
