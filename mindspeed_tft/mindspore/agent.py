"""What supervises the workers under an unmodified msrun: it waits while survivors save, and starts the job again.

With a feature named in MS_ENABLE_TFT, msrun leaves its processes to a TaskD agent, if one can be imported: it registers
four functions that start, kill and look at workers, and lets the agent run. `mindspeed_tft.names` gives it
this one. msrun itself would kill all workers at once when one fails, and ends with 0 whatever happens here: so this
agent ends the process with a status of its own, and leaves nothing of the job behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from mindspeed_tft.engine.incident import EXIT_SAVED, EXIT_UNDECIDED, EXIT_UNSAVED
from mindspeed_tft.mindspore import places, switches
from mindspeed_tft.observe import logs
from mindspeed_tft.settings import Refused

log = logging.getLogger(__name__)

RESTARTS, PATIENCE = "TFT_MSRUN_RESTARTS", places.PATIENCE
_DEFAULTS = {RESTARTS: 3.0, PATIENCE: 150.0}
FUNCTIONS = ("KILL_WORKER", "START_ALL_WORKER", "START_WORKER_LIST", "MONITOR")
ALL = [-1]  # as msrun's functions name all workers
LOOK = 0.2  # seconds
REFUSED = 2  # exit status
_SCHEDULER = 5.0  # seconds for MindSpore's scheduler to end by itself
_KILLED = 5.0


@dataclass(frozen=True)
class Limits:
    """How often the job is started again, and how long survivors of a fault may take to end, in seconds."""

    restarts: int
    patience: float


def limits(environ: Mapping[str, str]) -> Limits:
    """
    Raises:
        Refused: not a number, or negative.
    """
    found = {}
    for name, default in _DEFAULTS.items():
        text = environ.get(name, "").strip()
        try:
            found[name] = float(text) if text else default
        except ValueError:
            found[name] = -1.0
        if not 0 <= found[name] <= 1e6:
            raise Refused(name, f"{text!r} is no number of that kind", f"give one from 0 on (default {default:g})")
    return Limits(int(found[RESTARTS]), found[PATIENCE])


class Agent:
    """Supervises the workers of this host through the functions of msrun."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._limits = limits(os.environ if environ is None else environ)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._logs: set[Path] = set()
        self._asked = ""  # a signal that asked this job to end
        self.life = 0

    def register(self, name: str, function: Callable[..., Any]) -> None:
        """
        Raises:
            ValueError: msrun has no such function.
        """
        if name not in FUNCTIONS:
            raise ValueError(f"{name!r} is none of the functions that an agent uses: {', '.join(FUNCTIONS)}")
        self._functions[name] = function

    def run(self) -> int:
        """Run the job to its end; its exit status."""
        if missing := [name for name in FUNCTIONS if name not in self._functions]:
            raise ValueError(f"msrun has not registered {', '.join(missing)}")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        try:
            with tempfile.TemporaryDirectory(prefix="tft-msrun-") as told_in:
                return self._run(Path(told_in))
        finally:
            self._clear()

    def _run(self, told_in: Path) -> int:
        os.environ[places.STATUS] = str(told_in)
        os.environ[PATIENCE] = f"{self._limits.patience:g}"  # no rank counts on more
        os.environ[places.LOCAL] = str(len(self._look()))
        while True:
            os.environ[places.LIFE] = str(self.life)
            self._functions["START_ALL_WORKER"]()
            self._note_logs()
            states = self._watch()
            if all(state == 0 for state in states.values()):
                return 0
            self._functions["KILL_WORKER"](ALL)  # MindSpore's scheduler stays, and takes the next ones in
            states.update(left_status(told_in))
            code = worst(states)
            told = ", ".join(f"rank {rank}: {state}" for rank, state in sorted(states.items()))
            if self._asked or self.life >= self._limits.restarts:
                why = (
                    f"asked to end by {self._asked}" if self._asked else f"{self.life} restarts were made ({RESTARTS})"
                )
                _say(f"the job ends with status {code}, and is not started again: {why}; {told}")
                return code
            self._keep_logs()
            self.life += 1
            _say(f"the job is started again, {self.life} of {self._limits.restarts} times; {told}")

    def _watch(self) -> dict[int, int]:
        """Exit status of each worker, once all have ended. After the first failure the others have a limit."""
        end = float("inf")
        while True:
            found = self._look()
            running = [rank for rank, state in found.items() if state is None]
            if found and not running:
                return {rank: int(state) for rank, state in found.items() if state is not None}
            failed = any(state not in (None, 0) for state in found.values())
            if end == float("inf") and (failed or self._asked):
                end = time.monotonic() + self._limits.patience
            if time.monotonic() > end:
                _say(f"ranks {running} did not end within {self._limits.patience:g} s ({PATIENCE}), and are killed")
                return {rank: EXIT_UNDECIDED if state is None else int(state) for rank, state in found.items()}
            time.sleep(LOOK)

    def _look(self) -> dict[int, int | None]:
        """Rank -> exit status; None while it runs."""
        told = self._functions["MONITOR"](ALL)
        return {int(rank): facts["status"] for rank, facts in told.items()}

    def _note_logs(self) -> None:
        """Where workers write what they print: msrun begins these files anew with each start."""
        for facts in self._functions["MONITOR"](ALL).values():
            with contextlib.suppress(OSError):  # it has ended already
                path = Path(os.readlink(f"/proc/{facts['pid']}/fd/1"))
                if path.is_absolute() and path.is_file():
                    self._logs.add(path)

    def _keep_logs(self) -> None:
        for path in self._logs:
            try:
                shutil.copyfile(path, path.with_name(f"{path.name}.{self.life}"))
            except OSError as exc:
                log.warning("the log of this life is not kept: %s", exc)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        """This job is asked to end: so are its workers, which save."""
        self._asked = signal.Signals(number).name
        for facts in self._functions["MONITOR"](ALL).values():
            if facts["status"] is None and facts["pid"] > 0:
                os.kill(int(facts["pid"]), signal.SIGTERM)

    def _clear(self) -> None:
        """Nothing that msrun started is left: workers, the scheduler, the `tail` of a log."""
        left = psutil.Process().children(recursive=True)
        _, left = psutil.wait_procs(left, timeout=_SCHEDULER)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, left = psutil.wait_procs(left, timeout=_KILLED)
        if left:
            log.warning("processes %s of this job do not end", [process.pid for process in left])


