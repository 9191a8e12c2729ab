"""Jobs of MindSpore under msrun, of two ranks, in the environment that `make test-mindspore` builds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ports import free_port

PYTHON = os.environ.get("TFT_MINDSPORE_PYTHON", "")
ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = ROOT / "tests" / "mindspore" / "programs"
NAMES = ROOT / "mindspeed_tft" / "names" / "taskd"
STEPS = 20
Final = dict[int, dict[str, bytes]]


@dataclass
class Job:
    """One msrun with all that it left behind."""

    process: subprocess.Popen[bytes]
    logs: Path
    out: Path
    save: Path
    run: str  # its name for `tftctl --job`
    output: str = ""
    family: dict[int, psutil.Process] = field(default_factory=dict)

    def log(self, rank: int) -> str:
        path = self.logs / f"worker_{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_step(self, step: int, rank: int = 0, timeout: float = 90.0) -> None:
        self.wait(lambda: re.search(rf"^step {step} ", self.log(rank), re.M), timeout, f"step {step}")

    def wait(self, condition: Callable[[], object], timeout: float, what: str) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, f"no {what}: {self.told()}"
            self.remember()
            time.sleep(0.1)

    def remember(self) -> None:
        """All processes that were ever seen below msrun."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.family[child.pid] = child

    def end(self, timeout: float = 150.0) -> int:
        """Its exit status."""
        end = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < end, f"still running: {self.told()}"
            self.remember_if_there()
            time.sleep(0.1)
        self.output = self.logs.with_name("msrun.log").read_text(errors="replace")
        return self.process.returncode

    def remember_if_there(self) -> None:
        try:
            self.remember()
        except psutil.NoSuchProcess:
            return

    def left(self) -> list[str]:
        """Processes of the job that live on, but for our control processes, which end by themselves."""
        found = []
        for process in self.family.values():
            try:
                words = " ".join(process.cmdline())
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE and "control" not in words:
                    found.append(words)
            except psutil.NoSuchProcess:
                continue
        return found

    def told(self) -> str:
        return f"{self.output[-3000:]}\n--- rank 0\n{self.log(0)[-3000:]}\n--- rank 1\n{self.log(1)[-3000:]}"

    def final(self, rank: int) -> dict[str, bytes]:
        """The bytes of all parameters at the end, optimizer states included."""
        import numpy as np

        with np.load(f"{self.out}-{rank}.npz") as found:
            return {name: found[name].tobytes() for name in found.files}


@dataclass
class Jobs:
    """Starts jobs below one directory."""

    directory: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self,
        plugin: dict[str, Any] | None = None,
        tft: str = "",
        agent: bool = False,
        env: dict[str, str] | None = None,
        program: str = "job.py",
        ranks: int = 2,
        edited: bool = True,
        **words: Any,
    ) -> Job:
        """`plugin`: arguments of FaultTolerance beside `save`; `tft`: MS_ENABLE_TFT; `agent`: ours; `edited`: the
        script has a line for the plugin."""
        base = self.directory / f"job{len(self.started)}"
        base.mkdir()
        save = base / "save"
        told: dict[str, Any] = {"steps": STEPS, "out": str(base / "final"), **words}
        if plugin is not None:
            told["plugin"] = {"save": str(save), **plugin}
        bin_ = Path(PYTHON).parent
        added = {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "GLOG_v": "3", **(env or {})}
        if tft:
            added["MS_ENABLE_TFT"] = tft
        if not edited:
            added["TFT_MS_SAVE"] = str(save)
        if agent:
            added["PYTHONPATH"] = str(NAMES)
        port = free_port()
        command = [
            *(bin_ / "msrun", f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={port}"),
            *(f"--log_dir={base / 'logs'}", "--join=True", "--cluster_time_out=60"),
            *([] if edited else ["python", "-m", "mindspeed_tft.mindspore"]),
            *(PROGRAMS / program, json.dumps(told)),
        ]
        with open(base / "msrun.log", "w") as output:  # a pipe that nobody reads would hold it up
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=base,
                env={**os.environ, **added},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return Job(process, base / "logs", base / "final", save, f"msrun-{port}")

    def end(self) -> None:
        """Nothing of them is left."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
