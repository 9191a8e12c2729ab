"""What operators want of a rank at the end of a step: that it saves, that it waits.

At which step, all ranks find out together, in the commit of that step: each brings what it has been told, and all see
the highest of it. So a wish need not reach every rank, and no rank acts on one that the others do not know.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mindspeed_tft.engine.hold import LIMIT, OF_HELD
from mindspeed_tft.engine.types import Order, OrderKind, Wish
from mindspeed_tft.recovery.notices import Notice

log = logging.getLogger(__name__)

SLICE = 0.1  # seconds in which a held rank looks around
Save = Callable[[], Path]  # the framework's own checkpoint of the step that has just ended, on all ranks together
Act = Callable[[], None]
Works = dict[OrderKind, Callable[[Order], dict[str, str]]]


class HoldBroken(RuntimeError):
    """A stop came while this rank was held. It is whole."""


class NotDone(RuntimeError):
    """An order to a held rank could not be carried out, and why. The rank is whole, and stays held."""


class Line(Protocol):
    """The part of `control.processor.Processor` that is used here."""

    phase: str

    @property
    def wish(self) -> Wish: ...
    def held(self, hold: int, step: int) -> None: ...
    def released(self, hold: int) -> None: ...
    def left_hold(self) -> None: ...
    def saved(self, save: int, step: int, path: str, why: str = "") -> None: ...
    def next_order(self, timeout: float) -> Order | None: ...
    def order_done(self, order_id: int, ok: bool, message: str = "", result: dict[str, str] | None = None) -> None: ...
    def put_back(self, order: Order) -> None: ...


class Boundary:
    """The end of a step, as operators want it. All methods are for the main thread."""

    def __init__(
        self,
        link: Line,
        stopping: Callable[[], bool],
        grace: float,
        all_agree: Callable[[bool], bool] = lambda mine: mine,
        notices: Callable[[int], Notice] = Notice,
    ) -> None:
        """
        Args:
            stopping: a stop has come that is not answered yet.
            grace: seconds beyond the limit of a hold, in which the engine ends it for all ranks; after them this rank
                ends it alone.
            all_agree: whether all ranks say yes, a collective.
            notices: what the other ranks tell of a hold.
        """
        self._link, self._stopping, self._grace = link, stopping, grace
        self._all_agree, self._notices = all_agree, notices
        self._hold = self._save = self._limit = 0  # agreed for the end of the step that is computed
        self._over = 0  # the last hold that is behind this rank
        self._done = 0  # the last save that is
        self.works: Works = {}  # what can be ordered while this rank is held

    def offer(self, step: int) -> tuple[int, int, int]:
        """The hold and the save that this rank knows to be wanted at the end of `step`, 0: none, and the limit of the
        hold in whole seconds."""
        wish = self._link.wish
        hold = wish.hold if wish.hold > self._over and step >= wish.hold_from else 0
        save = wish.save if wish.save > self._done and step >= wish.save_from else 0
        return hold, save, math.ceil(wish.limit) if hold else 0

    def agree(self, hold: int, save: int, limit: int = 0) -> None:
        """What the commit of this step came to, the same on all ranks."""
        self._hold, self._save, self._limit = hold, save, limit

    def forget(self) -> None:
        """A fault came before the end of the step. What is still wanted will be agreed again."""
        self._hold = self._save = self._limit = 0

    def reach(self, step: int, save: Save, leaves: bool, settle: Act = lambda: None, look: Act = lambda: None) -> None:
        """`step` has ended on this rank. Returns when training is to go on.

        Args:
            save: see `Save`.
            leaves: the framework ends training here; then nobody is held.
            settle: done before this rank waits, on all ranks together: an end of what the framework has under way.
            look: done again and again while it waits: what the framework looks for at the end of each step.

        Raises:
            HoldBroken: this rank was told to stop while it was held.
        """
        hold, wanted, self._hold, self._save = self._hold, self._save, 0, 0
        if wanted:
            self._save_as_wanted(wanted, step, save)
        if not hold or leaves:
            return
        if not self._all_agree(not self._is_ended(hold)):  # where some would not wait, nobody may
            self._over = hold
            return
        settle()
        self._wait(hold, step, save, look)

    def _save_as_wanted(self, wanted: int, step: int, save: Save) -> None:
        try:
            path, why = str(save()), ""
        except NotDone as exc:
            path, why = "", str(exc)
            log.warning("step %d was to be saved, and was not: %s; training goes on", step, why)
        self._done = wanted
        self._link.saved(wanted, step, path, why)

    def _wait(self, hold: int, step: int, save: Save, look: Act) -> None:
        link = self._link
        link.phase = "held"
        link.held(hold, step)
        self.works[OrderKind.SAVE] = lambda _order: {"path": str(save())}
        begun, notice = time.monotonic(), self._notices(hold)
        try:
            while not notice.over and not self._is_over(hold, time.monotonic() - begun):
                look()
                if self._stopping():
                    raise HoldBroken(f"held after step {step}, and told to stop")
                order = link.next_order(SLICE)
                if order is not None:
                    self._carry_out(order)
        except BaseException:
            link.left_hold()
            notice.end(tell=False)
            raise
        notice.end(tell=True)
        self._over = hold
        link.released(hold)
        link.phase = "between-steps"

    def _is_ended(self, hold: int) -> bool:
        """A later wish is without it."""
        wish = self._link.wish
        return wish.id > hold and wish.hold != hold

    def _is_over(self, hold: int, seconds: float) -> bool:
        if self._is_ended(hold):
            return True
        wish = self._link.wish
        if seconds < ((wish.limit if wish.hold == hold else self._limit) or LIMIT) + self._grace:
            return False
        log.warning("held for %.0f s, and nobody ends it: training goes on", seconds)
        return True

    def _carry_out(self, order: Order) -> None:
        if order.kind not in OF_HELD or self._stopping():
            self._link.put_back(order)
            return
        try:
            result = self.works[order.kind](order)
        except NotDone as exc:
            self._link.order_done(order.id, False, str(exc))
            return
        except BaseException as exc:
            self._link.order_done(order.id, False, f"{type(exc).__name__}: {exc}")
            raise
        self._link.order_done(order.id, True, "", result)
