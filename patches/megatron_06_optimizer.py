"""megatron.core.optimizer.optimizer of core_r0.6.0: the commit point and the stamps of the update.

As `megatron_optimizer`, where a step is one function: between the clipping of gradients and the copy to the model's
parameters lies a call of the inner optimizer. It is preceded by the commit there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tft import runtime
from mindspeed_tft.engine.types import Commit
from mindspeed_tft.patches.groups import HA_06
from mindspeed_tft.registry import REGISTRY

MODULE = "megatron.core.optimizer.optimizer"


@REGISTRY.wrap(f"{MODULE}:MixedPrecisionOptimizer.step", **HA_06)
def step(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A step that ends without an update (overflow) commits at its end."""
    session = runtime.session()
    if session is None or instance is not session.host.optimizer:
        return wrapped(*args, **kwargs)
    inner = instance.optimizer
    own, update, begun = "step" in vars(inner), inner.step, False

    def committed(*inner_args: Any, **inner_kwargs: Any) -> Any:
        nonlocal begun
        runtime.window().begins()
        session.commit()
        session.update_begin(0)
        begun = True
        return update(*inner_args, **inner_kwargs)

    inner.step = committed
    try:
        result = wrapped(*args, **kwargs)
    finally:
        del inner.step
        if own:  # somebody had put one there
            inner.step = update
    if begun:
        session.host.update_ends()
        session.update_end(0)
    elif session.record.commit is Commit.NONE:
        session.commit(skipped=True)
    return result
