"""Go back to a checkpoint inside a running Megatron: all ranks load it, and the data starts where it stood then.

Used where the state of the last completed step cannot be had any more (a shard without a holder) or must not be used
(numbers that went wrong on every rank). What is loaded is what a new job would load, by Megatron's own code; here is
what a new job has for free: nothing counted yet, nothing half done, and iterators that nobody has read from.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_tft.patches import megatron_releases, megatron_rollback, megatron_shards
from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.record import SmallState
from mindspeed_tft.recovery.replay import ReplayIterator

if TYPE_CHECKING:
    from mindspeed_tft.patches.megatron_host import MegatronHost


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _args() -> Any:
    return _module("megatron.training.global_vars").get_args()


class Loaders:
    """The data loaders of this rank: from them the iterators are made anew. Empty: this rank reads no such data."""

    def __init__(self) -> None:
        self.train: list[Any] = []
        self.validation: list[Any] = []

    def add(self, train: Any, validation: Any) -> None:
        """Megatron builds them once for each stage of this rank, and none (None) where that stage reads no data. Of
        validation it has a list of loaders, or before 0.14 a single one."""
        several = validation if isinstance(validation, (list, tuple)) else [validation]
        self.train += [train] if train is not None else []
        self.validation += [loader for loader in several if loader is not None]


def why_not(host: MegatronHost) -> str:
    """Why this rank's data cannot be put back to an earlier step; "" when it can."""
    space = _args()
    if getattr(space, "dataloader_type", None) == "external":
        return "--dataloader-type external: only its owner knows how to put the data back to an earlier step"
    if getattr(space, "phase_transition_iterations", None):
        return "--phase-transition-iterations: the data of a phase is not put back to an earlier step in this version"
    if getattr(space, "multiple_validation_sets", False):
        return "--multiple-validation-sets: their positions are not put back in this version"
    if host.loaders is None or len(host.loaders.train) != len(megatron_rollback.iterators(host.data)):
        return "the training data does not come from Megatron's own data loader"
    return ""


def rewind(host: MegatronHost, step: int, base: Path) -> None:
    """Load the checkpoint of `step` below `base`; a collective of all ranks, over new process groups.

    Raises:
        DumpError: it cannot be loaded, or is not the one that was asked for.
    """
    for rule in megatron_rollback.ABANDON:
        rule(host)
    host.since = -host.lowest(-host.since)  # a newcomer, which loaded nothing when it started, says 0
    _point_to(host, step, base)
    _load(host, step, base)
    if step == host.since:
        _count_as_at_a_start(_args())
    loaded = host.rng()  # making an iterator draws a number: only then is the state of the checkpoint put back
    _data(host, step)
    state = host.small_state(step)
    state.rng.update(loaded)
    for put_back in host.put_back:
        if put_back in _AFTER_LOAD:
            put_back(host, state)


# What loading does not do.
_AFTER_LOAD = (megatron_rollback.rerun_machine, megatron_rollback.random_states, megatron_rollback.parameters)


def take_place(host: MegatronHost, state: SmallState) -> None:
    """Put a newcomer, whose optimizer shards are those of `state.step` already, to the end of that step."""
    for rule in megatron_rollback.ABANDON:
        rule(host)
    megatron_rollback.counters(host, state)
    host.since = state.counters["since"]
    _data(host, state.step)
    for put_back in host.put_back:
        put_back(host, state)


def _point_to(host: MegatronHost, step: int, base: Path) -> None:
    """Megatron reads the optimizer's file from the step that the tracker names, and so will a job that is started later
    on: checkpoints after `step` must not be found first."""
    tracker = host.tracker(base)
    if torch.distributed.get_rank() == 0 and tracker.read_text(encoding="utf-8").strip() != str(step):
        files.write_text(tracker, str(step))
    torch.distributed.barrier()


def _load(host: MegatronHost, step: int, base: Path) -> None:
    space = _args()
    _forget_counts(host)
    for key in megatron_rollback.COUNTERS:
        if key in host.counters(step):
            setattr(space, key, 0)
    host.scheduler.num_steps = 0  # loading adds to it
    unlike = torch.default_generator.manual_seed(_NO_SEED).get_state()
    try:
        with _as_a_resume(space, base):
            found, flops = _module("megatron.training.checkpointing").load_checkpoint(
                host.model, host.optimizer, host.scheduler
            )
    except SystemExit as exc:  # how Megatron ends a job that finds something missing in a checkpoint
        raise files.DumpError(f"Megatron gave up loading the checkpoint of step {step} in {base}") from exc
    if found != step:
        raise files.DumpError(f"asked for the checkpoint of step {step}, but step {found} was loaded from {base}")
    if torch.equal(torch.get_rng_state(), unlike):
        raise files.DumpError(
            f"the checkpoint of step {step} in {base} was loaded without its random states: it was saved without them,"
            " or by a job of other parallel sizes"
        )
    space.iteration, space.curr_iteration = step, step - 1
    space.num_floating_point_operations_so_far = flops
    host.set_flops(float(flops))


