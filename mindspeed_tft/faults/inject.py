"""How a training process breaks itself on purpose, for drills and tests.

A drill names the faults in `TFT_DRILL_FAULTS`; hooks in the training loop call `reach` at every phase of a step.
Without that variable nothing is read, nothing is kept and `reach` returns at once.

Environment:
  TFT_DRILL_FAULTS  comma list of KIND@RANK:STEP[:PHASE]; a process takes those of its own rank
  TFT_DRILL_SEED    chooses the phase of a fault that names none (default 0)
  TFT_DRILL_LOG     file to which a line is appended, on disk before the fault fires: the drill counts seconds from it,
                    and what is already in it does not fire again in a process that is started anew
  TFT_DRILL_WAIT    1: all ranks wait for the launcher's warm standby at the begin of a step in which a process will end
  TFT_DRILL_PACE    a rank begins a step in which its process will end so many seconds after it ended last, at least:
                    launchers give up on a worker that dies again and again (default 0)

A fault that is given several times fires as often: once at each try of its step, or at each try of the repair.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_tft.agent import reboot
from mindspeed_tft.agent.standby import READY_FILE
from mindspeed_tft.faults import processes
from mindspeed_tft.faults.classify import MEMORY_ERROR, NO_LIVE_TENSOR
from mindspeed_tft.faults.spec import GOES_ON, REPAIR_PHASES, FaultSpec, SpecError, parse_fault, parse_faults, without

ENV_FAULTS = "TFT_DRILL_FAULTS"
ENV_SEED = "TFT_DRILL_SEED"
ENV_LOG = "TFT_DRILL_LOG"
ENV_WAIT = "TFT_DRILL_WAIT"
ENV_PACE = "TFT_DRILL_PACE"

STANDBY_LIMIT = 60.0  # seconds until which a standby has to be ready
_POLL = 0.05


class DrillException(RuntimeError):
    """The exception of fault kind `exc`: stands for an error in the user's own code."""


@dataclass(frozen=True)
class Hooks:
    """What only the framework's side can do to a rank. Each returns what it did, in a few words."""

    platform: str  # whose words a memory error is told in
    damage: Callable[[], str]  # destroy what this rank's device memory holds of the training state
    cut: Callable[[], str]  # shut this rank's connections to the others and tell nobody
    exhaust: Callable[[], None]  # ask the allocator for more than it can have, which raises
    flip: Callable[[random.Random], str]  # flip one bit of this rank's optimizer shard, once its hash is taken


_hooks: Hooks | None = None


def register(hooks: Hooks) -> None:
    """Provide what the kinds `uce`, `link` and `oom` need."""
    global _hooks
    _hooks = hooks