def left_status(directory: Path) -> dict[int, int]:
    """What workers said when they left, by rank; said once. msrun's MONITOR says 300 of every worker that failed."""
    found = {}
    for path in directory.iterdir():
        if path.name.isdigit():
            found[int(path.name)] = int(path.read_text(encoding="utf-8"))
        path.unlink()
    return found


def worst(states: Mapping[int, int]) -> int:
    """The exit status of a job whose workers ended so. Saved counts more than how one of them was lost."""
    for code in (EXIT_SAVED, EXIT_UNSAVED, EXIT_UNDECIDED):
        if code in states.values():
            return code
    return 1


# ------------------------------------------------------------------------------------------- as msrun calls it

_agent: Agent | None = None


def init_taskd_agent(config: Mapping[str, Any], cls: Any = None) -> bool:
    """`config`: {"Framework": "MindSpore"}. True: this agent takes over. What cannot be served ends the process."""
    global _agent
    logs.install("text", "agent")
    framework = str(config.get("Framework", ""))
    try:
        if framework != "MindSpore":
            raise Refused("Framework", f"this agent starts jobs of MindSpore, and not of {framework!r}", "use tftrun")
        switches.read(os.environ)
        _agent = Agent()
    except Refused as exc:
        _say(str(exc))
        sys.exit(REFUSED)
    return True


def register_func(operator: str, func: Callable[..., Any]) -> bool:
    """One of msrun's functions; see `FUNCTIONS`."""
    if _agent is None:
        raise RuntimeError("register_func before init_taskd_agent")
    _agent.register(operator, func)
    return True


def start_taskd_agent() -> None:
    """Supervise to the end of the job. Returns where it ended well; otherwise ends the process with its status."""
    if _agent is None:
        raise RuntimeError("start_taskd_agent before init_taskd_agent")
    code = _agent.run()
    if code:
        sys.exit(code)


def _say(text: str) -> None:
    logs.say(text, sys.stderr, "agent")
