"""megatron.core of core_r0.6.0: optimizer replicas, which this release does not know.

Newer releases divide the data-parallel list into N instances of their distributed optimizer. Here the same is laid over
the stock one: of a list of d ranks the first d/N are one instance, the next d/N another, and shard i of each bucket is
held by the positions i, i + d/N, ... What a rank holds is N times what it has in a stock run: the N neighbouring
stock shards from i N on.

Every byte is that of a stock run without replicas:

- Gradients are reduced by Megatron's own reduce-scatter over all d ranks. Then the owners of stock shards give them to
  the holders, in one all-to-all. So sums are formed in the order in which a stock run forms them. Traffic is
  1 + (N-1)/d times the gradient size, (N/d) of it needed once more in memory while it lasts.
- The norm of gradients is that of the stock shards: each rank adds what it reduced itself, and nothing counts twice.
- Parameters are gathered within an instance.
- The first instance saves, in the layout that a stock run writes: buckets are whole in either.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from mindspeed_tft import runtime
from mindspeed_tft.patches import megatron_layout
from mindspeed_tft.patches.groups import HA_06
from mindspeed_tft.registry import REGISTRY
from mindspeed_tft.replica.layout import data_parallel_lists

STATE = "megatron.core.parallel_state"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
Arguments = tuple[Any, ...]


class Instance(NamedTuple):
    """The instance of the distributed optimizer that this rank is in."""

    number: int  # among those of the data-parallel list
    copies: int  # instances of that list, which is the number of holders of a shard
    ranks: Any  # its process group
    gloo: Any  # another one, for checkpoints

    def whole(self) -> Any:
        """The process group of the whole data-parallel list."""
        return _mpu().get_data_parallel_group(with_context_parallel=True)


_mine: Instance | None = None


def _mpu() -> Any:
    return importlib.import_module(STATE)


def _args() -> Any:
    return importlib.import_module("megatron.training.global_vars").get_args()


def instance() -> Instance | None:
    """None: there are no replicas, or the optimizer is not sharded."""
    return _mine


@REGISTRY.wrap(f"{STATE}:initialize_model_parallel", **HA_06)
def initialize_model_parallel(
    wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]
) -> Any:
    """Every rank makes the groups of all instances, in one order."""
    global _mine
    result = wrapped(*args, **kwargs)
    settings, space = runtime.settings(), _args()
    _mine = None
    if settings is None or not space.use_distributed_optimizer or settings.replicas == 1:
        return result
    timeout, me = timedelta(minutes=space.distributed_timeout_minutes), torch.distributed.get_rank()
    for ranks in data_parallel_lists(megatron_layout.sizes(space)).values():
        length = len(ranks) // settings.replicas
        for number in range(settings.replicas):
            part = ranks[number * length : (number + 1) * length]
            group = torch.distributed.new_group(part, timeout=timeout)
            gloo = torch.distributed.new_group(part, timeout=timeout, backend="gloo")
            if me in part:
                _mine = Instance(number, settings.replicas, group, gloo)
                _check(ranks, _mine)
    return result


def _check(ranks: tuple[int, ...], mine: Instance) -> None:
    found = tuple(torch.distributed.get_process_group_ranks(mine.whole()))
    if found != ranks:
        raise RuntimeError(
            f"Megatron's data-parallel list is {found}, and not {ranks}: optimizer replicas cannot be made"
        )


# ------------------------------------------------------------------------------------------------ what a rank holds

_as_stock = False  # ranges are asked for as a run without replicas has them


class _InInstance:
    """A gradient buffer whose data-parallel group is this rank's instance."""

    def __init__(self, buffer: Any, group: Any) -> None:
        self._buffer = buffer
        self.data_parallel_group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)


