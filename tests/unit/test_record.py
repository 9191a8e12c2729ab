"""Where a rank stands once its shards came from other holders."""

from __future__ import annotations

import pytest

from mindspeed_tft.engine.types import Commit, Update
from mindspeed_tft.recovery.record import SmallState, StepRecord


def _begun(step: int) -> StepRecord:
    record = StepRecord()
    start = SmallState(step - 1, rng={}, counters={}, scheduler={}, scalers=[], flops=0.0)
    record.begin(step, start, optimizers=2)
    return record


def test_an_update_that_was_cut_short_is_whole() -> None:
    record = _begun(7)
    record.commit = Commit.PASSED
    record.updates[0] = Update.DIRTY
    record.given(7)
    assert (record.step, record.commit, record.update) == (7, Commit.PASSED, Update.DONE)
    assert record.start is not None  # its counters are told from it


@pytest.mark.parametrize("commit", [Commit.NONE, Commit.ENTERED])
def test_who_has_begun_the_next_step_goes_back_to_its_start(commit: Commit) -> None:
    record = _begun(7)
    record.commit = commit
    record.given(6)
    assert (record.step, record.commit, record.update) == (7, commit, Update.UNTOUCHED)
    assert record.start is not None
    assert record.start.step == 6


def test_a_newcomer_stands_where_it_was_put() -> None:
    record = StepRecord(0, Commit.PASSED, updates=dict.fromkeys(range(2), Update.DONE))
    record.given(6)
    assert (record.step, record.commit, record.update, record.start) == (6, Commit.PASSED, Update.DONE, None)
