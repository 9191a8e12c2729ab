"""Shows how a drill goes on: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from mindspeed_tft.faults.rehearsal import Listener


@contextmanager
def listener_for(console: Console) -> Iterator[Listener]:
    """A listener that fits the console."""
    if console.is_terminal:
        with _bars(console) as progress:
            yield BarListener(progress)
    else:
        yield LineListener(console)


def _bars(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("[bold]{task.fields[stage]:<10}"),
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),  # texts of faults are among it
        TimeElapsedColumn(),
        console=console,
    )


class BarListener:
    """One bar for each stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._text, self._first, self._last = "", 0, 0

    def stage(self, name: str, text: str, first: int, last: int) -> None:
        self._text, self._first, self._last = text, first, last
        total = last - first + 1 if last else None
        self._task = self._progress.add_task(text, total=total, stage=name)

    def step(self, number: int) -> None:
        assert self._task is not None
        description = f"{self._text}: step {number} of {self._last}"
        self._progress.update(self._task, completed=number - self._first + 1, description=description)

    def done(self, text: str) -> None:
        assert self._task is not None
        description = f"{self._text}: {text}" if text else self._text
        self._progress.update(self._task, total=1, completed=1, description=description)


class LineListener:
    """One line when a stage begins and one when it ends, and one every few seconds of steps between them."""

    EVERY = 2.0

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name, self._last, self._began, self._said = "", 0, 0.0, 0.0

    def stage(self, name: str, text: str, first: int, last: int) -> None:
        self._name, self._last = name, last
        self._began = self._said = time.monotonic()
        self._say(text)

    def step(self, number: int) -> None:
        if time.monotonic() - self._said >= self.EVERY:
            self._said = time.monotonic()
            self._say(f"step {number} of {self._last}")

    def done(self, text: str) -> None:
        seconds = f"{time.monotonic() - self._began:.1f} s"
        self._say(f"done in {seconds}{', ' + text if text else ''}")

    def _say(self, text: str) -> None:
        self._console.print(f"{self._name}: {text}", markup=False, highlight=False)
