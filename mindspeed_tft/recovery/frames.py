"""What Python's frames and its garbage collector hold: a broken step is let go of before its state is put back."""

from __future__ import annotations

import gc
import traceback


def settle() -> None:
    """Take everything that is there before training out of the garbage collector's sight, once.

    Modules, functions and the model live as long as the process. A full collection after a fault would look at each of
    these objects, in vain, and take most of the time of a rollback.
    """
    gc.collect()
    gc.freeze()


def release(exc: BaseException) -> None:
    """Let go of everything that the frames of a broken step hold: its graph, its activations, and contexts that it
    left open, whose `finally` must run now and not in the middle of the retried step."""
    seen: BaseException | None = exc
    while seen is not None:
        if seen.__traceback__ is not None:
            traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    gc.collect()
