"""How the end of a foreign process is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from control_support import until

from mindspeed_tft.control import pids

SLEEPER = "import sys, time; print('up', flush=True); time.sleep(60)"
# The first thread of a process may end while others go on: top shows a zombie that works.
HEADLESS = """
import ctypes, threading, time
def rest():
    time.sleep(0.2)
    print("up", flush=True)
    time.sleep(60)
threading.Thread(target=rest).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().split()[2]


def finish(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=10)


def test_a_process_that_lives_and_one_that_was_killed() -> None:
    process = start(SLEEPER)
    try:
        pidfd = pids.open_pidfd(process.pid)
        assert not pids.is_ending(process.pid)
        assert not pids.is_dead(pidfd)
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: state(process.pid) == "T", 5)
        assert not pids.is_ending(process.pid), "a stopped process can go on"
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: pids.is_ending(process.pid), 5)  # a zombie by now: nobody has waited for it
        until(lambda: pids.is_dead(pidfd), 5)
        os.close(pidfd)
    finally:
        finish(process)
    assert pids.is_ending(process.pid)


def test_a_process_whose_first_thread_ended_lives() -> None:
    process = start(HEADLESS)
    try:
        until(lambda: state(process.pid) == "Z", 5)
        assert not pids.is_ending(process.pid)
    finally:
        finish(process)


def test_a_process_without_a_pidfd() -> None:
    assert pids.open_pidfd(0) == -1  # what SO_PEERCRED says of a process in another namespace


def test_the_state_of_a_process_and_who_traces_it() -> None:
    process = start(SLEEPER)
    try:
        assert pids.tracer(process.pid) == 0
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: pids.state(process.pid) == "T", 5)
    finally:
        finish(process)
    assert pids.state(process.pid) == ""
    with pytest.raises(OSError):
        pids.tracer(process.pid)
