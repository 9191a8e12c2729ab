"""What an incident leaves behind: one JSON file with its timeline, and a log of events as JSON lines.

Written by the controller from the events and actions that pass through it; holds no opinion. A disk that is full or
gone is said once and changes nothing else.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import platform
import queue
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from mindspeed_tft.engine import types as t

log = logging.getLogger(__name__)

SCHEMA = 1
EVENTS_FILE = "events.jsonl"
_PACKAGES = ("mindspeed_tft", "torch", "torch_npu", "megatron-core", "grpcio", "protobuf")
_MAX_KEPT = 500_000  # a reboot of 16,384 ranks in one try is 115,000
_MAX_WAITING = 200_000
_GATHER = 0.02  # seconds for which lines are gathered: thousands come at once, and each write to a file costs
_BURST = 100  # lines in that time, while which the controller has better things to do than to write: so it waits
_MAX_GATHER = 1.0  # but no longer


def versions() -> dict[str, str]:
    """Of what may matter to a reader of the incident; what is not installed is left out."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def as_dict(item: t.Event | t.Action) -> dict[str, Any]:
    """The item with the name of its class, ready for JSON."""
    return {"what": type(item).__name__, **vars(item)}


_encode = json.JSONEncoder(default=vars).encode  # values are strings, numbers, their collections and plain data classes


def _lay_out(value: Any, depth: int = 0) -> str:
    """JSON with a line for each key and for each item of a list, at the speed of the encoder in C."""
    before, after = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict) and value:
        inner = (f"{before}{_encode(str(key))}: {_lay_out(item, depth + 1)}" for key, item in value.items())
        return "{" + ",".join(inner) + after + "}"
    if isinstance(value, list) and value:
        return "[" + ",".join(f"{before}{_encode(item)}" for item in value) + after + "]"
    return _encode(value)


class _Pen(threading.Thread):
    """Writes in a thread of its own: a shared file system that hangs must not hold the controller."""

    def __init__(self) -> None:
        super().__init__(name="tft-incident-writer", daemon=True)
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(_MAX_WAITING)
        self._failed = False
        self.start()

    def run(self) -> None:
        while True:
            job = self._jobs.get()  # ends with the process
            try:
                job()
            except OSError as error:
                self.complain(error)

    def submit(self, job: Callable[[], None]) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self.complain("the file system does not keep up")

    def complain(self, error: object) -> None:
        if not self._failed:
            self._failed = True
            log.warning("events or incidents cannot be written: %s; going on without", error)


@dataclasses.dataclass(frozen=True)
class _Case:
    """What was seen of one incident. Only the pen looks at it: for thousands of ranks it is a second of work."""

    run: str
    epoch: int
    opened: float
    offset: float
    items: list[tuple[float, t.Event | t.Action]]
    ranks: dict[int, t.RankInfo]

    def report(self, outcome: str, step: int, summary: str, at: float) -> dict[str, Any]:
        t0 = self.opened
        notes = [(when, item) for when, item in self.items if isinstance(item, t.Note)]
        return {
            "schema": SCHEMA,
            "run": self.run,
            "epoch": self.epoch,
            "opened": t0 + self.offset,
            "closed": at + self.offset,
            "outcome": outcome,
            "step": step,
            "summary": summary,
            "decision": [note.text for _, note in notes if note.stage.startswith(("decide", "decision", "plan"))],
            "seconds": stage_seconds([(when, note.stage) for when, note in notes], t0, at),
            "timeline": [
                {"t": round(when - t0, 6), "stage": note.stage, "text": note.text, "warn": note.warn}
                for when, note in notes
            ],
            "faults": [
                {"t": round(when - t0, 6), **as_dict(item)}
                for when, item in self.items
                if isinstance(item, (t.FaultSeen, t.RankLost))
            ],
            "stops": [
                {"t": round(when - t0, 6), **as_dict(item)} for when, item in self.items if isinstance(item, t.Stop)
            ],
            "reports": [
                {"t": round(when - t0, 6), **vars(item.report)}
                for when, item in self.items
                if isinstance(item, t.Reported)
            ],
            "orders": self._orders(t0),
            "ranks": [vars(self.ranks[rank]) for rank in sorted(self.ranks)],
            "versions": versions(),
        }

    def _orders(self, t0: float) -> list[dict[str, Any]]:
        done = {item.order: (when, item) for when, item in self.items if isinstance(item, t.OrderDone)}
        found: list[dict[str, Any]] = []
        for when, item in self.items:
            if isinstance(item, t.Order):
                entry: dict[str, Any] = {"t": round(when - t0, 6), **as_dict(item)}
                if item.id in done:
                    end, answer = done[item.id]
                    entry.update(seconds=round(end - when, 6), ok=answer.ok, message=answer.message)
                    entry["result"] = answer.result
                found.append(entry)
        return found