class Injector:
    """The faults of one rank that have not fired yet."""

    def __init__(
        self,
        rank: int,
        faults: tuple[FaultSpec, ...],
        log: Path | None = None,
        standby: Path | None = None,
        pace: float = 0.0,
    ) -> None:
        """
        Args:
            standby: the file whose existence says that a warm standby is ready; None: nobody waits for one.
            pace: seconds between two faults that end this rank's process.
        """
        self.rank = rank
        self._log, self._standby = log, standby
        before = _fired_before(log)
        left = without(faults, (fault for fault, _ in before))
        self._waiting = [fault for fault in left if fault.rank == rank]
        deaths = [fault for fault in left if fault.ends_process and fault.phase not in REPAIR_PHASES]
        self._deaths = {fault.step: {other.rank for other in deaths if other.step == fault.step} for fault in deaths}
        died = max((wall for fault, wall in before if fault.ends_process and fault.rank == rank), default=0.0)
        self._may_die = died + pace  # wall clock
        self._fired: set[FaultSpec] = set()  # in this try of the step
        self._furthest = 0  # the last step that this rank began
        # Megatron's hooks run on the main thread and on autograd's; one fault must not fire on both.
        self._lock = threading.Lock()

    def begin(self, step: int) -> None:
        """A try of `step` begins: what is given several times may fire once more."""
        self._hold(self._deaths.pop(step, set()))
        with self._lock:
            self._fired.clear()
            self._furthest = max(self._furthest, step)

    def due(self, phase: str, step: int) -> bool:
        """Whether a fault would fire here; nothing happens yet."""
        with self._lock:
            return bool(self._due(phase, step, self._fired))

    def breaks_off(self, phase: str, step: int) -> bool:
        """Whether a fault that would fire here ends the work at hand; after the others this rank goes on in it."""
        with self._lock:
            return any(fault.kind not in GOES_ON for fault in self._due(phase, step, self._fired))

    def reach(self, phase: str, step: int) -> bool:
        """Fire what is due here, each once, until one ends the work at hand; what is left waits for the next try.

        True when the gradient that passes here has to be corrupted: that is up to the caller, who holds it.
        """
        corrupted = False
        # A place of a step is passed with every micro-batch; an order comes once in each try.
        fired = set() if phase in REPAIR_PHASES else self._fired
        while (fault := self._take(phase, step, fired)) is not None:
            self._announce(fault)
            corrupted = corrupted or fault.kind == "nan"
            fire(fault)
        return corrupted

    def _take(self, phase: str, step: int, fired: set[FaultSpec]) -> FaultSpec | None:
        with self._lock:
            due = self._due(phase, step, fired)
            if not due:
                return None
            self._waiting.remove(due[0])
            fired.add(due[0])
            return due[0]

    def _due(self, phase: str, step: int, fired: set[FaultSpec]) -> list[FaultSpec]:
        """Under the lock. In a repair it is enough that the step was reached: `step` is the one after the last
        completed step, and a rank may have come further, or has been put back by an earlier try."""
        waiting = [fault for fault in self._waiting if fault.phase == phase and fault not in fired]
        if phase in REPAIR_PHASES:
            return [fault for fault in waiting if fault.step <= max(step, self._furthest)]
        return [fault for fault in waiting if fault.step == step]

    def _hold(self, doomed: set[int]) -> None:
        """Wait until these ranks may die. Only at the begin of a step: a rank that waits cannot obey a stop, and where
        all wait nobody is stopped."""
        if self.rank in doomed:
            time.sleep(max(0.0, self._may_die - time.time()))
        if doomed and self._standby is not None:
            _wait_for(self._standby)

    def _announce(self, fault: FaultSpec) -> None:
        record = {
            "fault": str(fault),
            "kind": fault.kind,
            "rank": fault.rank,
            "step": fault.step,
            "phase": fault.phase,
            "pid": os.getpid(),
            "wall": time.time(),
            "monotonic": time.monotonic(),
        }
        print(
            f"drill: rank {self.rank} fires {fault} (wall {record['wall']:.6f}, monotonic {record['monotonic']:.6f})",
            flush=True,
        )
        if self._log is not None:
            _append_line(self._log, json.dumps(record))


def from_environment(environ: Mapping[str, str]) -> Injector | None:
    """The injector that a drill ordered through the environment, None when there is none."""
    text = environ.get(ENV_FAULTS, "")
    if not text.strip():
        return None
    if "RANK" not in environ:
        # A launcher or helper process inherits the variable: only ranks break.
        return None
    seed = _integer(environ, ENV_SEED, "0")
    rank = _integer(environ, "RANK", "0")
    log = environ.get(ENV_LOG)
    faults = tuple(fault.settled(seed) for fault in parse_faults(text))
    standby = Path(environ[reboot.ENV_DIRECTORY]) / READY_FILE if environ.get(ENV_WAIT) == "1" else None
    return Injector(rank, faults, Path(log) if log else None, standby, float(_integer(environ, ENV_PACE, "0")))


