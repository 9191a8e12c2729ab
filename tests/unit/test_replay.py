"""Batches of a broken step come again, and nothing of the broken step lives on."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tft.recovery import replay
from mindspeed_tft.recovery.frames import release
from mindspeed_tft.recovery.replay import ReplayIterator


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20))
def test_training_sees_every_batch_once_whatever_breaks(steps: list[tuple[int, bool]]) -> None:
    """Each step takes some batches; a broken one is rewound and repeated. What completed steps saw is 0, 1, 2, ..."""
    source = ReplayIterator(iter(range(1000)))
    seen: list[int] = []
    for size, broken in steps:
        source.mark()
        if broken:
            for _ in range(size):
                next(source)
            source.rewind()
            source.mark()
        seen += [next(source) for _ in range(size)]
    assert seen == list(range(len(seen)))


def test_a_step_may_break_again_while_it_is_repeated() -> None:
    source = ReplayIterator(iter(range(10)))
    source.mark()
    assert [next(source) for _ in range(3)] == [0, 1, 2]
    source.rewind()
    source.mark()
    assert [next(source) for _ in range(2)] == [0, 1]
    source.rewind()
    source.mark()
    assert [next(source) for _ in range(4)] == [0, 1, 2, 3]


class Activation:
    """Stands for a tensor that a broken step holds."""


def test_released_frames_run_their_finally_now_and_hold_nothing() -> None:
    """Megatron enters `no_sync` by hand; released later, it would switch the reduction on inside the retried step."""
    log: list[str] = []
    held: list[weakref.ref[Activation]] = []

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        try:
            yield
        finally:
            log.append("reduction on")

    def broken_step() -> None:
        activation = Activation()
        held.append(weakref.ref(activation))
        context = no_sync()
        context.__enter__()
        raise RuntimeError("a fault")

    try:
        try:
            broken_step()
        except RuntimeError as inner:
            raise ValueError("on the way up") from inner
    except ValueError as exc:
        assert log == [] and held[0]() is not None  # the control: alive as long as the exception is
        release(exc)
        assert log == ["reduction on"]
        assert held[0]() is None


def _masking(draws: int) -> Iterator[int]:
    """Batches that are made with random numbers of this process, every second of them."""
    for number in range(draws):
        if number % 2:
            random.random()
            np.random.rand()
            torch.rand(1)
        yield number


def _numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def _twice(source: ReplayIterator) -> list[list[tuple[int, tuple[float, float, float]]]]:
    """A step of four batches, and the same step once more."""
    source.mark()
    start = random.getstate(), np.random.get_state(), torch.get_rng_state()
    first = [(next(source), _numbers()) for _ in range(4)]
    random.setstate(start[0])
    np.random.set_state(start[1])
    torch.set_rng_state(start[2])
    source.rewind()
    return [first, [(next(source), _numbers()) for _ in range(4)]]


def test_random_numbers_that_made_a_batch_are_drawn_again_with_it() -> None:
    first, again = _twice(ReplayIterator(_masking(6)))
    assert first == again


def test_control_a_replay_that_does_not_draw_them_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay._Generators, "put", lambda _self: None)  # as if no batch had drawn any
    first, again = _twice(ReplayIterator(_masking(6)))
    assert first != again
