"""What an incident leaves behind: one JSON file with its timeline, a page to look at, and a log of events as JSON
lines.

Written by the controller from the events and actions that pass through it; holds no opinion. A disk that is full or
gone is said once and changes nothing else.
"""

from __future__ import annotations

import collections
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_tft.engine import types as t
from mindspeed_tft.observe import explain, page
from mindspeed_tft.observe.files import page_of, write_atomic
from mindspeed_tft.observe.report import Case, Items, Seen, as_dict

log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
_LEAD = 120.0  # seconds before a fault whose notes and looks at processes belong to its incident
_MAX_KEPT = 500_000  # a reboot of 16,384 ranks in one try is 115,000
_MAX_WAITING = 200_000
_GATHER = 0.02  # seconds for which lines are gathered: thousands come at once, and each write to a file costs
_BURST = 100  # lines in that time, while which the controller has better things to do than to write: so it waits
_MAX_GATHER = 5.0  # but no longer: a controller that dies takes these lines with it


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


def _complete(content: dict[str, Any]) -> dict[str, Any]:
    """With all that follows from it. What cannot be worked out must not cost the facts."""
    try:
        return explain.upgrade(content)
    except Exception:
        log.exception("an incident could not be worked out: its file has the bare facts")
        return content


def _write_page(incident: Path, content: dict[str, Any], text: str) -> None:
    try:
        rendered = page.render(content, incident.name, text)
    except Exception:
        log.exception("the page of %s could not be made; `tftctl explain` reads the file itself", incident)
        return
    write_atomic(page_of(incident), rendered)


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


class Recorder:
    """Collects an incident while it goes on. Times of events are monotonic; `wall` moves them to the calendar."""

    def __init__(self, directory: str | Path, run: str, job: Mapping[str, str] | None = None) -> None:
        """`job`: what the ranks say of it (layout, dtype, replicas, ...), for the reader of an incident."""
        self._directory = Path(directory)
        self._run, self._job = run, dict(job or {})
        self._offset = time.time() - time.monotonic()
        self._pen = _Pen()
        self._ranks: dict[int, t.RankInfo] = {}
        self._beats: dict[int, t.Heartbeat] = {}  # the last one of each rank
        self._lead: collections.deque[tuple[float, t.Event | t.Action]] = collections.deque(maxlen=100)
        self._lines: collections.deque[tuple[float, t.Event | t.Action]] = collections.deque()  # for the log of events
        self._writing = False  # the pen will come for them
        self.step = 0  # the last that any rank told of; 0: none
        self._reset()

    def _reset(self) -> None:
        self._opened: float | None = None
        self._epoch = self._first_epoch = 0
        self._items: Items = []
        self._before = Seen()

    @property
    def open(self) -> bool:
        """True from the first sign of a fault until the incident is closed."""
        return self._opened is not None

    @property
    def incident(self) -> int:
        """The epoch of the first stop of the incident that is open, as ranks name it too; 0: there is none."""
        return self._first_epoch

    def event(self, event: t.Event) -> None:
        """Something happened."""
        if isinstance(event, t.Heartbeat):  # thousands a second
            self._beats[event.rank] = event
            if event.step > self.step:
                self.step = event.step
            return
        if isinstance(event, t.Tick):
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
            self._first_epoch = self._first_epoch or action.epoch
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
        self.step = recovered.step  # earlier ones are computed again after a rewind
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
        case = Case(
            *(self._run, self._epoch, self._opened, self._offset, self._items, dict(self._ranks)),
            before=self._before,
            job=self._job,
            directory=self._directory,
        )
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self._opened + self._offset))
        path = self._directory / f"incident-{stamp}-{self._epoch}.json"
        self._reset()
        written: queue.SimpleQueue[Path] = queue.SimpleQueue()

        def write() -> None:
            content = _complete({**case.report(outcome, step, summary, at), "engine": engine})
            text = _lay_out(content)
            target = path
            self._directory.mkdir(parents=True, exist_ok=True)
            while target.exists():  # a second incident in the same second, or another job in the same directory
                target = target.with_name(f"{target.stem}x.json")
            write_atomic(target, text)
            written.put(target)
            _write_page(target, content, text)

        self._pen.submit(write)
        return path, written

    def _open(self, at: float) -> None:
        if self._opened is None:
            self._opened = at
            lead = [(when, item) for when, item in self._lead if at - _LEAD <= when < at]
            self._items = [
                (when, item) for when, item in self._lead if when >= at
            ]  # the first words of this very moment
            self._lead.clear()
            self._before = Seen(dict(self._ranks), dict(self._beats), lead)

    def _keep(self, at: float, item: t.Event | t.Action) -> None:
        if self.open and len(self._items) < _MAX_KEPT:
            self._items.append((at, item))
        elif isinstance(item, (t.Note, t.Examined)):
            self._lead.append((at, item))
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