def fire(fault: FaultSpec) -> None:
    """Break this process in the way that the fault says."""
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "term":
        # Handled like any SIGTERM: a handler may run and the process may live on for a while.
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.kind == "segv":
        ctypes.string_at(0)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "hang":
        while True:  # pause returns when a signal was handled, and whoever looks for hangs may send one
            ctypes.CDLL(None).pause()
    elif fault.kind == "controller":
        _say(fault, f"processes {processes.end([processes.leading_controller(_mark(fault))])} killed")
    elif fault.kind == "agent":
        _say(fault, f"processes {processes.end([processes.launcher()])} killed")
    elif fault.kind == "node":
        processes.end_node(_mark(fault), int(os.environ[processes.ENV_NODE]))
    elif fault.kind == "exc":
        raise DrillException(f"drill: {fault}")
    elif fault.kind == "oom":
        _needed(fault).exhaust()
        raise SpecError(f"fault {fault}: the allocator gave what no machine has")
    elif fault.kind == "uce":
        hooks = _needed(fault)
        _say(fault, hooks.damage())
        raise RuntimeError(f"{MEMORY_ERROR[hooks.platform]} (drill: {fault})")
    elif fault.kind == "uce-low":
        raise RuntimeError(f"{MEMORY_ERROR[_needed(fault).platform]} (drill: {fault}): {NO_LIVE_TENSOR}")
    elif fault.kind == "link":
        # Nothing is raised: the next communication fails by itself, here and at the other ends.
        _say(fault, _needed(fault).cut())
    elif fault.kind == "flip":
        # A generator of its own, and the same bit each time.
        _say(fault, _needed(fault).flip(random.Random(str(fault))))
    elif fault.kind == "nan":
        # Silent: who called `reach` multiplies the gradient, and nothing is raised.
        _say(fault, "the gradient that passes here becomes NaN")
    else:
        raise SpecError(f"fault {fault}: kind {fault.kind!r} cannot be injected yet")


def _wait_for(standby: Path) -> None:
    """A drill with a warm standby rehearses nothing without one.

    Raises:
        SpecError: there is none in time.
    """
    deadline = time.monotonic() + STANDBY_LIMIT
    while not standby.exists():
        if time.monotonic() > deadline:
            raise SpecError(f"{ENV_WAIT}=1: the launcher has no warm standby after {STANDBY_LIMIT:g} s; see its output")
        time.sleep(_POLL)


def _mark(fault: FaultSpec) -> str:
    if not os.environ.get(processes.ENV_MARK):
        raise SpecError(
            f"fault {fault}: {processes.ENV_MARK} is not set, so which processes are this job's is not known"
        )
    return os.environ[processes.ENV_MARK]


def _needed(fault: FaultSpec) -> Hooks:
    if _hooks is None:
        raise SpecError(f"fault {fault}: nothing here says how to do that to this rank")
    return _hooks


def _say(fault: FaultSpec, what: str) -> None:
    print(f"drill: {fault}: {what}", flush=True)


def due(phase: str, step: int) -> bool:
    """Whether `reach` would break this rank here: for hooks that have to prepare the place."""
    return _ordered is not None and _ordered.due(phase, step)


def breaks_off(phase: str, step: int) -> bool:
    """Whether `reach` would end the work at hand here."""
    return _ordered is not None and _ordered.breaks_off(phase, step)


def begin(step: int) -> None:
    """Called by the training hooks when this rank begins to compute a step, also when it does so again."""
    if _ordered is not None:
        _ordered.begin(step)


def reach(phase: str, step: int) -> bool:
    """Called by the training hooks when this rank reaches a phase of a step, or of a repair. True: corrupt the gradient
    that passes here."""
    return _ordered is not None and _ordered.reach(phase, step)


def _append_line(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, (line + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fired_before(log: Path | None) -> list[tuple[FaultSpec, float]]:
    """Faults of all ranks, with the wall clock: a rank that was started again must not break a second time at the same
    place."""
    if log is None or not log.exists():
        return []
    records = [json.loads(line) for line in log.read_text().splitlines() if line.strip()]
    return [(parse_fault(str(record["fault"])), float(record["wall"])) for record in records]


def _integer(environ: Mapping[str, str], name: str, default: str) -> int:
    text = environ.get(name, default)
    try:
        return int(text)
    except ValueError as error:
        raise SpecError(f"{name}={text!r}: expected an integer") from error


_ordered = from_environment(os.environ)