_NO_SEED = 0x7F7_7F7_7F7  # so that it is seen whether random states are loaded: Megatron only prints that they are not


def _count_as_at_a_start(space: Any) -> None:
    """Where a checkpoint has no counts of samples, Megatron works them out when it builds its loaders: as if the job
    that saved it had had the flags of this one."""
    if space.consumed_train_samples == 0:
        space.consumed_train_samples = space.iteration * space.global_batch_size
    if space.consumed_valid_samples == 0 and space.train_samples is None and space.eval_interval:
        without = (getattr(space, "start_eval_at_iter", None) or 0) // space.eval_interval
        evaluations = max(0, space.iteration // space.eval_interval - without)
        samples = getattr(space, "eval_global_batch_size", space.global_batch_size)
        space.consumed_valid_samples = evaluations * space.eval_iters * samples


def _forget_counts(host: MegatronHost) -> None:
    """Before it reads a distributed checkpoint, Megatron insists that all optimizers and groups have counted the same
    number of updates. A broken update leaves them apart; what is loaded overwrites them."""
    for optimizer in host.optimizers():
        if optimizer is None:
            continue
        for group in optimizer.optimizer.param_groups:
            if "step" in group:
                megatron_shards.set_step(group, 0)
        for state in optimizer.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"].zero_()


# What the command line may say about the first load, and what it has to say for one in the middle of training.
_RESUME = {
    "finetune": False,
    "no_load_optim": False,
    "no_load_rng": False,
    "ckpt_step": None,
    "pretrained_checkpoint": None,
    "override_ckpt_iteration": None,
    "non_persistent_ckpt_type": None,
    "non_persistent_global_ckpt_dir": None,
}


@contextmanager
def _as_a_resume(space: Any, base: Path) -> Iterator[None]:
    wanted = {**{name: value for name, value in _RESUME.items() if hasattr(space, name)}, "load": str(base)}
    before = {name: getattr(space, name) for name in wanted}
    vars(space).update(wanted)
    try:
        yield
    finally:
        vars(space).update(before)


def _data(host: MegatronHost, step: int) -> None:
    """New iterators that begin at the samples which had been consumed at the end of `step`, its evaluation included.

    Making an iterator draws a number, and the draws of the run so far are in the random states that are put back
    afterwards. Only where this run has not read a batch yet, the draw is still to come.
    """
    space, loaders = _args(), host.loaders
    if reason := why_not(host):
        raise files.DumpError(reason)
    consumed = 0 if getattr(space, "full_validation", False) else space.consumed_valid_samples
    kind = "cyclic" if getattr(space, "full_validation", False) else space.dataloader_type
    assert loaders is not None
    for iterator, loader in zip(megatron_rollback.iterators(host.data), loaders.train, strict=True):
        _begin(iterator, loader, space.consumed_train_samples, space.dataloader_type, step > host.since)
    for iterator, loader in zip(megatron_rollback.iterators(host.validation), loaders.validation, strict=True):
        _begin(iterator, loader, consumed, kind, host.has_evaluated(step))
    host.evaluated = step


def _begin(iterator: Any, loader: Any, consumed: int, kind: str, read: bool) -> None:
    """Put a new source below Megatron's own iterator, which training holds on to. `read`: this run has read of it."""
    over = kind != "cyclic" and consumed >= len(loader.dataset)  # of which Megatron makes no loader any more
    fresh = () if over else megatron_releases.build_data_loader(loader.dataset, consumed)
    iterator.iterable = ReplayIterator(_again_and_again(fresh, read) if kind == "cyclic" else iter(fresh))
    iterator.saved_microbatches = []
    iterator.replaying = False
    iterator.replay_pos = 0


def _again_and_again(loader: Iterable[Any], read: bool) -> Iterator[Any]:
    """As Megatron's `cyclic_iter`, whose first pass begins with the first batch; here it begins now if `read`."""
    first = iter(loader) if read else loader

    def batches() -> Iterator[Any]:
        yield from first
        while True:
            yield from loader

    return batches()
