"""Run one training job of a drill: start it, watch it, end it in time, and keep its log.

A job is a launcher for each of its nodes with all that it starts, also what left its process group (a controller, a
launcher's workers): every process carries a mark in its environment, by which it is found again. Linux only, as the
drill is.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mindspeed_tft.faults import processes
from mindspeed_tft.faults.processes import ENV_MARK

# Set by users of the plugin or left by an outer job; a drill's jobs get exactly what the drill gives them.
_DROPPED_ENV = re.compile(
    r"TFT_|TTP_|MINDX_|MINDIO_|PROCESS_RECOVER$|HIGH_AVAILABILITY$|TORCHELASTIC_|TORCH_NCCL_|"
    r"(MASTER|GROUP|LOCAL)_|ROLE_|(RANK|WORLD_SIZE)$"
)
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+)\s*\|")
_PYTHON_ERROR = re.compile(r"(\[rank\d+\]:\s*)?([A-Za-z_][\w.]*\.)?[A-Z]\w*(Error|Exception|Refused|Interrupt)\b")
_POLL = 0.1
RENDEZVOUS = ("static", "c10d")
_GRACE = 5.0  # seconds that helpers of an ended job may take to end as well

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """What to run, and for how long at most."""

    name: str
    commands: tuple[tuple[str, ...], ...]  # the launcher of each node
    log: Path  # of the first node; the others log beside it
    deadline: float
    env: Mapping[str, str] = field(default_factory=dict)
    replacements: int = 0  # how often the launcher of a node that was killed is started again, as a cluster would
    rescheduled: bool = False  # also one that failed while others go on: the cluster told its ranks to leave

    def log_of(self, node: int) -> Path:
        return self.log.with_stem(f"{self.log.stem}-node{node}") if node else self.log


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


class _Node:
    """The launcher of one node, in all its lives."""

    def __init__(self, job: Job, number: int, mark: str) -> None:
        self._job, self._number, self._mark = job, number, mark
        self.status: int | None = None
        self.launcher = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._job.log_of(self._number).open("ab") as log:
            return subprocess.Popen(
                self._job.commands[self._number],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**_clean_environment(), **self._job.env, ENV_MARK: self._mark},
                start_new_session=True,
            )

    def look(self) -> None:
        self.status = self.launcher.poll()

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL

    def goes(self, others: bool) -> bool:
        """The cluster starts this node anew. `others`: there are nodes that go on."""
        return self.killed or (others and self._job.rescheduled and bool(self.status))

    def replace(self) -> None:
        self.launcher, self.status = self._start(), None


def run(job: Job, progress: Progress | None = None) -> Ended:
    """Run a job to its end or its deadline; afterwards none of its processes is left."""
    mark = uuid.uuid4().hex
    began, began_wall = time.monotonic(), time.time()
    for number in range(len(job.commands)):
        job.log_of(number).unlink(missing_ok=True)
    nodes: list[_Node] = []
    try:
        for number in range(len(job.commands)):
            nodes.append(_Node(job, number, mark))
        logs = [_Steps(job.log_of(number), progress) for number in range(len(nodes))]
        returncode = _watch(nodes, began + job.deadline, logs, job.replacements)
        leftover = _wait_for_helpers(mark) if returncode is not None else ()
    finally:
        _kill_marked(mark)
        for node in nodes:
            node.launcher.wait(timeout=30)
    _gather(job)
    return Ended(job.name, returncode, time.monotonic() - began, began_wall, job.log, leftover)


def _gather(job: Job) -> None:
    """One log for who reads it: what the other nodes wrote is put behind that of the first."""
    with job.log.open("ab") as whole:
        for number in range(1, len(job.commands)):
            whole.write(f"\n----- node {number} -----\n".encode() + job.log_of(number).read_bytes())


@dataclass(frozen=True)
class Size:
    """Ranks and nodes of a job, and where its nodes meet: on this host, unless the hosts are given."""

    world: int
    nodes: int = 1
    master: str = "127.0.0.1"
    port: int = 0  # 0: one that is free, on one node only
    prefixes: tuple[tuple[str, ...], ...] = ()  # of the command on each node: how to run something there
    rendezvous: str = RENDEZVOUS[0]  # how several nodes find each other


Commands = tuple[tuple[str, ...], ...]


def torchrun(size: Size, module: str, arguments: Sequence[str]) -> Commands:
    """A job under the plain launcher."""
    return _launcher("torch.distributed.run", size, module, arguments)


def tftrun(size: Size, module: str, arguments: Sequence[str]) -> Commands:
    """A job under our launcher, which takes torchrun's arguments."""
    return _launcher("mindspeed_tft.agent.tftrun", size, module, arguments)


def torchrun_logs_specs(size: Size, module: str, arguments: Sequence[str]) -> Commands:
    """A job under the plain launcher, which learns from a plugin of its own kind what ours can do."""
    return _launcher("torch.distributed.run", size, module, arguments, "--logs-specs", "mindspeed_tft")


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports for servers of a job. While they are held, the kernel gives them to nobody as the port of a connection; who
    listens with SO_REUSEADDR, as servers do, may have them."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))
            ports.append(int(holder.getsockname()[1]))
        yield ports


LAUNCHERS: Mapping[str, Callable[[Size, str, Sequence[str]], Commands]] = {
    "torchrun": torchrun,
    "tftrun": tftrun,
    "torchrun-logs-specs": torchrun_logs_specs,
}
REBOOTING = ("tftrun", "torchrun-logs-specs")  # they start a dead worker again alone


def default_launcher(preset: str) -> str:
    """The launcher of the broken job, where nobody names one."""
    return REBOOTING[0] if preset == "recover" else "torchrun"


def _launcher(launcher: str, size: Size, module: str, arguments: Sequence[str], *more: str) -> Commands:
    shape = ("--nnodes", str(size.nodes), "--nproc-per-node", str(size.world // size.nodes), "--max-restarts", "0")
    head, tail = (sys.executable, "-m", launcher, *shape), (*more, "-m", module, *arguments)
    if size.nodes == 1:
        place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
        return ((*head, *place, *tail),)
    prefixes = size.prefixes or ((),) * size.nodes
    if size.rendezvous == "c10d":  # the same command on all nodes
        endpoint = ("--rdzv-endpoint", f"{size.master}:{size.port}", "--rdzv-id", f"drill-{size.port}")
        return tuple((*prefix, *head, "--rdzv-backend", "c10d", *endpoint, *tail) for prefix in prefixes)
    where = ("--master-addr", size.master, "--master-port", str(size.port))
    return tuple((*prefix, *head, "--node-rank", str(node), *where, *tail) for node, prefix in enumerate(prefixes))


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


def _watch(nodes: Sequence[_Node], deadline: float, logs: Sequence[_Steps], replacements: int) -> int | None:
    """The status of the job: the first that is not 0, of the launchers that nobody killed."""
    while time.monotonic() < deadline:
        for log in logs:
            log.look()
        for node in nodes:
            node.look()
        others = any(node.status is None for node in nodes)
        for node in nodes:
            if replacements and node.goes(others):
                replacements -= 1
                node.replace()
        if all(node.status is not None for node in nodes):
            ended = [node.status for node in nodes if not node.killed] or [node.status for node in nodes]
            return next((status for status in ended if status), 0)
        time.sleep(_POLL)
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
    return [process for process, _ in processes.of_job(mark)]


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
