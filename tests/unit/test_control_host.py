"""One host, real processes: ranks without torch, relay and controller as in a real job."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from control_support import DEADLINES, HERE, Job, Rank, config, processes, until

from mindspeed_tft.control import framing, launch
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.config import RELAY_SOCKET, ControlConfig, ControlUnavailable
from mindspeed_tft.engine.incident import EXIT_SAVED

SECOND = 1.0


def stopped(job: Job, at: float, *ranks: int) -> float:
    """The slowest of these ranks heard the stop so many seconds after `at`."""
    return max(float(str(job.ranks[rank].wait("stop")["at"])) - at for rank in ranks)


def test_a_killed_rank_is_known_to_all_and_the_incident_runs_to_its_end(
    job: Job, record_property: pytest.RecordProperty
) -> None:
    ranks = job.start(config(job.tmp, 3))
    assert all(rank.wait("started")["ok"] for rank in ranks)
    assert not any(rank.wait("started")["grpc"] for rank in ranks), "gRPC in a training process"
    at = ranks[1].kill()
    seconds = stopped(job, at, 0, 2)
    print(f"stop heard {seconds * 1000:.1f} ms after the kill")
    record_property("stop_seconds", seconds)
    assert seconds < SECOND
    for rank in (ranks[0], ranks[2]):
        assert rank.process.wait(10) == 1
        kinds = [line["kind"] for line in rank.lines("order")]
        assert kinds == ["finish_update", "exit"]
    job.end()
    (incident,) = job.incidents()
    assert (incident["outcome"], incident["step"]) == ("dumped", 7)
    assert incident["decision"] == ["dump step 7"]
    assert {report["rank"] for report in incident["reports"]} == {0, 2}  # type: ignore[attr-defined,index]
    assert len(incident["orders"]) == 4  # type: ignore[arg-type]
    assert all(order["ok"] for order in incident["orders"])  # type: ignore[attr-defined]
    assert set(incident["seconds"]) == {"stop", "decide", "exit", "total"}  # type: ignore[call-overload]
    assert incident["versions"]["grpcio"]  # type: ignore[index]
    lost = next(event for event in job.events() if event["what"] == "RankLost")
    assert (lost["rank"], lost["pid"]) == (1, ranks[1].process.pid)
    assert job.text().count("step 7 is saved, nothing is lost") == 1


def test_a_child_that_outlives_the_rank_hides_nothing(job: Job, record_property: pytest.RecordProperty) -> None:
    first, second = job.start(config(job.tmp, 2), fork=20.0)
    child = int(str(second.wait("forked")["pid"]))
    first.wait("forked")
    try:
        at = second.kill()
        seconds = stopped(job, at, 0)
        os.kill(child, 0)  # it lives
        record_property("stop_seconds", seconds)
        assert seconds < SECOND
        first.process.wait(10)
    finally:
        for rank in (first, second):
            os.kill(int(str(rank.wait("forked")["pid"])), signal.SIGKILL)


def test_an_ordinary_end_leaves_no_word(job: Job) -> None:
    ranks = job.start(config(job.tmp, 2), seconds=0.5)
    assert all(rank.wait("goodbye")["ok"] for rank in ranks)
    assert [rank.process.wait(10) for rank in ranks] == [0, 0]
    job.end(5)
    assert not job.incidents()
    assert job.text().strip() == ""
    assert next(event for event in job.events() if event["what"] == "Closed")["outcome"] == "finished"


def test_a_killed_relay_comes_back(job: Job) -> None:
    ranks = job.start(config(job.tmp, 2))
    for rank in ranks:
        rank.wait("started")
    os.kill(job.only("host_main"), signal.SIGKILL)
    for rank in ranks:
        rank.wait("disconnected")
        rank.wait("connected")
        assert rank.text().count("FAULT TOLERANCE IS OFF on rank") == 1
    at = ranks[0].kill()  # the one that started it again
    assert stopped(job, at, 1) < SECOND
    assert ranks[1].process.wait(10) == 1


def test_a_killed_controller_stops_nothing(job: Job) -> None:
    ranks = job.start(config(job.tmp, 2), seconds=2.0)
    for rank in ranks:
        assert rank.wait("started")["ok"]
    os.kill(job.leader(), signal.SIGKILL)
    for rank in ranks:
        rank.wait("disconnected", 3)
    for rank in ranks:
        assert rank.process.wait(10) == 0
        assert not rank.lines("stop")
    assert job.text().count("FAULT TOLERANCE IS OFF on this host") == 1
    job.end()


@pytest.mark.full
def test_ranks_die_together_with_the_controller(job: Job) -> None:
    ranks = job.start(config(job.tmp, 2))
    for rank in ranks:
        rank.wait("started")
    os.kill(job.leader(), signal.SIGKILL)
    for rank in ranks:
        rank.kill()
    job.end()


def test_a_relay_that_dies_in_the_middle_of_an_incident_loses_nothing(job: Job) -> None:
    ranks = job.start(config(job.tmp, 3), report_after=1.5)
    for rank in ranks:
        rank.wait("started")
    ranks[2].kill()
    ranks[0].wait("stop")
    ranks[1].wait("stop")
    os.kill(job.only("host_main"), signal.SIGKILL)
    assert [rank.process.wait(15) for rank in ranks[:2]] == [1, 1]
    assert [line["kind"] for line in ranks[0].lines("order")] == ["finish_update", "exit"]
    job.end()
    assert job.incidents()[0]["outcome"] == "dumped"


def test_garbage_and_too_long_messages_hurt_only_who_sends_them(job: Job) -> None:
    ranks = job.start(config(job.tmp, 2))
    for rank in ranks:
        rank.wait("started")
    path = str(job.directories()[0] / RELAY_SOCKET)
    frame = framing.pack(wire.RankSays(goodbye=wire.RankFinished(rank=1)))
    long = (framing.MAX_FRAME + 1).to_bytes(4, "big")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05abcde", long + b"x" * 100, frame, b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(5)
            sock.connect(path)
            sock.sendall(garbage)
            if garbage:
                assert sock.recv(100) == b"", "the relay goes on listening to this"
    assert [rank.lines("stop") for rank in ranks] == [[], []]
    at = ranks[1].kill()
    assert stopped(job, at, 0) < SECOND
    ranks[0].process.wait(10)


def test_the_socket_is_private(job: Job) -> None:
    (rank,) = job.start(config(job.tmp, 1))
    rank.wait("started")
    directory = job.directories()[0]
    assert [oct(path.stat().st_mode & 0o777) for path in (directory.parent, directory)] == ["0o700", "0o700"]
    for name in directory.iterdir():
        assert name.stat().st_mode & 0o077 == 0, name


def test_the_last_words_come_after_the_launcher(job: Job) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        ranks = job.start(config(job.tmp, 2, launcher_pid=launcher.pid, shutdown=10.0))
        for rank in ranks:
            rank.wait("started")
        ranks[1].kill()
        ranks[0].process.wait(10)
        until(lambda: "step 7 is saved" in ranks[0].text(), 5)
        until(lambda: not processes(job.directories()[0], "host_main"), 5)
        with open(ranks[0].err, "a") as file:
            file.write("the long report of the launcher\n")
        assert processes(job.directories()[0], "controller_main")
    finally:
        launcher.communicate(timeout=10)
    job.end(3)
    last = ranks[0].text().strip().splitlines()[-2:]
    assert last[0] == "[mindspeed_tft] step 7 is saved, nothing is lost"
    assert last[1].startswith("[mindspeed_tft] incident: ")


@pytest.mark.full
def test_a_rank_that_never_comes(job: Job) -> None:
    """The processes of a job that fails before it registers end by themselves."""
    cfg = config(job.tmp, 1, start=1.5, deadlines=replace(DEADLINES, heartbeat_lost=0.5))
    job.configs.append(cfg)
    env = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent.parent}"}
    code = (
        "import sys; from mindspeed_tft.control import launch; from mindspeed_tft.control.config import ControlConfig; "
        "launch.ensure_host(ControlConfig.from_json(sys.argv[1]), 0, 0)"
    )
    subprocess.run([sys.executable, "-c", code, cfg.to_json()], env=env, check=True, timeout=30)
    assert processes(job.directories()[0])
    job.end(10)


@pytest.mark.full
def test_what_a_crashed_job_left_is_no_hindrance(job: Job) -> None:
    cfg = config(job.tmp, 2)
    ranks = job.start(cfg)
    for rank in ranks:
        rank.wait("started")
    for pid in processes(job.directories()[0]):
        os.kill(pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.kill()
        rank.process.wait(5)
    assert (job.directories()[0] / RELAY_SOCKET).exists()
    ranks = job.start(cfg)
    for rank in ranks:
        assert rank.wait("started")["ok"]


def test_local_rank_0_is_missing(job: Job) -> None:
    begin = time.monotonic()
    with pytest.raises(ControlUnavailable, match="local rank 0"):
        launch.ensure_host(config(job.tmp, 2, start=0.4), 1, 1)
    assert time.monotonic() - begin < 2


def test_an_engine_that_fails_stops_no_training(job: Job) -> None:
    ranks = job.start(config(job.tmp, 2, engine="control_support:BrokenEngine"), seconds=2.0)
    for rank in ranks:
        rank.wait("disconnected")
        assert rank.process.wait(10) == 0
    assert "the engine failed" in job.text()


@pytest.mark.full
def test_no_engine_at_all(job: Job) -> None:
    (rank,) = job.start(config(job.tmp, 1, engine="control_support:NoSuchEngine", start=3.0))
    failed = rank.wait("failed")
    assert failed["type"] == "ControlUnavailable"
    assert "NoSuchEngine" in str(failed["text"])


def test_the_real_engine_saves_the_step(job: Job) -> None:
    options = {"step": 7, "holds": ["tp0-pp0/dense/0"]}
    ranks = job.start(config(job.tmp, 2, engine=ControlConfig.engine), **options)
    for rank in ranks:
        assert rank.wait("started")["ok"]
    for pid in processes(job.directories()[0]):
        os.kill(pid, signal.SIGTERM)  # as a scheduler does, to every process of a job
    ranks[0].kill()
    assert ranks[1].process.wait(10) == EXIT_SAVED
    assert [line["kind"] for line in ranks[1].lines("order")] == ["write_part", "publish", "exit"]
    job.end()
    (incident,) = job.incidents()
    assert (incident["outcome"], incident["step"]) == ("dumped", 6)
    assert "run it again" in str(incident["summary"])
    assert incident["engine"]["state"] == "closed"  # type: ignore[index]
    assert "Step 6 is saved" in job.text()


def test_a_killed_rank_is_replaced_by_another_process(job: Job) -> None:
    cfg = config(job.tmp, 3, engine=ControlConfig.engine, strategies=("dump", "recover"))
    options = {"step": 7, "holds": ["tp0-pp0/dense/0"]}
    ranks = job.start(cfg, **options)
    for rank in ranks:
        assert rank.wait("started")["ok"]
    for life in range(2):  # the first newcomer dies as well, before it was ready
        job.ranks[1].kill()
        job.ranks[1].process.wait(10)
        job.ranks[1] = Rank(job.tmp, cfg, 1, report_after=0.0 if life else 60.0, **options)
        job.ranks[1].wait("stop")
    assert [rank.process.wait(10) for rank in job.ranks.values()] == [0, 0, 0]
    kinds = [str(line["kind"]) for line in job.ranks[1].lines("order")]
    assert kinds == ["regroup", "repair", "rollback", "resume"]
    assert job.ranks[1].lines("order")[2]["payload"]["newcomers"] == ["1"]  # type: ignore[index]
    job.end()
    (incident,) = job.incidents()
    assert (incident["outcome"], incident["step"]) == ("rebooted", 6)
    replaced = {"old_pid": ranks[1].process.pid, "new_pid": job.ranks[1].process.pid, "host": "here"}
    assert incident["engine"]["replaced"] == {"1": replaced}  # type: ignore[index]
    assert f"was replaced by pid {job.ranks[1].process.pid}. Training goes on after step 6" in job.text()
    assert next(event for event in job.events() if event["what"] == "Closed")["outcome"] == "finished"


@pytest.mark.full
def test_under_torchrun(job: Job) -> None:
    """torchrun ends the others with SIGTERM and SIGKILL, and has the last word but one."""
    pytest.importorskip("torch")
    cfg = config(job.tmp, 2, engine=ControlConfig.engine, shutdown=10.0)
    words = {"config": cfg.to_json(), "step": 7, "holds": ["tp0-pp0/dense/0"], "ignore_term": True}
    program = job.tmp / "train.py"
    program.write_text(
        "import json, os, sys, runpy\n"
        f"words = json.loads({json.dumps(words)!r})\n"
        "rank = int(os.environ['RANK'])\n"
        "config = {**json.loads(words['config']), 'launcher_pid': os.getppid()}\n"
        f"log = {str(job.tmp)!r} + f'/rank{{rank}}.jsonl'\n"
        "words.update(rank=rank, local_rank=rank, log=log, config=json.dumps(config))\n"
        "sys.argv[1:] = [json.dumps(words)]\n"
        f"runpy.run_path({str(HERE / 'control_rank.py')!r}, run_name='__main__')\n"
    )
    job.configs.append(cfg)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    env = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent.parent}"}
    logs = [job.tmp / f"rank{rank}.jsonl" for rank in range(2)]
    with open(job.tmp / "out", "wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
        try:
            until(lambda: all(log.exists() and "started" in log.read_text() for log in logs), 60)
            line = json.loads(logs[1].read_text().splitlines()[0])
            os.kill(line["pid"], signal.SIGKILL)
            assert process.wait(60) == 1
        finally:
            process.kill()
    job.end(5)
    text = (job.tmp / "out").read_text()
    assert "ChildFailedError" in text
    assert ["Step 6 is saved" in row for row in text.strip().splitlines()[-2:]] == [True, False]
    assert text.strip().splitlines()[-1].startswith("[mindspeed_tft] incident: ")
