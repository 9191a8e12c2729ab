"""Iterators that are made anew in the middle of a run, and what they draw: as if they had been read all along."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_tft.patches import megatron_host, megatron_rewind, megatron_rollback, megatron_shards
from mindspeed_tft.patches.megatron_host import MegatronHost
from mindspeed_tft.recovery.replay import ReplayIterator

SPACE = SimpleNamespace(
    eval_interval=4, do_valid=True, eval_iters=2, global_batch_size=8, micro_batch_size=1, consumed_train_samples=0
)


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    space = SimpleNamespace(**vars(SPACE))
    monkeypatch.setattr(megatron_host, "args", lambda: space)
    return space


class Loader:
    """Draws a number with each pass that begins, as torch's does."""

    def __iter__(self) -> Iterator[int]:
        torch.rand(1)
        return iter(range(3))


def test_where_all_samples_are_consumed_no_loader_is_made() -> None:
    """At the end of the last step: Megatron's sampler insists on a sample that is left."""
    iterator = SimpleNamespace(saved_microbatches=[1], replaying=True, replay_pos=1)
    megatron_rewind._begin(iterator, SimpleNamespace(dataset=range(48)), 48, "single", True)
    assert list(iterator.iterable) == [] and iterator.saved_microbatches == []


@pytest.mark.parametrize("read", [False, True])
def test_the_draw_of_a_first_pass_is_where_the_run_had_it(read: bool) -> None:
    """Whoever has read batches drew for the first pass long ago, which the random states that are put back contain."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again = megatron_rewind._again_and_again(Loader(), read)
    assert torch.equal(before, torch.get_rng_state()) is not read
    torch.set_rng_state(before)  # as a recovery does
    batches = [next(again) for _ in range(3)]
    assert batches == [0, 1, 2] and torch.equal(before, torch.get_rng_state()) is read
    middle = torch.get_rng_state()
    assert next(again) == 0 and not torch.equal(middle, torch.get_rng_state()), "each other pass draws where it begins"


@pytest.mark.parametrize(
    ("since", "step", "expected"),
    [(0, 3, False), (0, 4, True), (4, 7, False), (4, 8, True), (6, 9, True), (0, 0, False)],
)
def test_whether_this_run_has_evaluated(since: int, step: int, expected: bool, arguments: SimpleNamespace) -> None:
    host = SimpleNamespace(since=since)
    assert MegatronHost.has_evaluated(host, step) is expected  # type: ignore[arg-type]
    arguments.eval_interval = None
    assert MegatronHost.has_evaluated(host, step) is False  # type: ignore[arg-type]


class Validation:
    """A host whose evaluation reads three batches; `drawn`: reading one draws a number."""

    def __init__(self) -> None:
        self.evaluated, self.data = -1, None
        self.read = iter(range(100))
        outer = SimpleNamespace(iterable=ReplayIterator(self.read), saved_microbatches=[1], replaying=True)
        self.validation = outer

    def evaluation_batches(self, step: int) -> int:
        return 3 if step % 4 == 0 else 0

    def pass_over(self, step: int) -> bool:
        return megatron_rollback.validation_data(self, step)  # type: ignore[arg-type]


def test_batches_of_an_interrupted_evaluation_are_passed_over_once() -> None:
    host = Validation()
    next(host.validation.iterable)
    assert host.pass_over(4) is True and host.validation.saved_microbatches == []
    assert host.pass_over(4) is False, "a second fault came before the next step"
    assert next(host.read) == 3
    host.validation.iterable.mark()  # a step begins
    assert host.pass_over(8) is True, "another evaluation"


def test_a_repeated_step_has_its_evaluation_behind_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 5 was begun and is given up; another fault comes before it begins again."""
    monkeypatch.setattr(megatron_rollback, "ABANDON", ())
    host: Any = Validation()
    host.put_back = ()
    host.validation.iterable.mark()
    megatron_rollback.roll_back(host, SimpleNamespace(step=4), again=True)  # type: ignore[arg-type]
    assert host.pass_over(4) is False
    assert next(host.read) == 0


@pytest.mark.parametrize(("kind", "first"), [("cyclic", 1), ("single", 0)])
def test_the_draw_of_an_evaluation_that_has_not_begun_belongs_to_the_step(
    kind: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host: Any = Validation()
    monkeypatch.setattr(megatron_rollback, "_args", lambda: SimpleNamespace(dataloader_type=kind))
    for _ in range(2):
        megatron_rollback.begin_evaluation(host, 4)
        megatron_rollback.begin_evaluation(host, 5)
    assert host.validation.iterable.given == first
    assert host.pass_over(4) is True
    assert next(host.read) == 3, "its three batches, and no more"


def test_a_dump_does_not_fail_because_the_evaluation_behind_it_has_no_data(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host: Any = Validation()
    host.validation.iterable = ReplayIterator(iter(()))
    monkeypatch.setattr(megatron_rollback, "_args", lambda: SimpleNamespace(dataloader_type="cyclic"))
    megatron_rollback.begin_evaluation(host, 4)
    assert "no batch of the evaluation after step 4 can be read" in caplog.text


def test_batches_behind_which_data_were_made_anew_are_not_passed_over() -> None:
    """A newcomer has read none of them, and another fault comes before its first step."""
    host = Validation()
    host.evaluated = 4  # as a newcomer, and whoever loads, say
    assert host.pass_over(4) is False
    assert next(host.read) == 0


class Batches:
    """Grows from 2 to 4 micro-batches with the 12th sample, of which 2 ranks have half each."""

    def __init__(self) -> None:
        self.count = 2

    def update_num_microbatches(self, consumed: int, consistency_check: bool) -> None:
        self.count = 2 if consumed < 12 else 4

    def get_num_microbatches(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("consumed", "step", "grows"), [(0, 0, False), (4, 1, False), (8, 2, False), (12, 3, True), (20, 4, False)]
)
def test_a_batch_that_grows_with_the_next_step(
    consumed: int, step: int, grows: bool, arguments: SimpleNamespace
) -> None:
    batches: Any = Batches()
    arguments.consumed_train_samples = consumed
    batches.update_num_microbatches(consumed, False)
    now = batches.count
    host = SimpleNamespace(batches=lambda: batches, counters=lambda _step: {"batch": 2 * batches.count})
    assert MegatronHost.batch_grows_after(host, step) is grows  # type: ignore[arg-type]
    assert batches.count == now


def test_a_count_of_updates_stays_what_it_is() -> None:
    """Some optimizers count in a tensor, and ask it where it is."""
    groups: list[dict[str, Any]] = [{"step": torch.tensor(3)}, {"step": 3}, {}]
    counted = groups[0]["step"]
    for group in groups:
        megatron_shards.set_step(group, 7)
    assert groups[0]["step"] is counted and int(counted) == 7
    assert groups[1:] == [{"step": 7}, {"step": 7}]
