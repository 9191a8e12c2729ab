"""Ranks that hang, as real processes, under the real relay, controller and engine: noticed, kept on record, killed."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
from control_support import Job, Rank, config, until

from mindspeed_tft.control import pids, stacks
from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.incident import EXIT_SAVED

DEADLINES = t.Deadlines(
    heartbeat=0.1, heartbeat_lost=1.5, stop=4.0, order=5.0, dump=10.0, exit=3.0, hang=1.5, hang_fixed=True
)
ENGINE = "mindspeed_tft.engine.machine:Engine"
SEIZE = 0x4206  # attach as a debugger without stopping


def start(job: Job, how: str) -> list[Rank]:
    """Three ranks that have stepped for a while; rank 1 is about to hang."""
    cfg = config(job.tmp, 3, deadlines=DEADLINES, engine=ENGINE)
    go = str(job.tmp / "go")
    ranks = job.start(cfg, program="programs/hanging_rank.py", how=how, hangs=1, go=go)
    for rank in ranks:
        started = rank.wait("started", 20)
        assert started["ok"] and started["offered"]
    time.sleep(1.5)  # a few dozen steps: the watch has to know how long they take
    return ranks


def hang(job: Job, ranks: list[Rank]) -> float:
    (job.tmp / "go").touch()
    ranks[1].wait("hangs")
    return time.monotonic()


def killed_and_saved(job: Job, ranks: list[Rank]) -> dict[str, object]:
    """The incident, after the hanging process was killed and the others have saved."""
    assert ranks[1].process.wait(15) == -signal.SIGKILL
    assert [ranks[number].process.wait(15) for number in (0, 2)] == [EXIT_SAVED] * 2, job.text()
    job.end()
    (incident,) = job.incidents()
    assert incident["outcome"] == "dumped"
    return incident


@pytest.mark.parametrize(("how", "function"), [("native", "hold_the_lock_for_ever"), ("sleep", "sleep_for_ever")])
def test_a_call_that_never_returns(job: Job, how: str, function: str, record_property: pytest.RecordProperty) -> None:
    ranks = start(job, how)
    at = hang(job, ranks)
    noticed = float(str(ranks[0].wait("stop", 15)["at"])) - at
    record_property("noticed_seconds", noticed)
    incident = killed_and_saved(job, ranks)
    pid = ranks[1].process.pid
    file = job.tmp / "incidents" / f"stacks-rank1-pid{pid}.txt"
    text = file.read_text()
    assert function in text
    (stacks_of,) = incident["stacks"]  # type: ignore[misc, attr-defined]
    assert (stacks_of["rank"], stacks_of["text"]) == (1, text)
    assert "tft-processor-io" in text or text.count("hread 0x") >= 3, text  # all threads, not the first alone
    summary = str(incident["summary"])
    assert summary.startswith("Training stopped: rank 1 hangs: no ")
    assert "in forward-backward of step " in summary and f"stacks in {file}" in summary
    assert f"process {pid} was killed because it did not move" in summary


def test_a_stopped_process_is_killed_without_stacks(job: Job) -> None:
    ranks = start(job, "stopped")
    hang(job, ranks)
    ranks[1].kill(signal.SIGSTOP)
    summary = str(killed_and_saved(job, ranks)["summary"])
    assert "its process is stopped (state T); no stacks (its process is stopped)" in summary
    assert not list((job.tmp / "incidents").glob("stacks-*"))


def test_a_debugged_process_is_left_alone(job: Job) -> None:
    ranks = start(job, "sleep")
    pid = ranks[1].process.pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(SEIZE, pid, None, None) != 0:
        pytest.skip(f"this system does not let processes be traced: {os.strerror(ctypes.get_errno())}")
    assert pids.tracer(pid) == os.getpid()
    hang(job, ranks)
    until(lambda: "left alone: it is being debugged by process" in log_of(job), 15, "the word about the debugger")
    time.sleep(2 * DEADLINES.hang)
    assert ranks[1].process.poll() is None
    assert not ranks[0].lines("stop")


def log_of(job: Job) -> str:
    return "".join(str(event.get("text", "")) for event in job.events())


def test_healthy_ranks_are_not_looked_at(job: Job) -> None:
    """The control of the tests above: the same ranks, and nobody hangs."""
    ranks = start(job, "sleep")
    time.sleep(3 * DEADLINES.hang)
    assert not [event for event in job.events() if event["what"] in ("Examine", "Kill", "Stop")]
    assert not any(rank.lines("stop") for rank in ranks)


def test_a_process_that_offers_no_stacks_gets_no_signal(tmp_path: Path) -> None:
    """Such a signal would end it."""
    import asyncio
    import subprocess

    with subprocess.Popen(["sleep", "60"]) as process:
        pidfd = os.pidfd_open(process.pid)
        try:
            with pytest.raises(stacks.NoStacks, match="offers none"):
                asyncio.run(stacks.keep(process.pid, pidfd, tmp_path / "file"))
            assert process.poll() is None
        finally:
            os.close(pidfd)
            process.kill()
