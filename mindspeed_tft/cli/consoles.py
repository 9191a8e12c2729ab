"""The consoles that `tftctl` prints on. What users write is shown as it is: rich would make a picture of `:train:`."""

from __future__ import annotations

import sys

from rich.console import Console

WIDE = 500  # columns where there is no terminal: no line is folded


def make(*, stderr: bool = False) -> Console:
    """A console as wide as rich takes the terminal to be."""
    return Console(stderr=stderr, emoji=False)


def for_tables(width: int = WIDE) -> Console:
    """Standard output; `width` columns where it is no terminal."""
    return make() if sys.stdout.isatty() else Console(width=width, emoji=False)
