"""megatron.training.training: where a step begins and ends, and where a fault surfaces."""

from __future__ import annotations

import functools
import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mindspeed_tft import arguments, runtime
from mindspeed_tft.patches import (
    megatron_async_save,
    megatron_host,
    megatron_rewind,
    megatron_rollback,
    megatron_tensorboard,
    megatron_verify,
    torch_distributed,
)
from mindspeed_tft.patches.groups import HA, HA_ALL
from mindspeed_tft.platforms import Platform
from mindspeed_tft.recovery import signals
from mindspeed_tft.recovery.files import DumpError
from mindspeed_tft.recovery.frames import settle
from mindspeed_tft.registry import REGISTRY

MODULE = "megatron.training.training"
Arguments = tuple[Any, ...]


@REGISTRY.wrap(f"{MODULE}:train", **HA_ALL)
def train(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """The place that every exception of training reaches, whichever collective or kernel it came out of."""
    session = runtime.session()
    if session is None:
        return wrapped(*args, **kwargs)
    host, space = session.host, megatron_host.args()
    model, optimizer, scheduler, data, validation = args[1:6]
    host.attach(model, optimizer, scheduler, data, validation, space.num_floating_point_operations_so_far)
    partly = space.no_load_optim or space.no_load_rng or getattr(space, "override_ckpt_iteration", None) is not None
    if space.load and space.iteration and not partly:
        host.saved(space.iteration, Path(os.path.realpath(space.load)))
    signals.guard_children(session)
    settle()
    megatron_rollback.keep_batches(host)
    session.link.one_way = bool(megatron_rewind.why_not(host))
    session.train_begin(space.iteration, len(host.optimizers()))
    resumed = torch_distributed.alone()
    host.since = host.evaluated = int(space.iteration)
    runtime.training_begins()
    if resumed:
        mark = megatron_tensorboard.Mark(session, None)
        session.join()
        mark.write()
    while True:
        try:
            if resumed:
                _save_if_due(session, args)
                _exit_if_due(session, args)
            result = wrapped(*args, **kwargs)
            runtime.training_ends()
            return result
        except SystemExit:
            if session.link.phase in ("between-steps", "start"):
                runtime.training_ends()  # no launcher is to start this rank again
                raise  # Megatron itself ends the job here: --exit-interval, --exit-duration-in-mins, a signal
            _recover(session, RuntimeError("the program called sys.exit in the middle of a step"))
        except BaseException as exc:
            _recover(session, exc)
        resumed = True


def _recover(session: Any, exc: BaseException) -> None:
    mark = megatron_tensorboard.Mark(session, exc)
    try:
        session.recover(exc)
        mark.write()
    except BaseException:
        runtime.training_ends()  # unprotected: nobody would wait for another process in this one's place
        raise


def _save_if_due(session: Any, args: Arguments) -> None:
    """The periodic checkpoint of step S, or that before the batch grows, where the fault came before it or into it. And
    that of a step that was loaded from elsewhere: --save may have later ones that nobody is to go on from."""
    space, step, host = megatron_host.args(), session.record.step, session.host
    periodic = bool(space.save_interval) and step % space.save_interval == 0
    if space.save and step and (periodic or host.batch_grows_after(step) or host.loaded_elsewhere):
        _save(session, args)


def _exit_if_due(session: Any, args: Arguments) -> None:
    """The end of the job at --exit-interval, where the fault came between step S and it. Not where S is the step that
    this run began behind: Megatron asks only after a step."""
    space, step = megatron_host.args(), session.record.step
    if not (space.exit_interval and step > session.host.since and step % space.exit_interval == 0):
        return
    if space.save:
        _save(session, args)
    session.host.end_saves()
    torch.distributed.barrier()
    runtime.training_ends()
    raise SystemExit(0)


def _save(session: Any, args: Arguments) -> None:
    """Megatron's own checkpoint of step S, unless it is there. All ranks agree on that first."""
    host, step = session.host, session.record.step
    if not host.all_agree(host.saved_step() == step):
        host.write_checkpoint(step, args)


@REGISTRY.wrap(f"{MODULE}:train_step", **HA_ALL)
def train_step(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    session = runtime.session()
    if session is None:
        return wrapped(*args, **kwargs)
    host = session.host
    megatron_rollback.mark_step(host)
    step = megatron_host.args().curr_iteration + 1
    host.step_begins(step)
    session.link.checkpoint = host.last_checkpoint()
    session.step_begin(step, len(host.optimizers()))
    first = session.first_step
    if first:
        args = (_on_default_streams(args[0], host.platform), *args[1:])
    result = wrapped(*args, **kwargs)
    session.step_end()
    host.step_ended()
    if first:
        host.audit()
    runtime.after_first_step()
    return result


def _on_default_streams(forward_step: Callable[..., Any], platform: Platform) -> Callable[..., Any]:
    """A stop may leave a thread on the stream of whatever the broken step was doing: the first step after it begins on
    the default stream, forward on this thread and backward on autograd's."""

    @functools.wraps(forward_step)
    def forward(*args: Any, **kwargs: Any) -> Any:
        platform.default_streams()
        result = forward_step(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(lambda _grad: platform.default_streams())  # type: ignore[no-untyped-call]
        return result

    return forward


@REGISTRY.wrap(f"{MODULE}:checkpoint_and_decide_exit", **HA)
def checkpoint_and_decide_exit(
    wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]
) -> Any:
    """The end of a step, after its evaluation and its periodic checkpoint: where operators have training wait."""
    leaves = wrapped(*args, **kwargs)
    session = runtime.session()
    if session is not None:
        session.boundary.reach(
            session.record.step,
            lambda: _save_now(session, args),
            bool(leaves),
            settle=lambda: _end_saves(session),
            look=lambda: look_for_signal(session),
        )
    return leaves


def look_for_signal(session: Any) -> None:
    """--exit-signal-handler: Megatron looks for its signal once a step, before this rank is held. While it is held, to
    be asked to end is what it is without that option."""
    if megatron_host.args().exit_signal_handler:
        handler = importlib.import_module("megatron.training.global_vars").get_signal_handler()
        if handler._signal_received:
            session.terminated(signal.Signals(handler.sig).name)


def _save_now(session: Any, args: Arguments) -> Path:
    """Megatron's own checkpoint of the step that has just ended, unless it is there, complete when this returns."""
    host: megatron_host.MegatronHost = session.host
    model, optimizer, scheduler, step, flops, context, data = args
    training = importlib.import_module(MODULE)
    _end_saves(session)  # it may be writing that of this very step
    if not host.all_agree(host.saved_step() == step):
        training.save_checkpoint_and_time(step, model, optimizer, scheduler, flops, context, train_data_iterator=data)
        _end_saves(session)
    return host.checkpoint_directory(host.save_directory(), step)


def _end_saves(session: Any) -> None:
    """Wait for the checkpoints that Megatron writes in the background: a hold may last, and what was begun before it
    would be of no use until its end."""
    if megatron_host.in_background():
        megatron_async_save.end_all()
    session.link.checkpoint = session.host.last_checkpoint()


@REGISTRY.wrap("megatron.training.checkpointing:save_checkpoint", **HA_ALL)
def save_checkpoint(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Remember which step Megatron has saved to the end: it need not be saved a second time, and can be loaded."""
    session = runtime.session()
    if session is None or kwargs.get("non_persistent_ckpt"):
        return wrapped(*args, **kwargs)
    step = int(args[0] if args else kwargs["iteration"])
    session.saving(step)
    session.host.saving(step)
    megatron_verify.forget(session.host, step)
    result = wrapped(*args, **kwargs)
    if megatron_host.in_background():
        session.host.save_begun(step)
    else:
        session.host.saved(step)
    return result


@REGISTRY.wrap("megatron.training.checkpointing:load_checkpoint", **HA_ALL)
def load_checkpoint(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """A newcomer starts without its peers, and gets its state from them: there is nothing to load, and no step yet.

    A dump of ours is loaded only if its files are what they were.
    """
    if torch_distributed.alone():
        return (0, 0)
    session = runtime.session()
    if session is not None and kwargs.get("load_arg", args[3] if len(args) > 3 else "load") == "load":
        try:
            megatron_verify.check_load(session.host)
        except DumpError as exc:
            if session.host.model:
                raise  # online: an older checkpoint is taken
            arguments.leave(f"--load: {exc}", session.info.rank)
    return wrapped(*args, **kwargs)


@REGISTRY.wrap(f"{MODULE}:build_train_valid_test_data_loaders", **HA_ALL)
def build_data_loaders(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Remember what the data comes from: to go back in it means to begin anew."""
    result = wrapped(*args, **kwargs)
    session = runtime.session()
    if session is not None:
        session.host.loaders = session.host.loaders or megatron_rewind.Loaders()
        session.host.loaders.add(result[0], result[1])
    return result


@REGISTRY.wrap(f"{MODULE}:num_floating_point_operations", **HA_ALL)
def num_floating_point_operations(
    wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]
) -> Any:
    value = wrapped(*args, **kwargs)
    session = runtime.session()
    if session is not None:
        session.host.count_flops(value)
    return value
