"""megatron.training of core_r0.6.0: what of its start-up and of its loop differs from newer releases.

Protection begins with the host of this release; data iterators get the outer iterator that newer releases have, so that
batches can come again; and the end of a step, which no function marks, is where the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_tft import runtime
from mindspeed_tft.patches import megatron_rerun, megatron_training
from mindspeed_tft.patches.groups import HA_06
from mindspeed_tft.patches.megatron_06_host import MegatronHost06
from mindspeed_tft.recovery.session import WrongNumbers
from mindspeed_tft.registry import REGISTRY

MODULE = "megatron.training.training"
Arguments = tuple[Any, ...]

_train: Arguments = ()  # the arguments of Megatron's `train`, while it runs


@REGISTRY.wrap("megatron.training.initialize:_initialize_distributed", **HA_06)
def initialize_distributed(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    runtime.protect(MegatronHost06(runtime.platform(), regroup_seconds=runtime.regroup_seconds()))
    return result


class Batches:
    """Around an iterator of Megatron, which reads from this one: what it reads can be put back (`recovery.replay`)."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.iterable)


@REGISTRY.wrap(f"{MODULE}:build_train_valid_test_data_iterators", **HA_06)
def build_data_iterators(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return tuple(None if found is None else Batches(found) for found in wrapped(*args, **kwargs))


@REGISTRY.wrap(f"{MODULE}:train", order=1, **HA_06)
def train(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    global _train
    _train = args
    return wrapped(*args, **kwargs)


@REGISTRY.wrap(f"{MODULE}:train_step", order=1, **HA_06)
def train_step(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """The step before this one has ended, with its evaluation and its periodic checkpoint: where operators have
    training wait. After the last step nobody waits."""
    session = runtime.session()
    if session is not None:
        host, step = session.host, session.record.step
        assert isinstance(host, MegatronHost06)
        session.boundary.reach(
            step,
            lambda: host.save_now(step, _train),
            leaves=False,
            look=lambda: megatron_training.look_for_signal(session),
        )
    return wrapped(*args, **kwargs)


@REGISTRY.wrap("megatron.core.distributed.param_and_grad_buffer:Bucket.start_grad_sync", order=1, **HA_06)
def start_grad_sync(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Megatron looks for wrong numbers before it reduces gradients: as `megatron_rerun` for newer releases."""
    if megatron_rerun.repairs() is None:
        return wrapped(*args, **kwargs)
    try:
        return wrapped(*args, **kwargs)
    except AssertionError as exc:
        if "NaN" in str(exc):
            raise WrongNumbers(str(exc), mine=True) from exc
        raise
