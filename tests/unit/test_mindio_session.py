"""What a rank says of its state where only ends of updates are told, and what it does not say too early."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mindspeed_tft.engine.types import Commit, Deadlines, LinkState, RankReport, Update, Wish
from mindspeed_tft.facade import shards
from mindspeed_tft.facade.callbacks import CallbackHost, Callbacks
from mindspeed_tft.facade.gate import Gate
from mindspeed_tft.facade.session import CallbackSession, ForceStop

DEADLINES = Deadlines(heartbeat=0.1, heartbeat_lost=0.2, stop=0.2, order=0.3, dump=0.3, exit=0.1)


class Ear:
    """The rank's end of the control plane, which keeps what it is told."""

    def __init__(self) -> None:
        self.step, self.phase, self.checkpoint, self.one_way = 0, "", 0, False
        self.connected, self.stop_epoch, self.parked, self.wish = True, 0, "", Wish()
        self.faults: list[tuple[str, bool, str]] = []
        self.reports: list[RankReport] = []

    def fault(self, kind: str, message: str, own: bool) -> None:
        self.faults.append((kind, own, message))

    def report(self, report: RankReport) -> None:
        self.reports.append(report)

    def wait_connected(self, timeout: float) -> bool:
        return self.connected

    def wait_stop(self, timeout: float, after: int = 0) -> bool:
        return self.stop_epoch > after

    def tell_link(self, state: LinkState) -> None: ...
    def resumed(self) -> None: ...
    def close(self, timeout: float = 5.0) -> None: ...
    def held(self, hold: int, step: int) -> None: ...
    def released(self, hold: int) -> None: ...
    def left_hold(self) -> None: ...
    def saved(self, save: int, step: int, path: str) -> None: ...
    def next_order(self, timeout: float) -> None: ...
    def order_done(self, order_id: int, ok: bool, message: str = "", result: Any = None) -> None: ...
    def put_back(self, order: Any) -> None: ...


class Rank:
    def __init__(self) -> None:
        entry = {"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 0}
        self.callbacks, self.ear, self.gate = Callbacks(), Ear(), Gate()
        info = shards.info(0, "here", 1, shards.read(0, [entry]))
        host = CallbackHost(info, self.callbacks)
        self.session = CallbackSession(host, self.ear, DEADLINES, lambda _text: "memory", self.gate, False)

    def stands(self) -> tuple[int, Commit, Update, bool]:
        self.session.report()
        last = self.ear.reports[-1]
        return last.step, last.commit, last.update, last.trusted


def test_between_updates_a_rank_stands_at_the_next_step() -> None:
    rank = Rank()
    assert rank.stands() == (1, Commit.ENTERED, Update.UNTOUCHED, True)
    rank.session.update_starts()
    rank.session.update_ended(1001)  # a job that was resumed
    assert rank.stands() == (1002, Commit.ENTERED, Update.UNTOUCHED, True)
    assert (rank.session.completed, rank.ear.step) == (1001, 1002)


def test_an_update_that_only_converts_completes_nothing() -> None:
    rank = Rank()
    for step in (4, 4, 5, 5):
        rank.session.update_starts()
        rank.session.update_ended(step)
    assert rank.session.completed == 5


def test_a_step_that_was_skipped_is_told_by_the_end_of_the_loop() -> None:
    rank = Rank()
    rank.session.update_starts()
    rank.session.update_ended(4)
    rank.session.boundary_of(5)
    assert rank.session.completed == 5


def test_a_rank_torn_out_of_an_update_is_no_source() -> None:
    rank = Rank()
    rank.session.update_starts()
    rank.session.update_ended(4)
    rank.session.update_starts()
    rank.session.announce("link", "a link", torn=rank.gate.arrive())
    assert rank.ear.faults == [("link", True, "a link")]
    assert rank.stands() == (5, Commit.ENTERED, Update.UNTOUCHED, False)


@pytest.mark.parametrize("kind", ["memory", "link"])
def test_before_the_first_completed_step_nothing_is_repaired(kind: str) -> None:
    rank = Rank()
    rank.session.announce(kind, "broken")
    ((told, own, message),) = rank.ear.faults
    assert (told, own) == ("exception", True) and "before the first completed step" in message


def test_a_rank_that_was_told_to_stop_has_no_fault() -> None:
    rank = Rank()
    rank.ear.stop_epoch = 1
    rank.session.announce("stopped", "FORCE STOP")
    assert rank.ear.faults == []
    rank.ear.stop_epoch = 0  # nobody has told it: its device heard of something
    rank.session.announce("stopped", "FORCE STOP")
    assert rank.ear.faults == [("peer", False, "FORCE STOP")]


def test_after_a_stop_no_update_begins_and_no_step() -> None:
    rank = Rank()
    rank.callbacks.register("stop", lambda args, ctx: None, None)
    rank.callbacks.train_args = []
    rank.session.come_out(1, "a fault")
    for call in (rank.session.update_starts, lambda: rank.session.boundary_of(3)):
        with pytest.raises(ForceStop, match="FORCE STOP"):
            call()


def test_a_stop_callback_that_fails_is_a_fault_of_the_device() -> None:
    rank = Rank()

    def refuse(_args: Any, _ctx: Any) -> None:
        raise RuntimeError("stop failed")

    rank.callbacks.register("stop", refuse, None)
    rank.callbacks.train_args = []
    rank.session.come_out(1, "a fault")
    assert rank.ear.faults == [("device", True, "the stop callback failed: RuntimeError: stop failed")]
    assert rank.gate.wait_stopped(1, 0.0)


def test_callbacks_get_what_their_names_promise() -> None:
    calls = Callbacks()
    calls.train_args = ["model"]
    seen: list[Any] = []
    for name in ("stop", "save_ckpt", "rename", "stream_sync", "exit"):
        calls.register(name, lambda *given: seen.append(given), "context")
    for name, given in (("stop", ()), ("save_ckpt", (4, [])), ("rename", (4,)), ("stream_sync", ()), ("exit", ())):
        calls.call(name, *given)
    assert seen == [(["model"], "context"), (4, [], ["model"], "context"), (4, ["model"]), (), ("context",)]
    assert calls.call("rollback", 4) is None  # what was not registered counts as success
    assert calls.missing() == ["clean"]
    with pytest.raises(TypeError, match="the clean callback is a int"):
        calls.register("clean", 3, None)  # type: ignore[arg-type]


def test_a_stop_waits_for_a_hanging_update_as_long_as_it_was_told() -> None:
    """Twice as long would be after the time in which the engine waits for reports."""
    gate = Gate()
    assert gate.enter(0)
    begun = time.monotonic()
    assert gate.close(1, 0.5) is False
    assert 0.5 <= time.monotonic() - begun < 0.75
