"""For the tests of lost nodes: a job of several launchers whose workers are programs/node_rank.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from agent_support import HERE, PATIENCE, TFTRUN, alive, until

PROGRAM = HERE / "programs" / "node_rank.py"
# With this deadline a launcher or a store that is silent for 3 s counts as gone.
FLAGS = ("--enable-high-availability", "--enable-worker-reboot", "--no-tft-warm-standby", "--tft-deadline", "24")
Start = Callable[..., "subprocess.Popen[Any]"]


class NodeJob:
    """Launchers, by the number of their start; `end` kills what is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launchers: list[subprocess.Popen[Any]] = []
        self.orders = 0
        self._seen: set[int] = set()

    def start(self, *words: str, popen: Start = subprocess.Popen, flags: tuple[str, ...] = FLAGS) -> int:
        """Start a launcher with these words; returns its number. `popen`: as `subprocess.Popen`, elsewhere."""
        number = len(self.launchers)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TFT_", "TORCHELASTIC_"))}
        env = {**clean, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with open(self.folder / f"output-{number}", "wb") as output:
            self.launchers.append(
                popen(
                    [*TFTRUN, *words, str(PROGRAM), str(self.folder), *flags],
                    env=env,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return number

    def output(self, number: int) -> str:
        return (self.folder / f"output-{number}").read_text()

    def all_output(self) -> str:
        return "\n".join(f"--- {number}\n{self.output(number)[-4000:]}" for number in range(len(self.launchers)))

    def life(self, rank: int, number: int = 0) -> dict[str, Any]:
        """The facts of a life of a rank, waited for."""
        path = self.folder / f"life-{rank}-{number}.json"
        self.until(path.exists, f"life {number} of rank {rank}")
        facts: dict[str, Any] = json.loads(path.read_text())
        self._seen.add(facts["pid"])
        return facts

    def next_start(self, first: dict[str, Any], rank: int) -> dict[str, Any]:
        """The facts of the first life of a rank in the start of all workers that follows the one of `first`."""
        self.until(lambda: self.life(rank)["store"] != first["store"], f"rank {rank} is started anew")
        return self.life(rank)

    def other_life(self, first: dict[str, Any], rank: int) -> dict[str, Any]:
        """The facts of another first life of a rank than `first`."""
        self.until(lambda: self.life(rank)["pid"] != first["pid"], f"rank {rank} is started by somebody else")
        return self.life(rank)

    def lives(self) -> set[str]:
        return {path.stem for path in self.folder.glob("life-*.json")}

    def order(self, **words: object) -> int:
        path = self.folder / f"order-{self.orders}"
        temporary = self.folder / ".order"
        temporary.write_text(json.dumps(words))
        temporary.rename(path)
        self.orders += 1
        return self.orders - 1

    def regroup(self, epoch: int, ranks: int, seconds: float = 20.0) -> list[dict[str, Any]]:
        """Let all ranks build their groups anew, in so many seconds; what each of them says of it."""
        number = self.order(do="regroup", epoch=epoch, seconds=seconds)
        self.until(lambda: len(list(self.folder.glob(f"done-{number}-*"))) == ranks, f"all ranks have done {number}")
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"done-{number}-*"))]

    def until(self, what: Callable[[], bool], about: str, deadline: float = PATIENCE) -> None:
        try:
            until(what, about, deadline)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.all_output()}") from None

    def said(self, number: int, text: str) -> None:
        """Wait until a launcher has said something."""
        self.until(lambda: text in self.output(number), f"launcher {number} says {text!r}")

    def provided(self, facts: dict[str, Any], generation: int = 0) -> None:
        """Wait until the launcher of a life has copied what it keeps of the store."""
        path = Path(facts["agent_dir"]) / "node.json"
        self.until(
            lambda: path.exists() and json.loads(path.read_text())["generation"] == generation,
            f"the launcher keeps copies of generation {generation}",
        )

    def kill(self, number: int) -> list[int]:
        """End a launcher and its workers at once; returns the pids of the workers."""
        launcher = self.launchers[number]
        pids = self.workers(number)
        os.kill(launcher.pid, signal.SIGSTOP)  # it must not see that they end
        for pid in (*pids, launcher.pid):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        self.until(lambda: not any(map(alive, pids)), "all are dead")
        return pids

    def workers(self, number: int) -> list[int]:
        return [each.pid for each in psutil.Process(self.launchers[number].pid).children(recursive=True)]

    def wait(self, number: int, seconds: float = PATIENCE) -> int:
        try:
            return self.launchers[number].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"launcher {number} is still running:\n{self.all_output()}") from None

    def end(self) -> None:
        known = set(self._seen)
        for launcher in self.launchers:
            if launcher.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    known.update(each.pid for each in psutil.Process(launcher.pid).children(recursive=True))
                launcher.kill()
                launcher.wait()
        for pid in known:
            with contextlib.suppress(psutil.NoSuchProcess):
                left = psutil.Process(pid)
                if str(self.folder) in left.cmdline():  # and not another process with an old number
                    left.kill()
