"""The agent under msrun, with real processes behind the functions that msrun would register."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tft.mindspore import agent, places


class Launcher:
    """Workers that end with the statuses of their life, and a scheduler that never does, as msrun would start them."""

    def __init__(self, lives: list[list[int]]) -> None:
        self.lives, self.seen = lives, list[str]()
        self.workers: list[subprocess.Popen[bytes]] = []
        self.scheduler = self._python("import time; time.sleep(600)")

    def start(self) -> None:
        self.seen.append(os.environ[places.LIFE])
        statuses = self.lives[len(self.seen) - 1]
        self.workers = [self._python(self._leaving(rank, status)) for rank, status in enumerate(statuses)]

    @staticmethod
    def _leaving(rank: int, status: int) -> str:
        told = f"open(os.environ['{places.STATUS}'] + '/{rank}', 'w').write('{status}')" if status > 74 else "pass"
        return f"import os; {told}; os._exit({status}) if {status} >= 0 else os.kill(os.getpid(), {-status})"

    def _python(self, code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", code])

    def monitor(self, _ranks: list[int]) -> dict[int, dict[str, Any]]:
        """As msrun's: of a worker that is gone nothing is told but that, unless it ended well."""
        if not self.workers:
            return {rank: {"pid": None, "status": 200} for rank in (0, 1)}
        states = {rank: one.poll() for rank, one in enumerate(self.workers)}
        told = {rank: 300 if state else state for rank, state in states.items()}
        return {rank: {"pid": self.workers[rank].pid, "status": state} for rank, state in told.items()}

    def kill(self, _ranks: list[int]) -> None:
        for one in self.workers:
            one.kill()

    def agent(self, environ: dict[str, str]) -> agent.Agent:
        found = agent.Agent(environ)
        functions = (self.kill, self.start, self.start, self.monitor)
        for name, function in zip(agent.FUNCTIONS, functions, strict=True):
            found.register(name, function)
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(agent, "LOOK", 0.02)
    monkeypatch.setattr(agent, "_SCHEDULER", 0.1)
    before = {number: agent.signal.getsignal(number) for number in (agent.signal.SIGTERM, agent.signal.SIGINT,
                                                                   agent.signal.SIGHUP)}  # fmt: skip
    yield
    for number, handler in before.items():
        agent.signal.signal(number, handler)
    for name in (places.LIFE, places.LOCAL, places.STATUS):
        os.environ.pop(name, None)


def left(launcher: Launcher) -> bool:
    return launcher.scheduler.poll() is None


def test_a_job_that_ends_well_leaves_no_scheduler() -> None:
    launcher = Launcher([[0, 0]])
    assert launcher.agent({}).run() == 0
    assert launcher.seen == ["0"] and not left(launcher)


def test_a_saved_job_is_started_again_and_its_workers_know() -> None:
    launcher = Launcher([[75, -9], [0, 0]])
    assert launcher.agent({}).run() == 0
    assert launcher.seen == ["0", "1"] and not left(launcher)


@pytest.mark.parametrize(
    ("lives", "restarts", "code"),
    [([[75, -9]], "0", 75), ([[1, 1], [1, 76]], "1", 76), ([[-9, 1]], "0", 1), ([[0, 77]], "0", 77)],
)
def test_its_own_status_tells_how_the_job_failed(lives: list[list[int]], restarts: str, code: int) -> None:
    launcher = Launcher(lives)
    assert launcher.agent({agent.RESTARTS: restarts}).run() == code
    assert len(launcher.seen) == len(lives) and not left(launcher)


def test_survivors_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher([[1, 0]])
    start = launcher.start

    def hang() -> None:
        start()
        launcher.workers[1] = launcher._python("import time; time.sleep(600)")

    monkeypatch.setattr(launcher, "start", hang)
    assert launcher.agent({agent.RESTARTS: "0", agent.PATIENCE: "0.3"}).run() == agent.EXIT_UNDECIDED
    assert launcher.workers[1].poll() is not None


@pytest.mark.parametrize(
    ("config", "environ"),
    [
        ({"Framework": "PyTorch"}, {}),
        ({"Framework": "MindSpore"}, {agent.RESTARTS: "often"}),
        ({"Framework": "MindSpore"}, {"MS_ENABLE_TFT": "{UCE:1}"}),
    ],
)
def test_what_cannot_be_served_ends_msrun(
    config: dict[str, str], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        agent.init_taskd_agent(config)
    assert ended.value.code == agent.REFUSED and "Remedy" in capfd.readouterr().err


def test_asked_to_end_it_asks_the_workers_and_starts_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher([[]])
    saves = (
        "import os, signal, time\n"
        f"end = lambda *_: (open(os.environ['{places.STATUS}'] + '/0', 'w').write('75'), os._exit(75))\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"  # this very process, once the worker is ready for it
        "time.sleep(60)"
    )

    def start() -> None:
        launcher.seen.append(os.environ[places.LIFE])
        launcher.workers = [launcher._python(saves)]

    monkeypatch.setattr(launcher, "start", start)
    assert launcher.agent({}).run() == 75
    assert launcher.seen == ["0"] and not left(launcher)


def test_a_status_that_was_not_written_whole_is_none(tmp_path: Path) -> None:
    (tmp_path / "1.tmp").write_text("")
    places.leave_status({places.STATUS: str(tmp_path)}, 0, 75)
    assert agent.left_status(tmp_path) == {0: 75}
    assert not list(tmp_path.iterdir())
