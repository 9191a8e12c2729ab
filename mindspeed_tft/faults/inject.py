"""How a training process breaks itself on purpose, for drills and tests.

A drill names the faults in `TFT_DRILL_FAULTS`; hooks in the training loop call `reach` at every phase of a step.
Without that variable nothing is read, nothing is kept and `reach` returns at once.

Environment:
  TFT_DRILL_FAULTS  comma list of KIND@RANK:STEP[:PHASE]; a process takes those of its own rank
  TFT_DRILL_SEED    chooses the phase of a fault that names none (default 0)
  TFT_DRILL_LOG     file to which a line is appended, on disk before the fault fires: the drill counts seconds from it,
                    and a fault that is already in it does not fire a second time
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
from mindspeed_tft.faults.spec import GOES_ON, FaultSpec, SpecError, parse_faults

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
        fired = _fired_before(log)
        self._waiting = [fault for fault in faults if fault.rank == rank and str(fault) not in fired]
        # Megatron's hooks run on the main thread and on autograd's; one fault must not fire on both.
        self._lock = threading.Lock()

    def due(self, phase: str, step: int) -> bool:
        """Whether a fault would fire here; nothing happens yet."""
        with self._lock:
            return any(fault.step == step and fault.phase == phase for fault in self._waiting)

    def breaks_off(self, phase: str, step: int) -> bool:
        """Whether a fault that would fire here ends the work at hand; after the others this rank goes on in it."""
        with self._lock:
            due = [fault for fault in self._waiting if fault.step == step and fault.phase == phase]
        return any(fault.kind not in GOES_ON for fault in due)

    def reach(self, phase: str, step: int) -> None:
        """Fire what is due here: everything of this step that names this phase."""
        with self._lock:
            due = [fault for fault in self._waiting if fault.step == step and fault.phase == phase]
            self._waiting = [fault for fault in self._waiting if fault not in due]
        for fault in due:
            self._announce(fault)
            fire(fault)

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


def reach(phase: str, step: int) -> None:
    """Called by the training hooks when this rank reaches a phase of a step."""
    if _ordered is not None:
        _ordered.reach(phase, step)


def _append_line(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, (line + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fired_before(log: Path | None) -> set[str]:
    """A rank that was started again must not break a second time at the same place."""
    if log is None or not log.exists():
        return set()
    return {str(json.loads(line)["fault"]) for line in log.read_text().splitlines() if line.strip()}


def _integer(environ: Mapping[str, str], name: str, default: str) -> int:
    text = environ.get(name, default)
    try:
        return int(text)
    except ValueError as error:
        raise SpecError(f"{name}={text!r}: expected an integer") from error


_ordered = from_environment(os.environ)