@REGISTRY.wrap(f"{OPTIMIZER}._build_model_gbuf_range", **HA_06)
def build_model_gbuf_range(wrapped: Callable[..., Any], _cls: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """The slice of a bucket that this rank owns."""
    if _mine is None or _as_stock:
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    buffer = next(iter(call.arguments))
    call.arguments[buffer] = _InInstance(call.arguments[buffer], _mine.ranks)
    return wrapped(*call.args, **call.kwargs)


class Slice(NamedTuple):
    """Elements of a parameter whose gradient this rank has reduced."""

    parameter: Any
    begin: int
    end: int

    def gradient(self) -> torch.Tensor:
        """fp32, flat; where gradients are fp32 it lies in the gradient buffer."""
        flat: torch.Tensor = self.parameter.main_grad.view(-1)[self.begin : self.end]
        return flat.float()


@REGISTRY.wrap(f"{OPTIMIZER}.__init__", **HA_06)
def make(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    if _mine is None:
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.arguments["data_parallel_group"] = _mine.ranks
    call.arguments["data_parallel_group_gloo"] = _mine.gloo
    groups = [list(group["params"]) for group in call.arguments["optimizer"].param_groups]  # before they are shards
    wrapped(*call.args, **call.kwargs)
    instance.tft_stock = _stock_slices(instance, groups)
    instance.tft_unscaled = None
    return None


def _stock_slices(optimizer: Any, groups: list[list[Any]]) -> list[Slice]:
    """What a run without replicas would own here, in the order in which its optimizer has it: by groups, and in each
    those of fp32 parameters first."""
    global _as_stock
    _as_stock = True
    try:
        ranges = [optimizer._build_gbuf_range_map(buffer) for buffer in optimizer.buffers]
    finally:
        _as_stock = False
    number = {parameter: place for place, group in enumerate(groups) for parameter in group}
    found = [
        (
            number[parameter],
            parameter.dtype != torch.float32,
            Slice(parameter, where["param"].start, where["param"].end),
        )
        for of_buffer in ranges
        for of_dtype in of_buffer.values()
        for of_bucket in of_dtype
        for parameter, where in of_bucket["param_map"].items()
    ]
    return [each for *_, each in sorted(found, key=lambda entry: entry[:2])]  # the sort is stable


# ------------------------------------------------------------------------------------------------ gradients


@REGISTRY.wrap("megatron.core.distributed.param_and_grad_buffer:Bucket.start_grad_sync", **HA_06)
def start_grad_sync(wrapped: Callable[..., Any], bucket: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    if _mine is None or not bucket.use_distributed_optimizer:
        return result
    if bucket.communication_handle is None:
        give_to_holders(bucket.grad_data, _mine, bucket.data_parallel_group)
    else:
        bucket.communication_handle = _ThenGive(bucket, _mine, bucket.communication_handle)
    return result


class _ThenGive:
    """In the place of the handle of a reduce-scatter. Megatron waits for the buckets in one order on all ranks."""

    def __init__(self, bucket: Any, mine: Instance, handle: Any) -> None:
        self._bucket, self._mine, self._handle = bucket, mine, handle

    def wait(self) -> None:
        self._handle.wait()
        give_to_holders(self._bucket.grad_data, self._mine, self._bucket.data_parallel_group)


def give_to_holders(gradients: torch.Tensor, mine: Instance, whole: Any) -> None:
    """A bucket of which each rank of `whole` has reduced one slice of d: from it to one of which each rank has the
    slice of d/N that it holds. `gradients`: the bucket, flat, any dtype; written in place. A collective."""
    size = whole.size()
    length, shards, me = gradients.numel() // size, size // mine.copies, whole.rank()
    own = gradients[me * length : (me + 1) * length]
    first = me % shards * mine.copies  # of the stock shards that this rank holds
    held = gradients[first * length : (first + mine.copies) * length]
    gives = [length if rank % shards == me // mine.copies else 0 for rank in range(size)]
    takes = [length if first <= rank < first + mine.copies else 0 for rank in range(size)]
    torch.distributed.all_to_all_single(held, own.repeat(mine.copies), takes, gives, group=whole)


# ------------------------------------------------------------------------------------------------ norm


def _counted(optimizer: Any) -> Iterator[bool]:
    """Of each stock slice, whether Megatron counts it into the norm."""
    not_shared = importlib.import_module("megatron.core.transformer.module").param_is_not_shared
    first = importlib.import_module("megatron.core.tensor_parallel").param_is_not_tensor_parallel_duplicate
    for each in optimizer.tft_stock:
        yield not_shared(each.parameter) and first(each.parameter)


@REGISTRY.wrap(f"{OPTIMIZER}.get_main_grads_for_grad_norm", **HA_06)
def gradients_for_norm(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    if _mine is None:
        return wrapped(*args, **kwargs)
    found, instance.tft_unscaled = instance.tft_unscaled, None
    if found is None:
        found = [each.gradient() for each in instance.tft_stock]
    return [gradient for gradient, counts in zip(found, _counted(instance), strict=True) if counts]


@REGISTRY.wrap(f"{OPTIMIZER}._collect_main_grad_data_for_unscaling", **HA_06)
def gradients_to_unscale(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """They are unscaled in place, where they may lie twice: what the norm is taken of is copied before."""
    result = wrapped(*args, **kwargs)
    if _mine is None:
        return result
    instance.tft_unscaled = [each.gradient().clone() for each in instance.tft_stock]
    return [*result, *instance.tft_unscaled]


# ------------------------------------------------------------------------------------------------ checkpoints


@REGISTRY.wrap(f"{OPTIMIZER}.save_parameter_state", **HA_06)
def save_parameter_state(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """One instance has it all."""
    return wrapped(*args, **kwargs) if _mine is None or _mine.number == 0 else None
