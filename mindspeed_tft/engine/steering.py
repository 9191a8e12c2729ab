"""Stops of a job that a cluster manager steers: where our own rules would decide, it is asked, and its word is carried
out. What is asked and until when is `counsel`'s affair; without a manager all of this does nothing.
"""

from __future__ import annotations

from mindspeed_tft.engine.counsel import DUMP, RECOVER, RETRY, Counsel, possible
from mindspeed_tft.engine.incident import EXIT_UNSAVED, Ending
from mindspeed_tft.engine.repair import Repair
from mindspeed_tft.engine.states import State
from mindspeed_tft.engine.stops import Stops
from mindspeed_tft.engine.types import Advised, Deadlines, FaultSeen, Steered, Told


class Steering(Stops):
    """Stops whose decisions may be another's."""

    def __init__(
        self, deadlines: Deadlines, world_size: int, epoch: int, issued: int, tag: str, strategies: frozenset[str]
    ) -> None:
        """For the arguments see `Engine`."""
        super().__init__(deadlines, world_size, epoch, issued, tag, strategies)
        self._counsel = Counsel(self._desk, self._roster, deadlines)

    @property
    def state(self) -> State:
        found = super().state
        return State.CONSULTING if self._counsel.open and found is State.STOPPING else found

    # ------------------------------------------------------------------------------------------------ what is heard

    def _on_steered(self, event: Steered) -> None:
        if self._counsel.steered(event):
            self._choose()

    def _on_told(self, event: Told) -> None:
        """Faults that the manager names. A decision that it owes is asked for anew, with them."""
        news, asked = self._counsel.told(event), self._counsel.open
        self._counsel.open = False
        for rank, kind in news:
            self._on_fault(FaultSeen(event.at, rank, kind, f"{event.who} names it", own=True))
        if self._state is State.TRAINING:
            self._stop_for_link(f"{event.who} stops this job")
        elif asked and self._state is State.STOPPING:
            self._choose()

    def _on_advised(self, event: Advised) -> None:
        if not self._counsel.open:
            return
        if why := self._counsel.advised(event):
            self._ask(event.strategy, why)
        elif event.strategy == RECOVER and self._reboots is not None:
            self._take_away(event)
            self._reboots.leaving = self._counsel.leaving
            self._desk.enter("reboot")
            self._wait(self._reboots)
        elif event.strategy == RETRY and self._repairs is not None:
            self._repair_or_save(self._repairs)
        elif event.strategy == DUMP:
            self._give_up(f"the cluster manager decided for a dump{self._counsel.lacking(RETRY, RECOVER)}")
        else:
            lacking = self._counsel.lacking(RETRY, RECOVER, DUMP)
            why = f"the cluster manager decided for an exit without a dump{lacking}"
            self._leave(Ending("failed", -1, EXIT_UNSAVED, why))

    def _take_away(self, event: Advised) -> None:
        """The nodes of these ranks go: whoever still lives there cannot go on."""
        news = self._counsel.told(Told(event.at, tuple((rank, "process") for rank in event.leaving)))
        for rank, kind in news:
            self._on_fault(FaultSeen(event.at, rank, kind, "its node is taken away", own=True))

    # ------------------------------------------------------------------------------------------------ what is asked

    def _choose(self) -> None:
        for rank, why in self._counsel.suspects(self._reports):
            self._distrust(rank, why)
        if self._counsel.on:
            for rank in self._reports:  # who was late, and has reported while a decision was awaited
                self._silent.pop(rank, None)
            self._ask(self._counsel.asks_again(), self._reason)
        else:
            super()._choose()

    def _ask(self, failed: str = "", why: str = "") -> None:
        if self._counsel.tired():
            self._choose()
            return
        self._desk.enter("consult")
        if self._reboots is not None:
            self._reboots.waiting = False
        found = possible(self._roster, self._reports, self._silent, self._desk, self._repairs, self._reboots)
        self._counsel.ask(found, failed, why, self._furthest)

    def _give_up(self, why: str) -> None:
        if failed := self._counsel.asks_again():
            self._desk.incident.verdict = why
            self._ask(failed, why)
        else:
            super()._give_up(why)

    def _look_again(self) -> bool:
        if not self._counsel.open:
            return super()._look_again()
        self._counsel.stale = True
        return True

    def _decide_when_heard(self) -> None:
        if self._counsel.open:
            self._counsel.stale = True
        else:
            super()._decide_when_heard()

    def _tick_stopping(self) -> None:
        if not self._counsel.open:
            super()._tick_stopping()
        elif self._counsel.late() or self._counsel.stale:
            self._choose()

    # ------------------------------------------------------------------------------------------------ begin and end

    def _stop(self, reason: str) -> None:
        self._counsel.stopped()
        super()._stop(reason)

    def _train_on(self, repair: Repair) -> None:
        super()._train_on(repair)
        self._counsel.over()

    def _leave(self, ending: Ending | None) -> None:
        if ending is not None:
            self._counsel.over()
        super()._leave(ending)
