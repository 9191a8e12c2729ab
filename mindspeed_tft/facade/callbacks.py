"""The callbacks that an adaptor registered, and the host that carries orders out by calling them.

All but `stop` run on the training thread, which waits for orders meanwhile; `stop` has to free that thread, so it runs
on another one. An exception of a callback is a failed order, and the engine plans again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_tft.engine.planning import NEWEST
from mindspeed_tft.engine.types import RankInfo, Update
from mindspeed_tft.facade.words import NotServed
from mindspeed_tft.platforms import Damage
from mindspeed_tft.recovery.files import DumpError
from mindspeed_tft.recovery.notices import Notice
from mindspeed_tft.recovery.record import SmallState, StepRecord
from mindspeed_tft.replica.digest import Shard

log = logging.getLogger(__name__)

NAMES = ("stop", "clean", "rebuild_group", "repair", "rollback", "save_ckpt", "rename", "stream_sync", "exit")
REQUIRED = ("stop", "clean", "save_ckpt")  # without these no fault can be answered

WHOLE, FAILED, INTACT = 0, 1, 2  # what a clean callback may answer


class Callbacks:
    """By name, with what each is to be given as `ctx`."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Callable[..., Any], Any]] = {}
        self.train_args: Any = None  # what the training function was given: callbacks may put other objects into it

    def register(self, name: str, function: Callable[..., Any], ctx: Any) -> None:
        """A second one replaces the first.

        Raises:
            TypeError: not callable.
        """
        if not callable(function):
            raise TypeError(f"the {name} callback is a {type(function).__name__}, not a function")
        self._known[name] = (function, ctx)

    def missing(self) -> list[str]:
        return [name for name in REQUIRED if name not in self._known]

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def call(self, name: str, *arguments: Any) -> Any:
        """`name`(*arguments, train_args, ctx); None where it was not registered, which counts as success."""
        if name not in self._known:
            return None
        function, ctx = self._known[name]
        if name == "stream_sync":
            return function()
        if name == "exit":
            return function(ctx)
        if name == "rename":
            return function(*arguments, self.train_args)
        return function(*arguments, self.train_args, ctx)


class CallbackHost:
    """`recovery.host.Host` for a framework that is known by its callbacks alone. What has no callback is refused."""

    def __init__(self, info: RankInfo, callbacks: Callbacks) -> None:
        self._info, self.callbacks = info, callbacks
        self.notices: Callable[[int], Notice] = Notice

    # ------------------------------------------------------------------------------------------ what it knows

    def info(self) -> RankInfo:
        return self._info

    def shards(self) -> dict[str, Shard]:
        return {}  # nobody says where they lie, so there are no hashes

    def save_directory(self) -> Path:
        raise _no("the directory of checkpoints")

    def saved_step(self) -> int:
        return -1

    def checkpoints(self) -> tuple[int, ...]:
        """Which there are no callback tells; the newest one can be loaded, if there is one."""
        return (NEWEST,) if "repair" in self.callbacks and "rollback" in self.callbacks else ()

    def stopped(self) -> None:
        """Nothing: the stop callback was called already."""

    def small_state(self, step: int) -> SmallState:
        return SmallState(step, {}, {}, {}, [], 0.0)  # the adaptor puts its own back, from the number of the step

    def small_state_after(self, record: StepRecord) -> SmallState:
        return self.small_state(record.step)

    def rng_digest(self, state: SmallState) -> str:
        return ""

    def damage(self) -> Damage:
        return "some"  # asked with the clean callback, when all ranks are stopped

    # ------------------------------------------------------------------------------------------ what it refuses

    def commit(self, step: int, hold: int = 0, save: int = 0, limit: int = 0) -> tuple[int, int, int]:
        raise _no("a commit")

    def all_agree(self, mine: bool) -> bool:
        return mine  # the engine brings ranks together that are held apart (`engine.joint`)

    def finish_update(self, record: StepRecord) -> None:
        record.updates = dict.fromkeys(record.updates, Update.DIRTY)
        raise DumpError("an adaptor begins updates from its training loop alone")

    def stage_shards(self, shards: list[str], directory: Path) -> dict[str, str]:
        raise _no("files of single shards")

    def write_part(self, state: SmallState, part: str, sources: dict[str, str], directory: Path) -> dict[Path, str]:
        raise _no("files of a part")

    def complete(self, step: int, parts: list[str], directory: Path) -> dict[Path, str]:
        raise _no("files of a checkpoint")

    def regroup(self, epoch: int, link: str) -> None:
        raise _no("a choice of the link")

    def check_link(self, link: str) -> list[str]:
        raise _no("a choice of the link")

    def move_groups(self, link: str, epoch: int, seconds: float) -> None:
        raise _no("a choice of the link")

    def test_groups(self, seconds: float) -> dict[str, str]:
        raise _no("a test of groups")

    def send_shard(self, shard: str, target: int) -> int:
        raise _no("transfers of single shards")

    def receive_shard(self, shard: str, source: int) -> int:
        raise _no("transfers of single shards")

    def load(self, step: int) -> None:
        raise _no("loads of a certain checkpoint")

    def roll_back(self, state: SmallState, again: bool) -> None:
        raise _no("small states")

    def send_state(self, state: SmallState, target: int) -> int:
        raise _no("small states")

    def receive_state(self, source: int) -> SmallState:
        raise _no("small states")

    def take_place(self, state: SmallState) -> None:
        raise _no("small states")

    def forget_first_times(self) -> None:
        """Nothing: the rebuild callback does it."""

    def checkpoint_directory(self, base: Path, step: int) -> Path:
        raise _no("the directory of checkpoints")

    def tracker(self, base: Path) -> Path:
        raise _no("the directory of checkpoints")


def _no(what: str) -> NotServed:
    return NotServed("this order", f"the callbacks of mindio_ttp know nothing of {what}", "see docs/mindio-facade.md")
