"""How the plugin logs: one formatter, readable or JSON lines, for ranks, relays and controllers.

Each line says who speaks (rank, host) and where the job stands (epoch, step, incident). In a healthy job at INFO a rank
logs one line, when it is protected, and none per step; what concerns the whole job is said once, by rank 0.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, TextIO

Format = Literal["text", "json"]
NAME = "mindspeed_tft"  # the logger above all of ours

_format: Format = "text"
_fields: dict[str, Any] = {}  # name -> a value, or a function that tells it


def bind(**fields: Any) -> None:
    """Facts that each line carries from now on: values, or functions without arguments. None, 0 and "" are left out,
    but for a rank or a node that is 0."""
    _fields.update(fields)


def unbind() -> None:
    """Forget all facts."""
    _fields.clear()


def fields() -> dict[str, Any]:
    """The facts as they are at this moment. One that cannot be told now is left out: a line must not fail of it."""
    found = {}
    for name, value in list(_fields.items()):
        try:
            now = value() if callable(value) else value
        except (AttributeError, RuntimeError, KeyError):
            continue
        if now or (now == 0 and name in ("rank", "node")):
            found[name] = now
    return found


class Readable(logging.Formatter):
    """`[mindspeed_tft rank 3 host a step 7] 2026-11-30 12:00:00,000 WARNING words`."""

    def __init__(self, role: str = "") -> None:
        """`role`: "controller" or "relay"; a rank says its number."""
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        who = " ".join([NAME, *([self._role] if self._role else []), *(f"{k} {v}" for k, v in fields().items())])
        return f"[{who}] {super().format(record)}"


class Structured(logging.Formatter):
    """One JSON object a line: time (seconds since 1970, UTC), level, role, the facts, message, and logger or error."""

    def __init__(self, role: str = "") -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = _line(record.created, record.levelname, self._role, record.getMessage())
        line["logger"] = record.name
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _line(at: float, level: str, role: str, message: str) -> dict[str, Any]:
    return {"time": round(at, 6), "level": level, **({"role": role} if role else {}), **fields(), "message": message}


def formatter(style: Format, role: str = "") -> logging.Formatter:
    """The one formatter of a process."""
    return Structured(role) if style == "json" else Readable(role)


def install(style: Format, role: str = "", stream: TextIO | None = None, whole: bool = False) -> logging.Handler:
    """Log to `stream` (stderr) in this style from INFO on.

    Args:
        whole: of the whole process, whose root logger is ours; otherwise of our modules alone, and the training
            program's loggers stay as they are.
    """
    global _format
    _format = style
    logger = logging.getLogger() if whole else logging.getLogger(NAME)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter(style, role))
    logger.handlers = [other for other in logger.handlers if not isinstance(other.formatter, (Readable, Structured))]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = whole
    return handler


def say(text: str, stream: TextIO | None = None, role: str = "") -> None:
    """Words to the user that are no log record: what the whole job should know, and the last words.

    Raises:
        OSError: nobody reads the stream any more.
    """
    told = stream or sys.stdout
    if _format == "json":
        print(json.dumps(_line(time.time(), "INFO", role, text), default=str), file=told, flush=True)
    else:
        print(f"[{NAME}] {text}", file=told, flush=True)


class Stops:
    """The stops that a rank heard, for the number of the incident that it is in."""

    def __init__(self, answered: Callable[[], int]) -> None:
        """`answered`: the last stop that was answered by training on."""
        self._answered = answered
        self._heard: list[int] = []

    def heard(self, epoch: int) -> None:
        self._heard = [old for old in self._heard if old > self._answered()] + [epoch]

    def incident(self) -> int:
        """The epoch of the first stop since this rank trained; 0: there is none."""
        return next((epoch for epoch in self._heard if epoch > self._answered()), 0)
