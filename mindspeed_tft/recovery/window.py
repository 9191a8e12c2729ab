"""When the last update of this rank began, on its device's clock.

A device may tell of a memory error late, with the time of the error. One that is older than the commit of the last
update may be in the gradients that every rank has applied, or is about to apply without this one; a younger one has hit
this rank alone.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_tft.faults.classify import Window


class UpdateWindow:
    """`moment()` gives microseconds on the device's clock; 0: it has none."""

    def __init__(self, moment: Callable[[], int]) -> None:
        self._moment = moment
        self._begin = 0

    def begins(self) -> None:
        """This rank is about to enter the commit of a step that will be updated. The commit waits for the device as
        well, so that asking it for the time costs no more than the question.

        Raises:
            RuntimeError: of the device, which has failed; then the time is not known.
        """
        self._begin = 0
        self._begin = self._moment()

    def read(self) -> Window:
        """0 where it is not known: before the first update, or without a clock."""
        return Window(begin_us=self._begin)
