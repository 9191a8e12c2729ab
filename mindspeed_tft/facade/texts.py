"""What kind of fault the text of an exception means, by the rules that adaptors of `mindio_ttp` count on.

Built-in texts come first, then those that the adaptor registered, then our own tables. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mindspeed_tft.facade.words import KIND_OF_STATE, TEXTS, FacadeError
from mindspeed_tft.faults import classify

_TIME = re.compile(r"time\s+us\s*=\s*(\d+)", re.IGNORECASE)


@dataclass
class Window:
    """When the last update began and ended, in microseconds of whichever clock the adaptor asks; None: not known."""

    start: int | None = None
    end: int | None = None


def repairable(at: int, start: int | None, end: int | None) -> bool:
    """Whether a memory error at that time cannot have spread through an update: an older one may have fed gradients
    that every rank has applied. All three are times of one clock."""
    return start is not None and end is not None and (at > max(start, end) or start < at < end)


class Rules:
    """The built-in texts and those of the adaptor."""

    def __init__(self) -> None:
        self._own: dict[str, tuple[str, Callable[[str], str]]] = {}

    def register(self, pattern: str, state: str, handler: Callable[[str], str]) -> None:
        """A text of the adaptor's own. A second one with the same pattern replaces the first.

        Raises:
            FacadeError: no such state, or one that no text can mean.
            TypeError: the handler is not callable.
        """
        if not callable(handler):
            raise TypeError(f"the handler of {pattern!r} is a {type(handler).__name__}, not a function")
        known = {one.name: kind for one, kind in KIND_OF_STATE.items()}
        if state not in known:
            raise FacadeError(
                f"tft_register_exception_handler: {state!r} is none of {', '.join(known)}, which a text can mean"
            )
        if not pattern:
            raise FacadeError("tft_register_exception_handler: an empty pattern would fit every text")
        self._own[pattern] = (known[state], handler)

    def kind(self, text: str, window: Window, platform: str) -> str:
        """A kind of `classify.KINDS`. The handler of an own text is called with it, and what it returns is not used."""
        for pattern, kind in TEXTS:
            if pattern in text:
                return kind if kind != "dated" else _dated(text, window)
        for pattern, (kind, handler) in self._own.items():
            if pattern in text:
                handler(text)
                return kind
        return classify.classify(text, platform).kind


def _dated(text: str, window: Window) -> str:
    found = _TIME.search(text)
    whole = found is not None and repairable(int(found[1]), window.start, window.end)
    return "memory" if whole else "corrupted"


__all__ = ["Rules", "Window", "repairable"]
