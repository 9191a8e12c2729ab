"""Waiting in slices: the operation's own end counts, and an abort ends every wait."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from datetime import timedelta

import pytest

from mindspeed_tft.groups.waiting import Abort, Interrupted, for_peers, wait_in_slices, wait_on_helper


class Work:
    """An operation that ends when told to. `late`: it ends just after a slice timed out, before anybody looks."""

    def __init__(self, late: bool = False, error: str = "") -> None:
        self.ended, self.late, self.error = threading.Event(), late, error

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.ended.wait(timeout.total_seconds() if timeout else 30):
            if self.late:
                self.ended.set()
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.ended.is_set()


def test_an_operation_that_ends_right_after_a_slice_has_ended_well() -> None:
    wait_in_slices(Work(late=True), Abort())


def test_an_earlier_abort_does_not_take_the_reason_of_a_later_stop() -> None:
    stop = Abort()
    stop.set("rank 3 lost", 8)
    stop.set("moving to link eth1", 7)
    assert (stop.reason, stop.epoch) == ("rank 3 lost", 8)
    assert not stop.clear(7) and stop.clear(8)
    stop.set("moving to link eth1", 7)
    assert stop.reason == "moving to link eth1"


def test_an_operation_that_fails_right_after_a_slice_fails_with_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        wait_in_slices(Work(late=True, error="connection closed"), Abort())


@pytest.mark.parametrize("wait", [wait_in_slices, wait_on_helper])
def test_an_abort_ends_a_wait_that_has_begun(wait: object) -> None:
    abort, work = Abort(), Work()
    threading.Timer(0.05, abort.set, ["told", 1]).start()
    begin = time.monotonic()
    with pytest.raises(Interrupted, match="told"):
        wait(work, abort)  # type: ignore[operator]
    assert time.monotonic() - begin < 1
    work.ended.set()


@pytest.mark.parametrize("wait", [wait_in_slices, wait_on_helper])
@pytest.mark.parametrize("ends", ["well", "with an error", "with an abort"])
def test_it_is_known_that_a_rank_waits(wait: object, ends: str) -> None:
    abort, work = Abort(), Work(error="connection closed" if ends == "with an error" else "")
    seen: list[bool] = []

    def end() -> None:
        seen.append(for_peers())
        if ends == "with an abort":
            abort.set("told", 1)
        else:
            work.ended.set()

    assert not for_peers()
    threading.Timer(0.05, end).start()
    with pytest.raises((Interrupted, RuntimeError)) if ends != "well" else contextlib.nullcontext():
        wait(work, abort)  # type: ignore[operator]
    assert seen == [True] and not for_peers()
    work.ended.set()


@pytest.mark.parametrize("wait", [wait_in_slices, wait_on_helper])
def test_an_abort_from_before_is_seen(wait: object) -> None:
    abort, work = Abort(), Work()
    abort.set("before", 1)
    with pytest.raises(Interrupted):
        wait(work, abort)  # type: ignore[operator]
    work.ended.set()


def test_the_helper_hands_over_result_and_error() -> None:
    done, failed = Work(), Work(error="connection closed")
    done.ended.set()
    failed.ended.set()
    wait_on_helper(done, Abort())
    with pytest.raises(RuntimeError, match="connection closed"):
        wait_on_helper(failed, Abort())


def test_the_helper_ends_with_the_thread_that_it_waits_for() -> None:
    def helpers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "tft-p2p-wait"}

    before, done = helpers(), Work()
    done.ended.set()
    seen: list[set[threading.Thread]] = []

    def caller() -> None:
        wait_on_helper(done, Abort())
        seen.append(helpers() - before)

    thread = threading.Thread(target=caller)
    thread.start()
    thread.join(10)
    (mine,) = seen[0]
    mine.join(10)
    assert not mine.is_alive()


def test_an_idle_helper_keeps_no_operation() -> None:
    done = Work()
    done.ended.set()
    gone = threading.Event()
    weakref.finalize(done, gone.set)
    wait_on_helper(done, Abort())
    del done
    assert gone.wait(10)
