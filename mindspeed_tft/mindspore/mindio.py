"""`import mindspeed_tft.mindspore.mindio`: from here on `import mindio_ttp` finds our names for MindSpore's callback.

MindSpore's `TrainFaultTolerance` calls these names. With MS_ENABLE_TFT='{TSP:1}' it needs the gate at the end of a step
alone, and that is what is served: ranks are held there, and moved to another link. For a dying gasp it would need a
repair in place; `FaultTolerance` gives one without. (`mindspeed_tft.facade` serves the same names for torch.)
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindspeed_tft.engine.types import RankInfo
from mindspeed_tft.facade.words import FacadeError, NotServed
from mindspeed_tft.mindspore import places, protection, switches
from mindspeed_tft.mindspore.framework import Handler, Link, MindSpore
from mindspeed_tft.mindspore.member import Member
from mindspeed_tft.mindspore.training import WHOLE, settle
from mindspeed_tft.settings import Settings

NAME = "mindio_ttp"
link_handler: Handler | None = None  # see `FaultTolerance`; to be set before training


class _Finder:
    """Finds `mindio_ttp` beside this file."""

    @staticmethod
    def find_spec(
        fullname: str, _path: Sequence[str] | None = None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        folder = str(Path(__file__).parent)
        return importlib.machinery.PathFinder.find_spec(NAME, [folder]) if fullname == NAME else None


def install() -> None:
    """Make `mindio_ttp` mean ours. Again is harmless.

    Raises:
        FacadeError: another package of that name can be imported: two would answer to one name.
    """
    if _Finder in sys.meta_path:
        return
    spec = importlib.util.find_spec(NAME)
    if spec is not None or NAME in sys.modules:
        where = spec.origin if spec is not None else "imported already"
        raise FacadeError(
            f"{__name__} serves the names of {NAME}, but a package of that name is there as well ({where});"
            f" uninstall it (pip uninstall {NAME}), or do not import {__name__}"
        )
    sys.meta_path.insert(0, _Finder)


class Gate:
    """This process at the end of each step, as `TrainFaultTolerance` tells of it."""

    def __init__(self) -> None:
        self._switches = switches.Switches()
        self._settings = Settings()
        self._sync: Callable[[], object] = lambda: None
        self._member: Member | None = None

    def start(self, rank: int, world_size: int) -> None:
        """Read what is wanted, and connect this rank.

        Raises:
            NotServed: more is wanted than the gate.
            FacadeError: the rank is another one than msrun gave this process.
        """
        self._switches = switches.read(os.environ)
        if self._switches.dump or not self._switches.pause:
            raise NotServed(
                "TrainFaultTolerance with MS_ENABLE_TFT='{TTP:1}'",
                "its dying gasp goes by handlers that clean and repair a device in place",
                "use the callback mindspeed_tft.mindspore.FaultTolerance, or MS_ENABLE_TFT='{TSP:1}'",
            )
        self._settings = settle(os.environ, {}, self._switches)
        place = places.find(os.environ)
        if (rank, world_size) != (place.rank, place.world_size):
            told, is_ = f"{rank} of {world_size}", f"{place.rank} of {place.world_size}"
            raise FacadeError(f"tft_init_processor: rank {told}, but msrun started this process as {is_}")
        framework = MindSpore({}, world_size)
        info = RankInfo(rank, place.host, os.getpid(), WHOLE, rank, (f"{WHOLE}/state",))
        link = Link(world_size, framework.agree, lambda ranks, ops: self._move(ranks, ops), self._why_no_link)
        resume = places.resume_words(os.environ)
        deadlines = places.deadlines(self._settings, os.environ)
        self._member = Member(framework, info, deadlines, Path.cwd(), resume, True, link, dumps=False, saves=False)
        self._member.settle = lambda: self._sync()
        protection.protect(self._member, place, self._settings, "TrainFaultTolerance")

    @staticmethod
    def _move(ranks: list[int], backup: list[bool]) -> bool:
        from mindspeed_tft.mindspore.framework import own_handler

        return (link_handler or own_handler())(ranks, backup)

    def _why_no_link(self) -> str:
        return protection.why_no_link(self._switches, link_handler)

    def synchronize(self, function: Callable[[], object]) -> None:
        """Called before this rank is held."""
        self._sync = function

    def pause(self, step: int) -> None:
        """The end of `step`: this rank waits here while operators hold the job.

        Raises:
            FacadeError: `start` was not called.
        """
        if self._member is None:
            raise FacadeError("tft_pause_train: there is no processor; call tft_init_processor and tft_start_processor")
        self._member.step_end(step, leaves=False)
        self._member.step_begin(step + 1)

    def failed(self) -> None:
        """`TrainFaultTolerance` handles an exception. Does not return where a controller leads: the others are stopped,
        and this process ends."""
        exc = sys.exc_info()[1]
        if self._member is not None:
            self._member.failed(exc if exc is not None else RuntimeError("training failed, as its callback says"))


gate = Gate()


def refused(name: str) -> Callable[..., Any]:
    """What a name of `mindio_ttp` is that a pause does not need."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise NotServed(
            name,
            "in a job of MindSpore only the gate at the end of a step is served under this name (TSP)",
            "use the callback mindspeed_tft.mindspore.FaultTolerance for a dying gasp",
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


install()
