"""megatron.core.optimizer.optimizer: the commit point and the stamps of the update.

`step_with_ready_grads` of the mixed-precision or the fp32 optimizer is the local update of one optimizer of the chain:
gradients are reduced, unscaled and clipped before it, and the distributed optimizer gathers parameters after it. The
first one in a step is preceded by the commit; a step that ends without an update (overflow, norm above the threshold,
no trainable parameter on this rank) commits at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tft import runtime
from mindspeed_tft.engine.types import Commit
from mindspeed_tft.patches.groups import HA
from mindspeed_tft.registry import REGISTRY

MODULE = "megatron.core.optimizer.optimizer"
Arguments = tuple[Any, ...]


def _step(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    session = runtime.session()
    result = wrapped(*args, **kwargs)
    if session is not None and instance is session.host.optimizer and session.record.commit is Commit.NONE:
        session.commit(skipped=True)
    return result


@REGISTRY.wrap(f"{MODULE}:ChainedOptimizer.step", **HA)
def chained_step(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return _step(wrapped, instance, args, kwargs)


@REGISTRY.wrap(f"{MODULE}:MixedPrecisionOptimizer.step", **HA)
def mixed_precision_step(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return _step(wrapped, instance, args, kwargs)


@REGISTRY.wrap(f"{MODULE}:FP32Optimizer.step", **HA)
def fp32_step(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return _step(wrapped, instance, args, kwargs)


@REGISTRY.wrap(f"{MODULE}:FP32Optimizer.step_with_ready_grads", **HA)
def fp32_local_update(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return _local_update(wrapped, instance, args, kwargs)


@REGISTRY.wrap(f"{MODULE}:MixedPrecisionOptimizer.step_with_ready_grads", **HA)
def local_update(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return _local_update(wrapped, instance, args, kwargs)


def _local_update(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    session = runtime.session()
    if session is None:
        return wrapped(*args, **kwargs)
    index = next((i for i, optimizer in enumerate(session.host.optimizers()) if optimizer is instance), None)
    if index is None:
        return wrapped(*args, **kwargs)  # an optimizer outside the training loop
    if session.record.commit is Commit.NONE:
        runtime.window().begins()
        session.commit()
    session.update_begin(index)
    result = wrapped(*args, **kwargs)
    session.host.update_ends()
    session.update_end(index)
    return result
