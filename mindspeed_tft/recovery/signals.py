"""Signals in a protected rank: being asked to end is a fault of the job, and nothing may break a local update in two.

Launchers send SIGTERM to the survivors of a fault and SIGINT on Ctrl-C, schedulers SIGTERM before they take a node
away. The survivors need that moment to save. And a data loader's workers get the same signal: torch then raises an
exception at whatever place the main thread happens to be, also in the middle of an update or of the dump itself.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

from mindspeed_tft.recovery.session import Session

log = logging.getLogger(__name__)

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def catch_endings(session: Session[Any]) -> None:
    """Turn signals that ask this rank to end into a fault of the job. A handler that somebody installed stays."""
    if threading.current_thread() is not threading.main_thread():
        log.warning("not on the main thread: a signal ends this rank without a dump")
        return
    for number in ENDING:
        previous = signal.getsignal(number)
        if previous in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _handler(session, previous))


def _handler(session: Session[Any], previous: Any) -> Any:
    def handle(number: int, frame: FrameType | None) -> None:
        if session.terminated(signal.Signals(number).name):
            return
        if callable(previous):  # Ctrl-C without protection is what it always was
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handle


def guard_children(session: Session[Any]) -> None:
    """Keep torch's news of a dead loader worker out of places where an exception would destroy something.

    To be called when the loaders exist: torch installs its handler with the first of them.
    """
    previous = signal.getsignal(signal.SIGCHLD)
    if not callable(previous) or threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            previous(number, frame)
        except RuntimeError as exc:
            if session.ending:
                return  # the workers are not needed any more
            if "Terminated" in str(exc) and session.terminated("SIGTERM (as its data loader did)"):
                return
            if not session.defer(exc):
                raise

    signal.signal(signal.SIGCHLD, handle)
