"""Workers of one node are seen, started again, given up; real processes, no launcher, and a clock of our own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_support import alive, until

from mindspeed_tft.agent import supervisor as module
from mindspeed_tft.agent.policy import Policy
from mindspeed_tft.agent.supervisor import REBOOTS_FILE, Supervisor, Watched


class Node:
    """Workers that sleep until they are killed or told a status on stdin."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.broken = False
        self.workers = {n: Watched(n, 10 + n, self._spawn(), folder) for n in range(count)}
        self.supervisor = Supervisor(folder, self.workers, self._start, Policy())
        for number in self.workers:
            self.mark(number)

    def mark(self, number: int) -> None:
        self.workers[number].mark.write_text("")

    def end(self, number: int, status: int) -> None:
        """End a worker, and wait until that can be seen; a negative status is a signal."""
        process = self.workers[number].process
        assert isinstance(process, subprocess.Popen) and process.stdin is not None
        if status < 0:
            process.send_signal(-status)
        else:
            process.stdin.write(f"{status}\n".encode())
            process.stdin.flush()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def _start(self, worker: Watched) -> subprocess.Popen[bytes]:
        if self.broken:
            raise OSError("no process left")
        return self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        # The child of a worker, in its process group, is what a loader of data is.
        code = "read status; exit $status"
        process = subprocess.Popen(
            ["sh", "-c", f"sleep 60 & echo $! > {self.folder}/child-$$; {code}"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self.processes.append(process)
        child = self.folder / f"child-{process.pid}"
        until(lambda: child.exists() and child.read_text().endswith("\n"), "the child of a worker")
        return process


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, 3)
    yield made
    made.close()
    for child in tmp_path.glob("child-*"):
        pid = int(child.read_text())
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_dead_worker_lives_again_and_nobody_sees_it(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    pids = {number: worker.pid for number, worker in node.workers.items()}
    child = int((node.folder / f"child-{pids[1]}").read_text())
    node.end(1, -9)
    node.supervisor.look(now=0.0)
    assert {number: worker.poll() for number, worker in node.workers.items()} == {0: None, 1: None, 2: None}
    assert [number for number in pids if node.workers[number].pid != pids[number]] == [1]
    assert not node.workers[1].mark.exists(), "the new life has not come so far"
    until(lambda: not alive(child), "its child is gone too", 10)
    told = json.loads((node.folder / "exit-1").read_text())
    assert (told["pid"], told["status"], told["signal"]) == (pids[1], -9, "SIGKILL")
    entry = json.loads((node.folder / REBOOTS_FILE).read_text())
    del entry["wall"]
    new = node.workers[1].pid
    assert entry == {"local_rank": 1, "rank": 11, "old_pid": pids[1], "new_pid": new, "status": -9}
    line = f"[mindspeed_tft] worker 11 (pid {pids[1]}) ended by SIGKILL: started again (pid {new}, 1st time)\n"
    assert capsys.readouterr().err == line


def test_the_second_start_is_later_and_does_not_block(node: Node) -> None:
    node.end(1, 1)
    node.supervisor.look(now=0.0)
    node.mark(1)
    node.end(1, 1)
    pid = node.workers[1].pid
    node.supervisor.look(now=0.5)
    node.supervisor.look(now=1.4)
    assert (node.workers[1].pid, node.workers[1].poll()) == (pid, None), "dead, and not shown"
    node.supervisor.look(now=1.5)
    assert node.workers[1].pid != pid and node.workers[1].count == 2


def test_who_waits_to_be_started_is_given_up_when_the_job_ends(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.end(1, 1)
    node.supervisor.look(now=0.0)
    node.mark(1)
    node.end(1, -11)
    node.supervisor.look(now=0.5)
    node.end(2, 75)
    node.supervisor.look(now=9.0)
    assert [node.workers[number].poll() for number in range(3)] == [None, -11, 75]
    assert "ended by SIGSEGV: not started again, the job is ending: worker 12 has left" in capsys.readouterr().err


def test_all_are_seen_before_one_is_judged(node: Node) -> None:
    node.end(0, -9)
    node.end(2, 76)
    node.supervisor.look(now=0.0)
    assert node.workers[0].poll() == -9


def test_an_unmarked_death_is_as_without_us(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.workers[0].mark.unlink()
    node.end(0, 1)
    node.supervisor.look(now=0.0)
    assert node.workers[0].poll() == 1 and capsys.readouterr().err == ""
    assert (node.folder / "exit-0").exists(), "told all the same"


def test_who_dies_in_the_start_of_a_later_life_is_started_again(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """The others wait for it; a start that always fails runs into the limit."""
    for now in (0.0, 5.0, 10.0):
        node.end(1, 1)
        node.supervisor.look(now=now)
        node.supervisor.look(now=now + 4.0)  # when it is due
        assert node.workers[1].poll() is None
    assert not node.workers[1].mark.exists()
    node.end(1, 1)
    node.supervisor.look(now=15.0)
    assert node.workers[1].poll() == 1 and "started again 3 times within 60 s" in capsys.readouterr().err


def test_a_start_that_fails_is_a_failure_of_the_worker(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.broken = True
    node.end(0, -9)
    node.supervisor.look(now=0.0)
    assert node.workers[0].poll() == -9 and "no process left" in capsys.readouterr().err


def test_after_stop_nothing_is_hidden_and_nothing_started(node: Node) -> None:
    node.end(1, 1)
    node.supervisor.look(now=0.0)
    node.mark(1)
    node.end(1, 3)
    node.supervisor.look(now=0.0)
    assert node.workers[1].poll() is None
    node.supervisor.stop()
    node.end(0, -15)
    assert [node.workers[number].poll() for number in range(3)] == [-15, 3, None]
    assert json.loads((node.folder / "exit-0").read_text())["signal"] == "SIGTERM"


def test_a_full_disk_does_not_end_the_workers(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "write_whole", full)
    node.end(1, -9)
    node.supervisor.look(now=0.0)
    assert node.workers[1].poll() is None and "No space left" in capsys.readouterr().err


def test_words() -> None:
    names = ["1st", "2nd", "3rd", "4th", "11th", "12th", "21st", "112th"]
    assert [module.nth(n) for n in (1, 2, 3, 4, 11, 12, 21, 112)] == names
    assert [module.words(status) for status in (1, -15, -40)] == ["with status 1", "by SIGTERM", "by signal 40"]


def test_the_worker_s_side_and_the_supervisor_need_no_torch() -> None:
    code = "import mindspeed_tft.agent.reboot, mindspeed_tft.agent.supervisor, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
