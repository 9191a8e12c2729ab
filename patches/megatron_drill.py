"""Where a drill breaks a rank: one hook a phase of the step, or of a repair. Active only in a process that a drill
told to break.

The hooks sit at the real places (inside the backward pass, before this rank's own reduce, in the middle of the local
update), so that the others are caught exactly where a real fault would catch them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_tft import platforms, runtime
from mindspeed_tft.faults import inject
from mindspeed_tft.faults.classify import LINK_ERROR
from mindspeed_tft.faults.spec import REPAIR_PHASES
from mindspeed_tft.patches import megatron_kinds, megatron_shards, torch_distributed
from mindspeed_tft.patches.groups import DRILL, DRILL_06, DRILL_NEW
from mindspeed_tft.registry import REGISTRY

Arguments = tuple[Any, ...]
OPTIMIZER = "megatron.core.optimizer.optimizer"
_HASH_LIMIT = 10.0  # seconds
_TOO_MUCH = 1 << 60  # bytes: more than an address space has, so that no memory is taken on the way to the error


def _reach(phase: str) -> bool:
    """True: the gradient that passes here has to be corrupted."""
    session = runtime.session()
    return session is not None and session.record.step > 0 and inject.reach(phase, session.record.step)


def _backward(gradient: torch.Tensor) -> torch.Tensor | None:
    """Of the output of a micro-batch; what is returned flows back in its place."""
    return gradient * float("nan") if _reach("backward") else None


@REGISTRY.wrap("megatron.training.training:train_step", group=DRILL)
def train_step(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """data, forward, backward: around the user's forward step, and inside the backward pass of its output."""
    forward_step = args[0]

    def forward_with_faults(*inner: Any, **named: Any) -> Any:
        _reach("data")
        output, loss = forward_step(*inner, **named)
        _reach("forward")
        if getattr(output, "requires_grad", False):
            output.register_hook(_backward)
        return output, loss

    return wrapped(forward_with_faults, *args[1:], **kwargs)


