"""For the tests of the agent: a job of toy workers (programs/toy_worker.py) under a real launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
TOY = HERE / "programs" / "toy_worker.py"
BINARIES = Path(sys.executable).parent
PATIENCE = 60.0  # seconds; for a machine that is busy with other things

TFTRUN = (str(BINARIES / "tftrun"),)
TORCHRUN = (str(BINARIES / "torchrun"),)
TORCHRUN_WITH_LOGS_SPECS = (*TORCHRUN, "--logs-specs", "mindspeed_tft")


def until(what: Callable[[], bool], about: str, deadline: float = PATIENCE) -> float:
    """Wait for a condition; the seconds that it took."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > deadline:
            raise AssertionError(f"after {deadline:g} s still not: {about}")
        time.sleep(0.01)
    return time.monotonic() - began


def alive(pid: int) -> bool:
    """A zombie has ended: who should have asked for its status is not the question."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class ToyJob:
    """Launchers whose workers share a folder. Ends all that it knows of in `end`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._seen: set[int] = set()

    def start(
        self, launcher: tuple[str, ...], *words: str, program: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a launcher with these words before the toy program; `program`: more arguments for the toy."""
        number = len(self.launchers)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TFT_", "TORCHELASTIC_"))}
        with open(self.folder / f"output-{number}", "wb") as output:
            process = subprocess.Popen(
                [*launcher, *words, str(TOY), str(self.folder), *program],
                env={**clean, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), **(env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launchers.append(process)
        return process

    def output(self, number: int = 0) -> str:
        return (self.folder / f"output-{number}").read_text()

    def life(self, rank: int, number: int = 0) -> dict[str, Any]:
        """The facts of a life of a rank, waited for."""
        path = self.folder / f"life-{rank}-{number}.json"
        until(lambda: path.exists() or self._over(), f"life {number} of rank {rank}")
        assert path.exists(), f"no life {number} of rank {rank}:\n{self._all_output()}"
        facts: dict[str, Any] = json.loads(path.read_text())
        self._seen.add(facts["pid"])
        return facts

    def lived(self, rank: int, number: int) -> bool:
        return (self.folder / f"life-{rank}-{number}.json").exists()

    def tell(self, name: str, text: str = "") -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(text)
        temporary.rename(self.folder / name)

    def kill(self, rank: int, number: int = 0) -> int:
        pid = int(self.life(rank, number)["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait(self, number: int = 0, seconds: float = PATIENCE) -> int:
        """The launcher's exit status."""
        try:
            return self.launchers[number].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"launcher {number} is still running:\n{self._all_output()}") from None

    def descendants(self) -> list[int]:
        return [each.pid for launcher in self.launchers for each in psutil.Process(launcher.pid).children(True)]

    def end(self) -> None:
        """Kill what is left: launchers first, so that nothing is started again."""
        known = set(self._seen)
        for launcher in self.launchers:
            if launcher.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    known.update(each.pid for each in psutil.Process(launcher.pid).children(recursive=True))
                launcher.kill()
                launcher.wait()
        self.tell("stop")
        for pid in known:
            with contextlib.suppress(psutil.NoSuchProcess):
                left = psutil.Process(pid)
                if str(self.folder) in left.cmdline():  # and not another process with an old number
                    left.kill()

    def _over(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers)

    def _all_output(self) -> str:
        return "\n".join(self.output(number)[-3000:] for number in range(len(self.launchers)))
