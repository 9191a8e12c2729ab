"""A rank at the end of a step: what it brings to the commit, when it saves, when it waits, and what ends the wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tft.engine.types import Order, OrderKind, Wish
from mindspeed_tft.recovery import hold
from mindspeed_tft.recovery.hold import Boundary, HoldBroken, NotDone

HOLD = Wish(id=3, hold=2, hold_from=5, limit=60.0)


class ToyLine:
    """Keeps what is said; `then` is done at the first look for an order, as if it came from outside."""

    def __init__(self, wish: Wish = HOLD) -> None:
        self.wish, self.phase = wish, "between-steps"
        self.said: list[tuple[Any, ...]] = []
        self.orders: list[Order] = []
        self.then: list[Callable[[], None]] = []

    def held(self, number: int, step: int) -> None:
        self.said.append(("held", number, step, self.phase))

    def released(self, number: int) -> None:
        self.said.append(("released", number))

    def left_hold(self) -> None:
        self.said.append(("left",))

    def saved(self, number: int, step: int, path: str) -> None:
        self.said.append(("saved", number, step, path))

    def next_order(self, timeout: float) -> Order | None:
        if self.orders:
            return self.orders.pop(0)
        assert self.then, "it waits for ever"
        self.then.pop(0)()
        return None

    def order_done(self, number: int, ok: bool, message: str = "", result: dict[str, str] | None = None) -> None:
        self.said.append(("done", number, ok, message, result or {}))

    def put_back(self, order: Order) -> None:
        self.orders.append(order)

    def hear(self, **changes: Any) -> Callable[[], None]:
        def change() -> None:
            self.wish = replace(self.wish, **changes)

        return change


def boundary(line: ToyLine, stopping: Callable[[], bool] = lambda: False, grace: float = 1.0) -> Boundary:
    return Boundary(line, stopping, grace)


def never() -> Path:
    raise AssertionError("nobody wanted a checkpoint")


def test_it_brings_what_is_wanted_from_this_step_on() -> None:
    rank = boundary(ToyLine(replace(HOLD, save=1, save_from=7)))
    assert [rank.offer(step) for step in (4, 5, 6, 7)] == [(0, 0), (2, 0), (2, 0), (2, 1)]


def test_it_is_held_where_all_agreed_even_if_it_never_heard_of_it() -> None:
    line = ToyLine(Wish())
    rank = boundary(line)
    rank.agree(2, 0)
    line.then = [line.hear(id=3, hold=2), lambda: None, line.hear(id=4, hold=0)]
    rank.reach(5, never, leaves=False)
    assert line.said == [("held", 2, 5, "held"), ("released", 2)]
    assert line.phase == "between-steps"
    rank.reach(6, never, leaves=False)  # once
    assert len(line.said) == 2


def test_another_hold_ends_this_one() -> None:
    """The release between them was lost: who heard it has gone on, and must not be waited for."""
    line = ToyLine()
    rank = boundary(line)
    rank.agree(2, 0)
    line.then = [line.hear(id=6, hold=5)]
    rank.reach(5, never, leaves=False)
    assert line.said[-1] == ("released", 2)
    assert rank.offer(6) == (5, 0)


def test_a_save_while_it_is_held_does_not_end_the_hold() -> None:
    line = ToyLine()
    rank = boundary(line)
    rank.agree(2, 0)
    line.then = [line.hear(id=5, save=4), lambda: line.said.append(("still here",)), line.hear(id=6, hold=0)]
    rank.reach(5, never, leaves=False)
    assert [word[0] for word in line.said] == ["held", "still here", "released"]


def test_what_is_behind_it_is_not_brought_again() -> None:
    line = ToyLine(replace(HOLD, save=1))
    rank = boundary(line, grace=-60.0)  # the limit is over at once: nobody speaks
    rank.agree(2, 1)
    rank.reach(5, lambda: Path("/save/iter_5"), leaves=False)
    assert line.said == [("saved", 1, 5, "/save/iter_5"), ("held", 2, 5, "held"), ("released", 2)]
    assert rank.offer(6) == (0, 0)


def test_nobody_is_held_where_training_ends() -> None:
    line = ToyLine()
    rank = boundary(line)
    rank.agree(2, 1)
    rank.reach(5, lambda: Path("/save"), leaves=True)
    assert [word[0] for word in line.said] == ["saved"]


def test_what_is_under_way_has_an_end_before_anybody_is_told_that_it_waits() -> None:
    line = ToyLine()
    rank = boundary(line)

    def settle() -> None:
        line.said.append(("settled", line.phase))

    rank.reach(4, never, leaves=False, settle=settle)
    rank.agree(2, 0)
    rank.reach(5, never, leaves=True, settle=settle)
    assert line.said == []  # for a hold alone
    rank.agree(2, 0)
    line.then = [line.hear(id=4, hold=0)]
    rank.reach(5, never, leaves=False, settle=settle)
    assert [word[:2] for word in line.said] == [("settled", "between-steps"), ("held", 2), ("released", 2)]


def test_it_looks_for_what_else_would_be_seen_at_the_end_of_a_step() -> None:
    line, stopped = ToyLine(), threading.Event()
    rank = boundary(line, stopped.is_set)
    rank.agree(2, 0)
    flag: list[str] = []
    line.then = [lambda: flag.append("SIGTERM")]
    with pytest.raises(HoldBroken):
        rank.reach(5, never, leaves=False, look=lambda: stopped.set() if flag else None)
    assert line.said[-1] == ("left",)


def test_a_stop_ends_the_hold_and_it_is_agreed_again() -> None:
    line, stopped = ToyLine(), threading.Event()
    rank = boundary(line, stopped.is_set)
    rank.agree(2, 0)
    line.then = [stopped.set]
    with pytest.raises(HoldBroken):
        rank.reach(5, never, leaves=False)
    assert line.said[-1] == ("left",)
    assert rank.offer(6) == (2, 0)


def test_a_fault_before_the_end_of_the_step_voids_what_was_agreed() -> None:
    line = ToyLine()
    rank = boundary(line)
    rank.agree(2, 1)
    rank.forget()
    rank.reach(5, never, leaves=False)
    assert line.said == []


def test_a_save_is_ordered_while_it_is_held() -> None:
    line = ToyLine()
    rank = boundary(line)
    rank.agree(2, 0)
    line.orders = [Order(9, 0, OrderKind.SAVE, {"step": 5})]
    line.then = [line.hear(id=4, hold=0)]
    rank.reach(5, lambda: Path("/save/iter_5"), leaves=False)
    assert line.said[1] == ("done", 9, True, "", {"path": "/save/iter_5"})


def test_a_save_that_fails_is_a_fault_and_a_work_that_cannot_be_done_is_none() -> None:
    line = ToyLine()
    rank = boundary(line)

    def full() -> Path:
        raise OSError("No space left on device")

    rank.agree(2, 0)
    line.orders = [Order(9, 0, OrderKind.SAVE, {"step": 5})]
    with pytest.raises(OSError, match="No space"):
        rank.reach(5, full, leaves=False)
    assert line.said[1:] == [("done", 9, False, "OSError: No space left on device", {}), ("left",)]

    def cannot() -> Path:
        raise NotDone("not now")

    rank.agree(2, 0)
    line.said.clear()
    line.orders = [Order(10, 0, OrderKind.SAVE, {"step": 5})]
    line.then = [line.hear(id=4, hold=0)]
    rank.reach(5, cannot, leaves=False)
    assert line.said[1:] == [("done", 10, False, "not now", {}), ("released", 2)]


def test_an_order_of_a_recovery_is_left_for_it() -> None:
    line, stopped = ToyLine(), threading.Event()
    rank = boundary(line, stopped.is_set)
    rank.agree(2, 0)
    order = Order(9, 0, OrderKind.EXIT, {"code": 0})

    def arrive() -> None:
        line.orders.append(order)
        stopped.set()

    line.then = [arrive]
    with pytest.raises(HoldBroken):
        rank.reach(5, never, leaves=False)
    assert line.orders == [order]


def test_the_wait_looks_around_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the clock: the limit of a hold, in slices that a stop does not have to wait for."""
    monkeypatch.setattr(hold, "SLICE", 0.01)
    line = ToyLine(replace(HOLD, limit=0.05))
    line.next_order = lambda timeout: time.sleep(timeout)  # type: ignore[method-assign,assignment,return-value]
    rank = boundary(line, grace=0.05)
    rank.agree(2, 0)
    began = time.monotonic()
    rank.reach(5, never, leaves=False)
    assert 0.1 <= time.monotonic() - began < 2.0
