"""TensorBoard of a repaired run: with a real writer and its own reader where tensorboard is installed, else with a
stand-in that has the same three methods."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_tft.engine.types import Commit, Update
from mindspeed_tft.patches import megatron_tensorboard
from mindspeed_tft.patches.megatron_tensorboard import LOST, SECONDS, TEXT, Mark, Once, words
from mindspeed_tft.recovery.record import StepRecord

Scalars = Callable[[], dict[str, list[tuple[int, float]]]]


class StandIn:
    """The methods of torch's SummaryWriter that Megatron and we call."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.texts: list[tuple[str, str, int]] = []
        self.flushed = 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        self.scalars.setdefault(tag, []).append((global_step, float(scalar_value)))

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        assert global_step is not None
        self.texts.append((tag, text_string, global_step))

    def flush(self) -> None:
        self.flushed += 1


def real(folder: Path) -> tuple[Any, Scalars]:
    """A writer, and what its file holds."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def read() -> dict[str, list[tuple[int, float]]]:
        accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        writer.flush()  # type: ignore[no-untyped-call]
        events = accumulator.EventAccumulator(str(folder))
        events.Reload()
        marks = [event for tag in events.Tags()["tensors"] if tag.startswith(TEXT) for event in events.Tensors(tag)]
        found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        return {**found, TEXT: [(event.step, math.nan) for event in marks]}

    return writer, read


@pytest.fixture(params=["real", "stand-in"])
def board(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Scalars]:
    """Megatron's writer as our patch leaves it, and what was written."""
    if request.param == "real" and importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed")
    if request.param == "real":
        writer, read = real(tmp_path)
    else:
        writer = StandIn()

        def read() -> dict[str, list[tuple[int, float]]]:
            return {**writer.scalars, TEXT: [(step, math.nan) for _, _, step in writer.texts]}

    monkeypatch.setattr(megatron_tensorboard, "writer", lambda: writer)
    megatron_tensorboard.set_tensorboard_writer(lambda _args: None, None, (None,), {})
    return writer, read


def session(step: int, commit: Commit, how: str) -> Any:
    record = StepRecord(step, commit, updates={0: Update.DONE})
    return SimpleNamespace(record=record, host=SimpleNamespace(recovered_by=how))


def log(writer: Any, step: int, loss: float, seconds: float) -> None:
    """As Megatron does at the end of a step."""
    writer.add_scalar("lm loss", loss, step)
    writer.add_scalar("lm loss vs samples", loss, step * 128)
    writer.add_scalar("iteration-time", seconds, step)


def test_a_rewind_is_marked_and_nothing_is_there_twice(board: tuple[Any, Scalars]) -> None:
    writer, read = board
    for step in range(1, 6):
        log(writer, step, 10 - step if step < 5 else 99.0, 0.5)  # step 5 went wrong
    current = session(6, Commit.NONE, "rewind")
    mark = Mark(current, RuntimeError("epoch 1: rank 2 precision: loss is nan\nand more"))
    current.record = StepRecord(3, Commit.PASSED, updates={0: Update.DONE})
    mark.write()
    for step in range(4, 8):
        log(writer, step, 10 - step, 0.25)
    found = read()
    assert found["lm loss"] == [(1, 9), (2, 8), (3, 7), (4, 6), (5, 99), (5, 5), (6, 4), (7, 3)]
    assert [step for step, _ in found["lm loss vs samples"]] == [128, 256, 384, 512, 640, 640, 768, 896]
    assert found["iteration-time"] == [(step, 0.5 if step < 6 else 0.25) for step in range(1, 8)]
    assert [step for step, _ in found[TEXT]] == [3]
    assert found[LOST] == [(3, 2)]
    ((step, seconds),) = found[SECONDS]
    assert step == 3 and 0 <= seconds < 5
    if isinstance(writer, StandIn):
        ((_, text, _),) = writer.texts
        assert text.startswith("**rewind** in 0.0 s, training goes on after step 3, 2 completed steps lost")
        assert "rank 2 precision: loss is nan" in text and "and more" not in text and writer.flushed == 1


def test_a_repair_loses_nothing(board: tuple[Any, Scalars]) -> None:
    writer, read = board
    log(writer, 1, 9.0, 0.5)
    current = session(2, Commit.PASSED, "retry")  # this rank passed the commit: step 2 is complete
    mark = Mark(current, ValueError(""))
    mark.write()
    log(writer, 3, 7.0, 0.5)
    found = read()
    assert found[LOST] == [(2, 0)] and found["lm loss"] == [(1, 9), (3, 7)]


def test_a_newcomer_says_what_it_knows() -> None:
    writer = StandIn()
    current = session(0, Commit.PASSED, "recover")
    mark = Mark(current, None)
    current.record = StepRecord(7, Commit.PASSED, updates={0: Update.DONE})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_tensorboard, "writer", lambda: writer)
        mark.write()
    ((_, text, step),) = writer.texts
    assert step == 7 and "takes the place of one that died" in text and "lost" not in text
    assert LOST not in writer.scalars


def test_a_rank_that_writes_nothing_marks_nothing_and_a_broken_writer_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mark = Mark(session(3, Commit.NONE, "retry"), RuntimeError("x"))
    monkeypatch.setattr(megatron_tensorboard, "writer", lambda: None)
    mark.write()
    assert not caplog.records

    def full(*_args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(megatron_tensorboard, "writer", lambda: SimpleNamespace(add_text=full))
    mark.write()
    assert "not marked in TensorBoard: OSError('No space left on device')" in caplog.text


def test_arguments_are_written_once_and_again_when_they_changed(board: tuple[Any, Scalars]) -> None:
    writer, _ = board
    got: list[Any] = []
    writer.add_text._add_text = lambda *args: got.append(args)
    for step in (0, 6):  # training is entered twice
        writer.add_text("lr", "0.1", global_step=step)
        writer.add_text("iteration", str(step), global_step=step)
    assert got == [("lr", "0.1", 0), ("iteration", "0", 0), ("iteration", "6", 6)]


def test_what_is_no_number_is_the_writers_affair_and_memory_is_bounded() -> None:
    got: list[Any] = []
    once = Once(lambda *args: got.append(args))
    once("blob", "name of a blob", 1)
    once("blob", "name of a blob", 1)
    once("a", 1.0)
    once("a", 1.0)
    assert len(got) == 4
    once("x", math.nan, 5)
    once("x", math.nan, 5)
    assert len(got) == 5
    for step in range(3 * megatron_tensorboard._STEPS_KEPT):
        once("y", 1.0, step)
    assert len(once._written) == megatron_tensorboard._STEPS_KEPT


def test_the_first_line_is_the_cause() -> None:
    assert words(RuntimeError("one\ntwo")) == "one" and words(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(words(RuntimeError("x" * 9999))) == 500

    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert words(Odd()) == "Odd"
