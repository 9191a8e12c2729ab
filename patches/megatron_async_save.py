"""megatron.training.async_utils: periodic checkpoints that are written in the background (`--async-save`).

A checkpoint counts when Megatron has finalized it on all ranks, not when it was begun. When training stops, saves under
way are given up: the process that writes is killed before anybody reports, so that none writes into what a dump or a
later save puts at its place, and what it left is no checkpoint (Megatron's index and tracker come last). Nothing is
lost by that: the state of the last completed step is as new, and is what a dump saves.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from typing import Any

from mindspeed_tft import runtime
from mindspeed_tft.control import pids
from mindspeed_tft.patches.groups import HA, HIGH_AVAILABILITY, MASTER, SomeReleases
from mindspeed_tft.registry import REGISTRY

log = logging.getLogger(__name__)

CALLER = "megatron.core.dist_checkpointing.strategies.async_utils"
WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"
TRAINING = "megatron.training.async_utils"
LOOK = 0.1  # seconds between two looks for the end of a save
_KILL_SECONDS = 5.0  # for a killed process to be gone
Arguments = tuple[Any, ...]

# Before that, saves in the background are refused (`megatron_unproved_releases`).
_HERE = SomeReleases(group=HIGH_AVAILABILITY, needs=MASTER, versions=">=0.17", elsewhere="skip")


def _module(name: str) -> Any:
    return importlib.import_module(name)


@REGISTRY.wrap(f"{TRAINING}:maybe_finalize_async_save", **HA)
def maybe_finalize_async_save(
    wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]
) -> Any:
    """Learn which saves have become checkpoints: Megatron finalizes them in order, and on all ranks together."""
    result = wrapped(*args, **kwargs)
    session = runtime.session()
    if session is not None:
        session.host.saves_under_way(_under_way())
    return result


def _under_way() -> int:
    calls = _module(TRAINING)._async_calls_queue
    return 0 if calls is None else int(calls.get_num_unfinalized_calls())


def end_all() -> None:
    """Wait until all saves under way are checkpoints, on all ranks together.

    Each look is a collective, so a stop ends the wait; Megatron's own wait for the storage would not hear of it.

    Raises:
        CommunicationAborted: a stop came.
    """
    while _under_way():
        _module(TRAINING).maybe_finalize_async_save()
        if _under_way():
            time.sleep(LOOK)


def give_up() -> None:
    """End all saves under way on this rank, and begin to count them anew, as a newcomer does: Megatron compares the
    counts of all ranks."""
    calls = _module(TRAINING)._async_calls_queue
    if calls is None:
        return
    if calls.get_num_unfinalized_calls():
        _kill_writer()
        calls.async_calls.clear()
        calls.close(abort=True)
        _forget_results()
    calls.call_idx = -1


def _kill_writer() -> None:
    caller = _module(CALLER).PersistentAsyncCaller
    writer = caller._persistent_process
    for channel in (caller._persistent_queue, caller._persistent_preload_q):
        if channel is not None:
            channel.cancel_join_thread()  # nobody reads any more, and the exit of this process must not wait for it
    if writer is not None:
        log.warning("a checkpoint under way in the background is given up (--async-save)")
        writer.kill()
        writer.join(_KILL_SECONDS)
        if writer.is_alive():
            log.error("process %d, which writes checkpoints, does not end: its storage may hang", writer.pid)


def _forget_results() -> None:
    results = _module(WRITER)._results_queue
    try:
        while results is not None:
            results.get_nowait()
    except queue.Empty:
        return
    except (OSError, EOFError):  # its process was asked to end together with this one
        _module(WRITER)._results_queue = None  # the next save makes another


# ------------------------------------------------------------------------------------ processes of this rank


@REGISTRY.wrap(f"{CALLER}:PersistentAsyncCaller._get_process", **_HERE)
def get_process(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """The process that writes runs `loop` instead of Megatron's own."""
    caller = _module(CALLER).PersistentAsyncCaller
    before = vars(caller)["async_loop"]
    caller.async_loop = staticmethod(loop)
    try:
        return wrapped(*args, **kwargs)
    finally:
        caller.async_loop = before


def loop(*arguments: Any) -> None:
    """Megatron's loop, in a process that ends with its rank: it may not write on after that, nor stay for ever."""
    _end_with(_parent())
    _module("mindspeed_tft.adaptor")  # a machine without accelerator needs its names of devices here as well
    _module(CALLER).PersistentAsyncCaller.async_loop(*arguments)


@REGISTRY.wrap(f"{WRITER}:get_write_results_queue", **_HERE)
def get_write_results_queue(
    wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]
) -> Any:
    """The process that hands results over ends with its rank as well."""
    writer = _module(WRITER)
    if writer._results_queue is None:
        mode = args[0] if args else kwargs.get("mp_mode", "spawn")
        manager = SyncManager(ctx=multiprocessing.get_context(mode))
        manager.start(_end_with, (os.getpid(),))
        writer._results_queue = manager.Queue()
    return wrapped(*args, **kwargs)


def _parent() -> int:
    """The rank that this process was started for; with a fork server in between it is not the one that forked it."""
    parent = multiprocessing.parent_process()
    return parent.pid if parent is not None and parent.pid is not None else os.getppid()


def _end_with(pid: int) -> None:
    """Let this process end at once when the process `pid` does."""
    try:
        descriptor = pids.open_pidfd(pid)
    except ProcessLookupError:
        os._exit(1)
    if descriptor < 0:
        return  # an old kernel: the process stays, as it does without us
    threading.Thread(target=_exit_after, args=(descriptor,), daemon=True, name="tft-end-with-rank").start()


def _exit_after(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os._exit(1)
