"""How a training process breaks itself on purpose, for drills and tests.

A drill names the faults in `TFT_DRILL_FAULTS`; hooks in the training loop call `reach` at every phase of a step.
Without that variable nothing is read, nothing is kept and `reach` returns at once.

Environment:
  TFT_DRILL_FAULTS  comma list of KIND@RANK:STEP[:PHASE]; a process takes those of its own rank
  TFT_DRILL_SEED    chooses the phase of a fault that names none (default 0)
  TFT_DRILL_LOG     file to which a line is appended, on disk before the fault fires: the drill counts seconds from it,
                    and what is already in it does not fire again in a process that is started anew

A fault that is given several times fires as often: once at each try of its step, or at each try of the repair.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_tft.faults.classify import MEMORY_ERROR, NO_LIVE_TENSOR
from mindspeed_tft.faults.spec import GOES_ON, REPAIR_PHASES, FaultSpec, SpecError, parse_fault, parse_faults, without

ENV_FAULTS = "TFT_DRILL_FAULTS"
ENV_SEED = "TFT_DRILL_SEED"
ENV_LOG = "TFT_DRILL_LOG"


class DrillException(RuntimeError):
    """The exception of fault kind `exc`: stands for an error in the user's own code."""


@dataclass(frozen=True)
class Hooks:
    """What only the framework's side can do to a rank. Each returns what it did, in a few words."""

    platform: str  # whose words a memory error is told in
    damage: Callable[[], str]  # destroy what this rank's device memory holds of the training state
    cut: Callable[[], str]  # shut this rank's connections to the others and tell nobody


_hooks: Hooks | None = None


def register(hooks: Hooks) -> None:
    """Provide what the kinds `uce` and `link` need."""
    global _hooks
    _hooks = hooks


class Injector:
    """The faults of one rank that have not fired yet."""

    def __init__(self, rank: int, faults: tuple[FaultSpec, ...], log: Path | None = None) -> None:
        self.rank = rank
        self._log = log
        self._waiting = list(without((fault for fault in faults if fault.rank == rank), _fired_before(log)))
        self._fired: set[FaultSpec] = set()  # in this try of the step
        self._furthest = 0  # the last step that this rank began
        # Megatron's hooks run on the main thread and on autograd's; one fault must not fire on both.
        self._lock = threading.Lock()

    def begin(self, step: int) -> None:
        """A try of `step` begins: what is given several times may fire once more."""
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
    return Injector(rank, faults, Path(log) if log else None)


def fire(fault: FaultSpec) -> None:
    """Break this process in the way that the fault says."""
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "term":
        # Handled like any SIGTERM: a handler may run and the process may live on for a while.
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.kind == "segv":
        ctypes.string_at(0)
    elif fault.kind == "exc":
        raise DrillException(f"drill: {fault}")
    elif fault.kind == "uce":
        hooks = _needed(fault)
        _say(fault, hooks.damage())
        raise RuntimeError(f"{MEMORY_ERROR[hooks.platform]} (drill: {fault})")
    elif fault.kind == "uce-low":
        raise RuntimeError(f"{MEMORY_ERROR[_needed(fault).platform]} (drill: {fault}): {NO_LIVE_TENSOR}")
    elif fault.kind == "link":
        # Nothing is raised: the next communication fails by itself, here and at the other ends.
        _say(fault, _needed(fault).cut())
    elif fault.kind == "nan":
        # Silent: who called `reach` multiplies the gradient, and nothing is raised.
        _say(fault, "the gradient that passes here becomes NaN")
    else:
        raise SpecError(f"fault {fault}: kind {fault.kind!r} cannot be injected yet")


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


def _fired_before(log: Path | None) -> list[FaultSpec]:
    """A rank that was started again must not break a second time at the same place."""
    if log is None or not log.exists():
        return []
    return [parse_fault(str(json.loads(line)["fault"])) for line in log.read_text().splitlines() if line.strip()]


def _integer(environ: Mapping[str, str], name: str, default: str) -> int:
    text = environ.get(name, default)
    try:
        return int(text)
    except ValueError as error:
        raise SpecError(f"{name}={text!r}: expected an integer") from error


_ordered = from_environment(os.environ)