@REGISTRY.wrap("mindspeed_tft.recovery.session:Session.step_begin", group=DRILL)
def step_begin(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    inject.begin(args[0])
    return wrapped(*args, **kwargs)


@REGISTRY.wrap("mindspeed_tft.recovery.session:Session._action", group=DRILL)
def action(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """regroup, repair, rollback: when this rank begins to carry out such an order. Its payload names S; what broke is
    the step after it, or S itself where that could be finished, which is one less than what is asked here."""
    kind, payload = args
    if kind.value in REPAIR_PHASES:
        inject.reach(kind.value, int(payload["step"]) + 1)
    return wrapped(*args, **kwargs)


@REGISTRY.wrap("megatron.core.distributed.finalize_model_grads:finalize_model_grads", group=DRILL)
def finalize_model_grads(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    _reach("grad-reduce")
    return wrapped(*args, **kwargs)


@REGISTRY.wrap(f"{OPTIMIZER}:ChainedOptimizer.get_grad_norm", **DRILL_NEW)
@REGISTRY.wrap(f"{OPTIMIZER}:MegatronOptimizer.clip_grad_norm", **DRILL_06)
def get_grad_norm(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    _reach("clip")
    return wrapped(*args, **kwargs)


@REGISTRY.wrap("mindspeed_tft.recovery.session:Session.commit", group=DRILL)
def commit(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    _reach("commit")
    return wrapped(*args, **kwargs)


@REGISTRY.wrap(f"{OPTIMIZER}:FP32Optimizer.step_with_ready_grads", **DRILL_NEW)
def fp32_local_update(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return _local_update(wrapped, instance, args, kwargs)


@REGISTRY.wrap(f"{OPTIMIZER}:MixedPrecisionOptimizer.step", order=1, **DRILL_06)  # where it is one function
@REGISTRY.wrap(f"{OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads", **DRILL_NEW)
def local_update(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return _local_update(wrapped, instance, args, kwargs)


def _local_update(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """update: break between two parameters of the inner optimizer, so that the shard is half new and half old."""
    session = runtime.session()
    if session is None or not inject.due("update", session.record.step):
        return wrapped(*args, **kwargs)
    inner = instance.optimizer
    step = inner.step

    def half_a_step(*inner_args: Any, **inner_kwargs: Any) -> Any:
        if not inject.breaks_off("update", session.record.step):
            _reach("update")  # training goes on after it: half an update would pass for a whole one
            return step(*inner_args, **inner_kwargs)
        for group in inner.param_groups:
            whole, group["params"] = group["params"], group["params"][: max(1, len(group["params"]) // 2)]
            try:
                step(*inner_args, **inner_kwargs)
            finally:
                group["params"] = whole
            break
        _reach("update")
        return None

    inner.step = half_a_step
    try:
        return wrapped(*args, **kwargs)
    finally:
        del inner.step


@REGISTRY.wrap(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._reset_metadata_and_sync_gather_all_model_params",
    **DRILL_06,
)
@REGISTRY.wrap(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.start_param_sync_for_bucket_group_subset",
    group=DRILL,
    versions=">=0.18",
    elsewhere="skip",
)
def start_param_sync(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    _reach("param-gather")
    return wrapped(*args, **kwargs)


@REGISTRY.wrap(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.start_param_sync",
    group=DRILL,
    versions=">=0.12,<0.18",
    elsewhere="skip",
)
def start_param_sync_of_model(
    wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]
) -> Any:
    """Until 0.18 the optimizer gathers the parameters of its whole model. A forced gather is not that of a step."""
    if not kwargs.get("force_sync"):
        _reach("param-gather")
    return wrapped(*args, **kwargs)


@REGISTRY.wrap("megatron.training.training:save_checkpoint_and_time", group=DRILL)
def save(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    _reach("save")
    return wrapped(*args, **kwargs)


@REGISTRY.wrap("megatron.training.training:evaluate", group=DRILL)
def evaluate(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """eval: inside the first forward pass of an evaluation, when the model is in its other mode."""
    forward_step = args[0]

    def forward_with_faults(*inner: Any, **named: Any) -> Any:
        _reach("eval")
        return forward_step(*inner, **named)

    return wrapped(forward_with_faults, *args[1:], **kwargs)


# ------------------------------------------------------------------------------------ what a fault does to a rank


def _damage() -> str:
    """Fill the memory of this rank's model and optimizer with 0xFF: NaN in every floating type."""
    session = runtime.session()
    if session is None:
        return "nothing is destroyed: there is no model yet"
    found = megatron_shards.state_tensors(session.host.model, session.host.optimizers())
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in found}
    count = 0
    for tensor in storages.values():
        storage = tensor.untyped_storage()
        # A view of its own: autograd must not notice, as it does not notice a defect of the memory.
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(0xFF)
        count += storage.nbytes()
    return f"{count} bytes of {len(storages)} storages destroyed"


def _exhaust() -> None:
    """An honest out-of-memory error, in the words and of the type that this device's allocator has for it."""
    device = runtime.platform().device_type
    torch.empty(_TOO_MUCH, dtype=torch.uint8, device=device)


def _cut() -> str:
    table = torch_distributed.table()
    for group in table.device_groups():
        group.break_link(f"{LINK_ERROR[_platform()]} (drill)")
    if not len(table):
        raise RuntimeError("drill: there is no connection that could be cut: only those of gloo are known")
    broken = f", {len(table.device_groups())} groups of the device broken" if table.device_groups() else ""
    return f"{table.cut()} connections cut{broken}"  # none, where a stop has just cut them all


def _flip(chance: random.Random) -> str:
    """Of a number that is not zero, and one of its lower bits: nothing overflows, no rounding takes it away again."""
    session = runtime.session()
    if session is None:
        raise RuntimeError("drill: there is no session, so no shard either")
    if not session.stamps.settle(_HASH_LIMIT):
        raise RuntimeError(f"drill: the hashes of the shards were not taken within {_HASH_LIMIT:g} s")
    mine = (each for one in session.host.optimizers() for each in megatron_kinds.of(one).in_place(one))
    tensors = [each for each in mine if each.count_nonzero()]
    number = chance.randrange(len(tensors))
    words = tensors[number].view(-1).view(torch.int32)
    place, bit = chance.choice(words.nonzero().flatten().tolist()), 8 + chance.randrange(8)
    words[place] = int(words[place]) ^ (1 << bit)
    hashed = "hashes are known" if session.stamps.known else "no hash is known"
    return f"bit {bit} of word {place} of {words.numel()} in tensor {number} of {len(tensors)} flipped; {hashed}"


def _platform() -> str:
    settings = runtime.settings()
    return platforms.select(settings.tft_platform if settings is not None else "auto").name


def declare() -> None:
    """Importing this module declares; calling this provides what the faults need."""
    inject.register(inject.Hooks(_platform(), _damage, _cut, _exhaust, _flip))
