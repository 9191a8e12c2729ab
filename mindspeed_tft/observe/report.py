"""The content of an incident file: what was seen, in the order in which it was seen, as plain values.

Nothing is judged here; what follows from it (`lanes`, `moved`, `reproduce`, `explain`) is added by `explain.upgrade`.
Only the pen looks at it: for thousands of ranks it is seconds of work.
"""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from mindspeed_tft.engine import types as t
from mindspeed_tft.observe.files import stacks_name

SCHEMA = 2
_PACKAGES = ("mindspeed_tft", "torch", "torch_npu", "megatron-core", "mindspeed", "numpy", "grpcio", "protobuf")
_DECIDING = ("decide", "decision", "plan", "consult")  # stages, or how their names begin
_STACKS_KEPT = 32
_LONGEST_STACKS = 64 << 10  # bytes of one rank

Items = list[tuple[float, t.Event | t.Action]]


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


@dataclass(frozen=True)
class Seen:
    """What was known of the job when the incident began."""

    ranks: dict[int, t.RankInfo] = field(default_factory=dict)
    last: dict[int, t.Heartbeat] = field(default_factory=dict)  # of each rank, the last one before
    lead: Items = field(default_factory=list)  # notes and looks at processes of the minutes before


@dataclass(frozen=True)
class Case:
    """What was seen of one incident. Times are monotonic; `offset` moves them to the calendar."""

    run: str
    epoch: int
    opened: float
    offset: float
    items: Items
    ranks: dict[int, t.RankInfo]
    before: Seen = field(default_factory=Seen)
    directory: Path | None = None  # of incidents, where relays leave the stacks of ranks
    job: Mapping[str, str] = field(default_factory=dict)  # what the ranks said of it: layout, dtype, replicas, ...

    def report(self, outcome: str, step: int, summary: str, at: float) -> dict[str, Any]:
        """The content, without the engine's own view. Times `t` are seconds since `opened`, negative before it."""
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
            "job": dict(self.job),
            "decision": [note.text for _, note in notes if note.stage.startswith(_DECIDING)],
            "seconds": stage_seconds([(when, note.stage) for when, note in notes], t0, at),
            "before": self._before(),
            "timeline": [self._note(when, note) for when, note in notes],
            "faults": self._all(t.FaultSeen, t.RankLost),
            "stops": self._all(t.Stop),
            "reports": [
                {"t": round(when - t0, 6), **vars(item.report)}
                for when, item in self.items
                if isinstance(item, t.Reported)
            ],
            "orders": self._orders(),
            "arrivals": [
                {
                    "t": round(when - t0, 6),
                    "rank": item.info.rank,
                    "host": item.info.host,
                    "pid": item.info.pid,
                    "bare": item.bare,
                }
                for when, item in self.items
                if isinstance(item, t.Registered)
            ],
            "stacks": self._stacks(),
            "ranks": [vars(self.ranks[rank]) for rank in sorted(self.ranks)],
            "versions": versions(),
        }

    def _note(self, when: float, note: t.Note) -> dict[str, Any]:
        return {"t": round(when - self.opened, 6), "stage": note.stage, "text": note.text, "warn": note.warn}

    def _all(self, *kinds: type[t.Event | t.Action]) -> list[dict[str, Any]]:
        return [
            {"t": round(when - self.opened, 6), **as_dict(item)} for when, item in self.items if isinstance(item, kinds)
        ]

    def _before(self) -> dict[str, Any]:
        """Where each rank stood when it was heard last, and what was noted shortly before."""
        return {
            "last_heard": [
                {
                    "rank": rank,
                    "t": round(beat.at - self.opened, 6),
                    "step": beat.step,
                    "phase": beat.phase,
                    "waiting": beat.waiting,
                }
                for rank, beat in sorted(self.before.last.items())
            ],
            "timeline": [self._note(when, item) for when, item in self.before.lead if isinstance(item, t.Note)],
        }

    def _orders(self) -> list[dict[str, Any]]:
        done = {item.order: (when, item) for when, item in self.items if isinstance(item, t.OrderDone)}
        found: list[dict[str, Any]] = []
        seen: set[int] = set()  # told again to who reconnects: it began with the first
        for when, item in self.items:
            if isinstance(item, t.Order) and item.id not in seen:
                seen.add(item.id)
                entry: dict[str, Any] = {"t": round(when - self.opened, 6), **as_dict(item)}
                if item.id in done:
                    end, answer = done[item.id]
                    entry.update(seconds=round(end - when, 6), ok=answer.ok, message=answer.message)
                    entry["result"] = answer.result
                found.append(entry)
        return found

    def _stacks(self) -> list[dict[str, Any]]:
        """Of ranks that were looked at because they did not move, with the text where its file can be read here."""
        looks = [
            (when, item) for when, item in [*self.before.lead, *self.items] if isinstance(item, t.Examined)
        ][-_STACKS_KEPT:]  # fmt: skip
        return [
            {
                "t": round(when - self.opened, 6),
                "rank": item.rank,
                "pid": item.pid,
                "file": item.stacks,
                "why_none": item.message or item.spare,
                "text": self._text_of(item),
            }
            for when, item in looks
        ]

    def _text_of(self, item: t.Examined) -> str:
        if self.directory is None or not item.stacks:
            return ""
        return _read(self.directory / stacks_name(item.rank, item.pid))


def _read(file: Path) -> str:
    """The text of stacks; "" where it lies on another host. Which file is never for another host to say: it would get
    what it may not read, or hold the pen with a pipe."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""  # it is named, and lies where its rank was
    try:
        text = os.read(fd, _LONGEST_STACKS) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return ""
    finally:
        os.close(fd)
    return text.decode("utf-8", "backslashreplace")


def stage_seconds(stages: list[tuple[float, str]], start: float, end: float) -> dict[str, float]:
    """Seconds spent in each stage: from its note to the next note of another stage. The total is from fault to end."""
    found: dict[str, float] = {}
    for index, (when, stage) in enumerate(stages):
        until = stages[index + 1][0] if index + 1 < len(stages) else end
        found[stage] = found.get(stage, 0.0) + until - when
    return {stage: round(seconds, 6) for stage, seconds in {**found, "total": end - start}.items()}
