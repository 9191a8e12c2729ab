"""Run one training job of a drill: start it, watch it, end it in time, and keep its log.

A job is a launcher with all that it starts, also what left its process group (a controller, a launcher's workers):
every process carries a mark in its environment, by which it is found again. Linux only, as the drill is.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ENV_MARK = "TFT_DRILL_JOB"

# Set by users of the plugin or left by an outer job; a drill's jobs get exactly what the drill gives them.
_DROPPED_ENV = re.compile(
    r"TFT_|TTP_|HIGH_AVAILABILITY$|TORCHELASTIC_|TORCH_NCCL_|(MASTER|GROUP|LOCAL)_|ROLE_|(RANK|WORLD_SIZE)$"
)
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+)\s*\|")
_PYTHON_ERROR = re.compile(r"(\[rank\d+\]:\s*)?([A-Za-z_][\w.]*\.)?[A-Z]\w*(Error|Exception|Refused|Interrupt)\b")
_POLL = 0.1
_GRACE = 5.0  # seconds that helpers of an ended job may take to end as well

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """What to run, and for how long at most."""

    name: str
    command: tuple[str, ...]
    log: Path
    deadline: float
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    name: str
    returncode: int | None  # None: it was killed at its deadline
    seconds: float
    began_wall: float
    log: Path
    leftover: tuple[str, ...] = ()  # processes that outlived the launcher and had to be killed

    @property
    def timed_out(self) -> bool:
        return self.returncode is None

    def tail(self, lines: int = 25) -> str:
        """The last lines of the log."""
        return "\n".join(self._lines()[-lines:])

    def explanation(self, lines: int = 15) -> str:
        """What of the log explains an end: the first Python error of a rank, if there is one, and the last lines.

        The last lines alone are the launcher's, which say who failed but not why.
        """
        every = self._lines()
        error = next((number for number, line in enumerate(every) if _PYTHON_ERROR.match(line)), None)
        if error is None or error >= len(every) - lines:
            return self.tail(2 * lines)
        first = every[max(0, error - lines) : error + 1]
        return "\n".join([*first, "...", *every[-lines:]])

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()


def run(job: Job, progress: Progress | None = None) -> Ended:
    """Run a job to its end or its deadline; afterwards none of its processes is left."""
    mark = uuid.uuid4().hex
    began, began_wall = time.monotonic(), time.time()
    with job.log.open("wb") as log:
        launcher = subprocess.Popen(
            job.command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**_clean_environment(), **job.env, ENV_MARK: mark},
            start_new_session=True,
        )
    try:
        returncode = _watch(launcher, began + job.deadline, _Steps(job.log, progress))
        leftover = _wait_for_helpers(mark) if returncode is not None else ()
    finally:
        _kill_marked(mark)
        launcher.wait(timeout=30)
    return Ended(job.name, returncode, time.monotonic() - began, began_wall, job.log, leftover)


def torchrun(world_size: int, module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A job under the plain launcher, on this host alone."""
    return _launcher("torch.distributed.run", world_size, module, arguments)


def tftrun(world_size: int, module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A job under our launcher, which takes torchrun's arguments."""
    return _launcher("mindspeed_tft.agent.tftrun", world_size, module, arguments)


def torchrun_logs_specs(world_size: int, module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A job under the plain launcher, which learns from a plugin of its own kind what ours can do."""
    return _launcher("torch.distributed.run", world_size, module, arguments, "--logs-specs", "mindspeed_tft")


LAUNCHERS: Mapping[str, Callable[[int, str, Sequence[str]], tuple[str, ...]]] = {
    "torchrun": torchrun,
    "tftrun": tftrun,
    "torchrun-logs-specs": torchrun_logs_specs,
}
REBOOTING = ("tftrun", "torchrun-logs-specs")  # they start a dead worker again alone


def default_launcher(preset: str) -> str:
    """The launcher of the broken job, where nobody names one."""
    return REBOOTING[0] if preset == "recover" else "torchrun"


def _launcher(launcher: str, world_size: int, module: str, arguments: Sequence[str], *more: str) -> tuple[str, ...]:
    size = ("--nnodes", "1", "--nproc-per-node", str(world_size), "--max-restarts", "0")
    one_host = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    return (sys.executable, "-m", launcher, *size, *one_host, *more, "-m", module, *arguments)


class _Steps:
    """Reads the printed iterations of a growing log, for progress only."""

    def __init__(self, log: Path, progress: Progress | None) -> None:
        self._log, self._progress, self._position, self._last = log, progress, 0, 0

    def look(self) -> None:
        if self._progress is None:
            return
        with self._log.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        complete = text.rfind(b"\n") + 1
        self._position += complete
        for found in _ITERATION.finditer(text[:complete].decode(errors="replace")):
            step = int(found[1])
            if step > self._last:
                self._last = step
                self._progress(step)


def _watch(launcher: subprocess.Popen[bytes], deadline: float, steps: _Steps) -> int | None:
    while time.monotonic() < deadline:
        steps.look()
        try:
            return launcher.wait(timeout=_POLL)
        except subprocess.TimeoutExpired:
            continue
    return None


def _wait_for_helpers(mark: str) -> tuple[str, ...]:
    """A job has ended when all its processes have; what does not end by itself is named."""
    deadline = time.monotonic() + _GRACE
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return tuple(f"{process.pid} {_command_line(process)}" for process in left)


def _kill_marked(mark: str) -> None:
    """Kill what is left of a job; a second look catches what was just being started."""
    for _ in range(3):
        left = _marked(mark)
        if not left:
            return
        for process in left:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=5)


def _marked(mark: str) -> list[psutil.Process]:
    entry = f"{ENV_MARK}={mark}".encode()
    found = []
    for pid in psutil.pids():
        try:
            if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except (OSError, psutil.Error):
            continue  # it ended meanwhile, or belongs to another user and so not to this job
    return found


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "(ended)"


def bytecode_cache(directory: Path) -> dict[str, str]:
    """Environment of a job whose ranks share compiled Python files, also where none may be written beside the sources.

    Without it each rank compiles all of torch and Megatron again, which takes longer than the training.
    """
    torch = importlib.util.find_spec("torch")
    compiled = torch is not None and torch.origin and Path(importlib.util.cache_from_source(torch.origin)).is_file()
    if compiled or not os.environ.get(_NO_BYTECODE):
        return {}
    return {"PYTHONPYCACHEPREFIX": str(directory), _NO_BYTECODE: ""}


def _clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _DROPPED_ENV.match(name)}
    # More threads than cores slow small jobs down, and their number may change how sums are rounded.
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
