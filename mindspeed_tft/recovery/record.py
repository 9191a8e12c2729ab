"""What a rank remembers of the step it is in: the few facts from which every recovery starts.

One `StepRecord` lives per rank and is stamped from the step path by plain attribute writes. The snapshots hold the
*small* states (RNG, counters, scheduler position), never a tensor of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from mindspeed_tft import encode
from mindspeed_tft.engine.types import Commit, Update


@dataclass(frozen=True)
class SmallState:
    """Everything of a rank, but its tensors, that a checkpoint of one step holds."""

    step: int  # the state is that of the end of this step
    rng: dict[str, Any]
    counters: dict[str, Any]  # values that live in Megatron's args
    scheduler: dict[str, Any]
    scalers: list[dict[str, Any]]  # per optimizer of the chain; empty dicts where there is no loss scaling
    flops: float
    # Of modules that count or adjust something in each step (such as the bias of a router of experts), by name: no
    # optimizer owns them, and they change before the commit point.
    buffers: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """For another rank; see `encode`."""
        return encode.dumps({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_bytes(cls, data: bytes) -> SmallState:
        """The opposite of `to_bytes`.

        Raises:
            EncodeError: not such bytes.
        """
        values = encode.loads(data)
        if not isinstance(values, dict) or values.keys() != {field.name for field in fields(cls)}:
            raise encode.EncodeError(f"{len(data)} bytes are no small state")
        return cls(**values)


@dataclass
class StepRecord:
    """Where this rank stands. `step` is the step being computed, or the last one until the next begins."""

    step: int = 0
    commit: Commit = Commit.NONE
    skipped: bool = False  # committed without an update: overflow found, or the norm above its threshold
    updates: dict[int, Update] = field(default_factory=dict)  # per optimizer of the chain, by its position
    start: SmallState | None = None  # at the start of `step`, which is the end of the step before

    def begin(self, step: int, start: SmallState, optimizers: int) -> None:
        self.step, self.start = step, start
        self.commit, self.skipped = Commit.NONE, False
        self.updates = dict.fromkeys(range(optimizers), Update.UNTOUCHED)

    def given(self, step: int) -> None:
        """The shards of this rank came from other holders and are those of `step`. A rank that has begun the step after
        it still has its start to go back to; a newcomer, which has trained none, stands at `step` from now on."""
        if self.step > step:
            return
        if self.step < step:
            self.step, self.start, self.skipped = step, None, False
        self.commit = Commit.PASSED
        self.updates = dict.fromkeys(self.updates, Update.DONE)

    @property
    def update(self) -> Update:
        """The state of all shards together: one dirty shard makes the rank dirty."""
        states = set(self.updates.values())
        if Update.DIRTY in states:
            return Update.DIRTY
        if self.skipped:
            return Update.DONE if self.commit is Commit.PASSED else Update.UNTOUCHED
        if states == {Update.DONE}:
            return Update.DONE
        return Update.UNTOUCHED  # also when only some are done: what is missing can be finished after the commit
