"""Leave a broken step behind in Megatron: every state that it touched is put back to the end of step S.

The rules are one small function each, in the order in which they have to run. The broken step's exception, with the
graph and the abandoned `no_sync` context in its frames, has been released before (`recovery.session`): released later,
its `finally` would switch gradient reduction on in the middle of the retried step.
"""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mindspeed_tft.patches import megatron_kinds, megatron_releases, mindspeed
from mindspeed_tft.recovery.record import SmallState
from mindspeed_tft.recovery.replay import ReplayIterator

if TYPE_CHECKING:
    from mindspeed_tft.patches.megatron_host import MegatronHost

log = logging.getLogger(__name__)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _args() -> Any:
    return _module("megatron.training.global_vars").get_args()


# What Megatron counts in its arguments; not all releases have all of them.
COUNTERS = ("curr_iteration", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


# ------------------------------------------------------------------- what a broken step leaves open, whatever comes


def bucket_groups(host: MegatronHost) -> None:
    """Handles of operations that no longer exist, and counts of a backward pass that did not end."""
    for group in _bucket_groups(host):
        group.grad_reduce_handle = None
        group.param_gather_handle = None
        group.param_gather_dispatched = False
        megatron_releases.forget_ready_gradients(group)
        group.is_last_microbatch = True
        if hasattr(group, "grad_reduce_finished"):
            group.grad_reduce_finished = False


def gradients(host: MegatronHost) -> None:
    """Half-accumulated gradients, in the buffers and in the optimizer."""
    for chunk in host.model:
        chunk.zero_grad_buffer()
    host.optimizer.zero_grad()


def forward_hooks(host: MegatronHost) -> None:
    """Overlapped parameter gather: `train` switches the hooks off when it begins and insists that they are on."""
    for chunk in host.model:
        if getattr(chunk, "use_forward_hook", False) and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()


def partials(host: MegatronHost) -> None:
    """Beside MindSpeed: before `train` takes these methods as callbacks."""
    mindspeed.forget_partials(host.model)


def callbacks(host: MegatronHost) -> None:
    """`train` installs these when it begins, and asserts that nobody has before."""
    config = _module("megatron.core.utils").get_model_config(host.model[0])
    config.no_sync_func = None
    config.grad_sync_func = None
    config.param_sync_func = None


def timers(_host: MegatronHost) -> None:
    """A timer that the broken step started refuses to be started again."""
    for timer in _module("megatron.training.global_vars").get_timers()._timers.values():
        timer._started = False


def expert_counts(host: MegatronHost) -> None:
    """What routers count up in a step: tokens of each expert, and what is logged of their losses."""
    config = _module("megatron.core.utils").get_model_config(host.model[0])
    if config.num_moe_experts:
        megatron_releases.forget_expert_counts(config, host.model)


# ------------------------------------------------------------------------------------------- the state of step S


def rerun_machine(host: MegatronHost, state: SmallState) -> None:
    """Megatron's own replay for wrong results: not running, at step S, and on (an evaluation switches it off)."""
    rerun = _module("megatron.core.rerun_state_machine")
    machine = rerun.get_rerun_state_machine()
    machine.state = rerun.RerunState.NOT_RUNNING_YET
    machine.current_iteration = state.step
    machine.rerun_requested = False
    machine.data_iterator_checkpoints = None
    if host.rerun_mode is not None:
        machine.set_mode(host.rerun_mode)


def random_states(_host: MegatronHost, state: SmallState) -> None:
    rng = state.rng
    random.setstate(rng["random_rng_state"])
    np.random.set_state(rng["np_rng_state"])
    torch.set_rng_state(rng["torch_rng_state"])
    torch.cuda.set_rng_state(rng["cuda_rng_state"])
    tracker = _module("megatron.core.tensor_parallel").get_cuda_rng_tracker()
    tracker.set_states({name: value.clone() for name, value in rng["rng_tracker_states"].items()})


def counters(host: MegatronHost, state: SmallState) -> None:
    """Set absolutely; `train` reads them when it begins again."""
    space = _args()
    space.iteration = state.step
    for key in COUNTERS:
        if key in state.counters:
            setattr(space, key, state.counters[key])
    space.num_floating_point_operations_so_far = state.flops
    host.batches().update_num_microbatches(space.consumed_train_samples, consistency_check=False)


def scheduler_options(host: MegatronHost, state: SmallState) -> None:
    """Bounds and lengths: a job that was resumed has them from its checkpoint, and not from its command line."""
    for name, value in state.scheduler.items():
        if name != "num_steps":
            setattr(host.scheduler, name, value)


def optimizer_scalars(host: MegatronHost, state: SmallState) -> None:
    """Loss scalers, and scheduler with the learning rates that it wrote into the optimizer."""
    host.scheduler.num_steps = state.scheduler["num_steps"]
    host.scheduler.step(increment=0)
    for scaler, saved in zip(host.scalers(), state.scalers, strict=True):
        if scaler is not None:
            scaler.load_state_dict(saved)


def buffers(host: MegatronHost, state: SmallState) -> None:
    """What a step changes of the model by itself, before its commit."""
    host.buffers.write(state.buffers)


def data(host: MegatronHost, _state: SmallState) -> None:
    """The batches of the broken step come again; what Megatron kept for its own replay is dropped."""
    for iterator in _data_iterators(host):
        iterator.saved_microbatches = []
        iterator.replaying = False
        iterator.replay_pos = 0
        if isinstance(iterator.iterable, ReplayIterator):
            iterator.iterable.rewind()


def validation_data(host: MegatronHost, step: int) -> bool:
    """An evaluation after step S that was interrupted is not repeated, but its batches are passed over: the next one
    reads what it would have read. True: some were, and what they draw was drawn."""
    behind = host.evaluated == step  # passed over before, or the data were made anew behind it
    host.evaluated, read = step, False
    for iterator in iterators(host.validation):
        given = iterator.iterable.given if isinstance(iterator.iterable, ReplayIterator) else 0
        for _ in range(0 if behind else host.evaluation_batches(step) - given):
            next(iterator.iterable)
            read = True
        iterator.saved_microbatches = []
        iterator.replaying = False
    return read


def begin_evaluation(host: MegatronHost, step: int) -> None:
    """Where a loader begins anew at its end (cyclic), the first batch of an evaluation may draw a number. The random
    states of the end of `step`, after its evaluation, are those after this draw, also for whoever gets them from this
    rank before it has read one. Where it cannot be read, a dump is worth more than one draw, and a rollback says so.
    """
    space = _args()
    draws = getattr(space, "full_validation", False) or space.dataloader_type == "cyclic"
    if not draws or host.evaluated == step or not host.evaluation_batches(step):
        return
    for iterator in iterators(host.validation):
        if isinstance(iterator.iterable, ReplayIterator) and not iterator.iterable.given:
            try:
                next(iterator.iterable)
            except Exception:
                log.warning(
                    "no batch of the evaluation after step %d can be read: random states are those before it",
                    step,
                    exc_info=True,
                )


def parameters(host: MegatronHost, _state: SmallState) -> None:
    """Own shard from the main parameters, the others' by a gather: a collective of all ranks, and the last rule.

    Always, because an interrupted gather may have torn them on any rank, and an overlapped one happens inside the
    next step.
    """
    with torch.no_grad():
        kinds = [megatron_kinds.of(optimizer) for optimizer in host.optimizers()]
        for kind, optimizer in zip(kinds, host.optimizers(), strict=True):
            kind.to_model(optimizer)
        for kind in dict.fromkeys(kinds):
            kind.gather(host.model)
    for group in _bucket_groups(host):
        group.param_gather_handle = None
        group.param_gather_dispatched = False


ABANDON: tuple[Callable[[MegatronHost], None], ...] = (
    bucket_groups,
    gradients,
    forward_hooks,
    partials,
    callbacks,
    timers,
    expert_counts,
)
PUT_BACK: tuple[Callable[[MegatronHost, SmallState], None], ...] = (
    rerun_machine,
    random_states,
    counters,
    optimizer_scalars,
    buffers,
    data,
    parameters,
)


def roll_back(host: MegatronHost, state: SmallState, again: bool) -> None:
    """Put everything to the end of `state.step`. The optimizer's shards are there already. `again`: this rank has begun
    the step after it, whose batches have to come once more, and has the evaluation after `state.step` behind itself."""
    if not again:
        mark_batches(host)
        if validation_data(host, state.step):
            state = replace(state, rng=host.rng())
    host.evaluated = state.step
    for abandon in ABANDON:
        abandon(host)
    for put_back in host.put_back:
        put_back(host, state)


def forget_first_times(host: MegatronHost) -> None:
    """What the first step of a process finds out and keeps: by an all-reduce whether there is a group of gradients to
    clip, and by counting when a bucket's gradients are complete, until when its reductions are not overlapped."""
    for optimizer in [host.optimizer, *host.optimizers()]:
        if hasattr(optimizer, "_has_grad_norm_group_cache"):
            optimizer._has_grad_norm_group_cache = None
    for group in _bucket_groups(host):
        if hasattr(group, "is_first_batch"):
            group.is_first_batch = True
            group.golden_per_param_grad_ready_counts = {}


# ------------------------------------------------------------------------------------------------ access


def _bucket_groups(host: MegatronHost) -> Iterator[Any]:
    """None in releases whose buckets are reset with the gradients."""
    for chunk in host.model:
        yield from getattr(chunk, "bucket_groups", ())
        yield from getattr(chunk, "expert_parallel_bucket_groups", ())


def iterators(found: Any) -> list[Any]:
    """Megatron gives one iterator, a list of them, or None on ranks that read no data."""
    several = found if isinstance(found, list) else [found]
    return [iterator for iterator in several if hasattr(iterator, "iterable")]


def _data_iterators(host: MegatronHost) -> list[Any]:
    return iterators(host.data)


def keep_batches(host: MegatronHost) -> None:
    """Put a replay iterator below Megatron's own, once; Megatron insists on the type of the outer one."""
    for iterator in [*_data_iterators(host), *iterators(host.validation)]:
        if not isinstance(iterator.iterable, ReplayIterator):
            iterator.iterable = ReplayIterator(iterator.iterable)


def mark_step(host: MegatronHost) -> None:
    """A step begins: what its predecessor read is done with, and so is the evaluation between them."""
    mark_batches(host)
    for iterator in iterators(host.validation):
        if isinstance(iterator.iterable, ReplayIterator):
            iterator.iterable.mark()


def mark_batches(host: MegatronHost) -> None:
    for iterator in _data_iterators(host):
        if isinstance(iterator.iterable, ReplayIterator):
            iterator.iterable.mark()
