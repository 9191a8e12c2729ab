"""Where a drill breaks a rank: one hook a phase of the step. Active only in a process that a drill told to break.

The hooks sit at the real places (inside the backward pass, before this rank's own reduce, in the middle of the local
update), so that the others are caught exactly where a real fault would catch them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tft import runtime
from mindspeed_tft.faults import inject
from mindspeed_tft.patches.groups import DRILL
from mindspeed_tft.registry import REGISTRY

Arguments = tuple[Any, ...]
OPTIMIZER = "megatron.core.optimizer.optimizer"


def _reach(phase: str) -> None:
    session = runtime.session()
    if session is not None and session.record.step > 0:
        inject.reach(phase, session.record.step)


@REGISTRY.wrap("megatron.training.training:train_step", group=DRILL)
def train_step(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """data, forward, backward: around the user's forward step, and inside the backward pass of its output."""
    forward_step = args[0]

    def forward_with_faults(*inner: Any, **named: Any) -> Any:
        _reach("data")
        output, loss = forward_step(*inner, **named)
        _reach("forward")
        if getattr(output, "requires_grad", False):
            output.register_hook(lambda _grad: _reach("backward"))
        return output, loss

    return wrapped(forward_with_faults, *args[1:], **kwargs)


@REGISTRY.wrap("megatron.core.distributed.finalize_model_grads:finalize_model_grads", group=DRILL)
def finalize_model_grads(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    _reach("grad-reduce")
    return wrapped(*args, **kwargs)


@REGISTRY.wrap(f"{OPTIMIZER}:ChainedOptimizer.get_grad_norm", group=DRILL)
def get_grad_norm(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    _reach("clip")
    return wrapped(*args, **kwargs)


@REGISTRY.wrap("mindspeed_tft.recovery.session:Session.commit", group=DRILL)
def commit(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    _reach("commit")
    return wrapped(*args, **kwargs)


@REGISTRY.wrap(f"{OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads", group=DRILL)
def local_update(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """update: break between two parameters of the inner optimizer, so that the shard is half new and half old."""
    session = runtime.session()
    if session is None or not inject.due("update", session.record.step):
        return wrapped(*args, **kwargs)
    inner = instance.optimizer
    step = inner.step

    def half_a_step(*inner_args: Any, **inner_kwargs: Any) -> Any:
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
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.start_param_sync_for_bucket_group_subset",
    group=DRILL,
    missing="skip",
)
def start_param_sync(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    _reach("param-gather")
    return wrapped(*args, **kwargs)


def declare() -> None:
    """Importing this module declares; calling this says so where it is used."""
