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
from mindspeed_tft.recovery.notices import StoreNotice

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

    def saved(self, number: int, step: int, path: str, why: str = "") -> None:
        self.said.append(("saved", number, step, path, *([why] if why else [])))

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
    assert [rank.offer(step) for step in (4, 5, 6, 7)] == [(0, 0, 0), (2, 0, 60), (2, 0, 60), (2, 1, 60)]


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
    assert rank.offer(6) == (5, 0, 60)


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
    assert rank.offer(6) == (0, 0, 0)


def test_a_save_that_cannot_be_done_is_told_and_training_goes_on() -> None:
    def refuse() -> Path:
        raise NotDone("no space left")

    line = ToyLine(replace(HOLD, save=1, hold=0))
    rank = boundary(line)
    rank.agree(0, 1)
    rank.reach(5, refuse, leaves=False)
    assert line.said == [("saved", 1, 5, "", "no space left")]
    assert rank.offer(6) == (0, 0, 0), "it is not tried again with each step"


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
    assert rank.offer(6) == (2, 0, 60)


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


# ------------------------------------------------------------------------------------------- cut off


def test_nobody_waits_where_one_knows_that_the_hold_is_over() -> None:
    """This rank never heard of the end of it, because its host has lost the controller."""
    line, asked = ToyLine(), []

    def others_say_no(mine: bool) -> bool:
        asked.append(mine)
        return False

    rank = Boundary(line, lambda: False, 1.0, others_say_no)
    rank.agree(2, 0)
    rank.reach(5, never, leaves=False, settle=lambda: line.said.append(("settled",)))
    assert (asked, line.said, rank.offer(6)) == ([True], [], (0, 0, 0))
    line.wish = Wish(id=9)
    rank.agree(8, 0)
    rank.reach(6, never, leaves=False)
    assert asked[1:] == [False], "and it says so where it knows it itself"


@pytest.mark.parametrize(("limit", "held"), [(60, 60.5), (0, 3600.5)])
def test_who_never_heard_of_a_hold_knows_its_limit(limit: int, held: float, monkeypatch: pytest.MonkeyPatch) -> None:
    line, clock = ToyLine(Wish()), [0.0]
    monkeypatch.setattr(hold.time, "monotonic", lambda: clock[0])
    line.next_order = lambda timeout: clock.__setitem__(0, clock[0] + 0.5)  # type: ignore[method-assign,assignment,return-value]
    rank = boundary(line, grace=0.5)
    rank.agree(2, 0, limit)
    rank.reach(5, never, leaves=False)
    assert clock[0] == held


class ToyStore:
    """The job's store, for all ranks."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.gone = False

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return set(keys) <= self.keys

    def set(self, key: str, _value: str) -> None:
        self.keys.add(key)


def notices(store: ToyStore) -> Callable[[int], StoreNotice]:
    return lambda number: StoreNotice(number, lambda: store, 0.01)


def waiting(line: ToyLine) -> None:
    line.next_order = lambda timeout: time.sleep(0.001)  # type: ignore[method-assign,assignment,return-value]


def test_who_is_cut_off_hears_from_the_others_that_the_hold_is_over() -> None:
    store, here, there = ToyStore(), ToyLine(), ToyLine()
    waiting(there)
    alone = Boundary(there, lambda: False, 1.0, notices=notices(store))
    alone.agree(2, 0)
    thread = threading.Thread(target=alone.reach, args=(5, never, False))
    thread.start()
    told = Boundary(here, lambda: False, 1.0, notices=notices(store))
    told.agree(2, 0)
    here.then = [here.hear(id=4, hold=0)]
    told.reach(5, never, leaves=False)
    thread.join(10)
    assert not thread.is_alive() and there.said[-1] == ("released", 2)
    assert store.keys == {"released-2"}


def test_a_fault_tells_nobody_that_the_hold_is_over() -> None:
    store, line, made = ToyStore(), ToyLine(), []

    def notice(number: int) -> StoreNotice:
        made.append(StoreNotice(number, lambda: store, 60.0))
        return made[-1]

    rank = Boundary(line, lambda: True, 1.0, notices=notice)
    rank.agree(2, 0)
    with pytest.raises(HoldBroken):
        rank.reach(5, never, leaves=False)
    made[0].thread.join(10)
    assert not made[0].thread.is_alive() and not store.keys


def test_a_store_that_is_gone_changes_nothing() -> None:
    store = ToyStore()
    store.gone = True
    notice = StoreNotice(2, lambda: store, 0.001)
    notice.thread.join(0.1)
    assert notice.thread.is_alive() and not notice.over
    store.gone = False
    store.keys.add("released-2")
    notice.thread.join(10)
    assert notice.over
    store.gone = True
    last = StoreNotice(3, lambda: store, 60.0)
    last.end(tell=True)
    last.thread.join(10)
    assert not last.thread.is_alive()


def test_the_store_of_torch_carries_it() -> None:
    from torch.distributed import PrefixStore, TCPStore

    master = TCPStore("127.0.0.1", 0, is_master=True)

    def place() -> PrefixStore:
        return PrefixStore("tft-holds", master.clone())

    cut_off, told = (StoreNotice(7, place, 0.01) for _ in range(2))
    other = StoreNotice(8, place, 0.01)
    told.end(tell=True)
    cut_off.thread.join(10)
    assert cut_off.over and not other.over
    other.end(tell=False)
    other.thread.join(10)
    assert not other.thread.is_alive() and not place().check(["released-8"])