class Recorder:
    """Collects an incident while it goes on. Times of events are monotonic; `wall` moves them to the calendar."""

    def __init__(self, directory: str | Path, run: str) -> None:
        self._directory = Path(directory)
        self._run = run
        self._offset = time.time() - time.monotonic()
        self._pen = _Pen()
        self._ranks: dict[int, t.RankInfo] = {}
        self._lines: collections.deque[tuple[float, t.Event | t.Action]] = collections.deque()  # for the log of events
        self._writing = False  # the pen will come for them
        self._reset()

    def _reset(self) -> None:
        self._opened: float | None = None
        self._epoch = 0
        self._items: list[tuple[float, t.Event | t.Action]] = []

    @property
    def open(self) -> bool:
        """True from the first sign of a fault until the incident is closed."""
        return self._opened is not None

    def event(self, event: t.Event) -> None:
        """Something happened."""
        if isinstance(event, (t.Tick, t.Heartbeat)):
            return
        if isinstance(event, t.Registered):
            self._ranks[event.info.rank] = event.info
        if isinstance(event, (t.FaultSeen, t.RankLost)):
            self._open(event.at)
        self._keep(event.at, event)

    def action(self, action: t.Action, at: float) -> None:
        """The engine answered."""
        if isinstance(action, t.Stop):
            self._open(at)
            self._epoch = action.epoch
        self._keep(at, action)

    def close(self, closed: t.Closed, at: float, engine: dict[str, object], timeout: float = 5.0) -> Path | None:
        """Writes the incident, with the engine's own view. None: there was none, or it was not written in time."""
        if self._opened is None:
            return None
        path, written = self._write(closed.outcome, closed.step, closed.summary, at, engine)
        try:
            return written.get(timeout=timeout)
        except queue.Empty:
            self._pen.complain(f"{path} was not written within {timeout:.0f} s")
            return None

    def recovered(self, recovered: t.Recovered, at: float, engine: dict[str, object]) -> Path:
        """Writes an incident after which training goes on; waits for no disk. Where it will be."""
        self._open(at)
        path, _ = self._write(recovered.outcome, recovered.step, recovered.summary, at, engine)
        return path

    def flush(self, timeout: float = 5.0) -> bool:
        """Waits until all that was recorded so far is on disk; False when it is not in time, which is said."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._pen.submit(lambda: done.put(None))
        try:
            done.get(timeout=timeout)
        except queue.Empty:
            self._pen.complain(f"not all was written within {timeout:.0f} s")
            return False
        return True

    def _write(
        self, outcome: str, step: int, summary: str, at: float, engine: dict[str, object]
    ) -> tuple[Path, queue.SimpleQueue[Path]]:
        assert self._opened is not None
        case = _Case(self._run, self._epoch, self._opened, self._offset, self._items, dict(self._ranks))
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self._opened + self._offset))
        path = self._directory / f"incident-{stamp}-{self._epoch}.json"
        self._reset()
        written: queue.SimpleQueue[Path] = queue.SimpleQueue()

        def write() -> None:
            text = _lay_out({**case.report(outcome, step, summary, at), "engine": engine})
            target = path
            self._directory.mkdir(parents=True, exist_ok=True)
            while target.exists():  # a second incident in the same second, or another job in the same directory
                target = target.with_name(f"{target.stem}x.json")
            write_atomic(target, text)
            written.put(target)

        self._pen.submit(write)
        return path, written

    def _open(self, at: float) -> None:
        if self._opened is None:
            self._opened = at

    def _keep(self, at: float, item: t.Event | t.Action) -> None:
        if self.open and len(self._items) < _MAX_KEPT:
            self._items.append((at, item))
        if len(self._lines) >= _MAX_WAITING:
            self._pen.complain("the file system does not keep up")
            return
        self._lines.append((at, item))
        if not self._writing:
            self._writing = True
            self._pen.submit(self._write_lines)

    def _line(self, at: float, item: t.Event | t.Action) -> str:
        return (
            _encode({"wall": round(at + self._offset, 6), "at": round(at, 6), "run": self._run, **as_dict(item)}) + "\n"
        )

    def _write_lines(self) -> None:
        end, before = time.monotonic() + _MAX_GATHER, 0
        while time.monotonic() < end:
            time.sleep(_GATHER)
            if len(self._lines) - before < _BURST:
                break
            before = len(self._lines)
        self._writing = False  # before they are taken: who adds one later asks again
        lines = [self._line(*self._lines.popleft()) for _ in range(len(self._lines))]
        self._directory.mkdir(parents=True, exist_ok=True)
        with open(self._directory / EVENTS_FILE, "a") as file:
            file.write("".join(lines))


def stage_seconds(stages: list[tuple[float, str]], start: float, end: float) -> dict[str, float]:
    """Seconds spent in each stage: from its note to the next note of another stage. The total is from fault to end."""
    found: dict[str, float] = {}
    for index, (when, stage) in enumerate(stages):
        until = stages[index + 1][0] if index + 1 < len(stages) else end
        found[stage] = found.get(stage, 0.0) + until - when
    return {stage: round(seconds, 6) for stage, seconds in {**found, "total": end - start}.items()}


def write_atomic(path: Path, text: str) -> None:
    """The whole file or none of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
