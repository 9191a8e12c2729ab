"""megatron.core.optimizer.distrib_optimizer before 0.13: the gradient norm of several optimizer instances.

These releases sum the squares of gradients over the whole world. With N instances each gradient is there N times, so
the norm is sqrt(N) times what it is, gradients are clipped at 1/sqrt(N) of `--clip-grad`, and a job would train
differently only because it has replicas. Since 0.13 Megatron sums over the ranks of one instance; so do these patches,
with a process group of our own, as the old releases have none.

They are no part of fault tolerance: a run that has instances without the plugin needs them for the same numbers, and a
drill's unbroken run has them too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_tft.patches import megatron_layout
from mindspeed_tft.patches.groups import MENDED
from mindspeed_tft.registry import REGISTRY
from mindspeed_tft.replica.layout import instances

VERSIONS = ">=0.9,<0.13"  # before there were no instances
Arguments = tuple[Any, ...]

_group: Any = None  # of this rank: one instance, with all its model-parallel ranks


def _args() -> Any:
    return importlib.import_module("megatron.training.global_vars").get_args()


@REGISTRY.wrap(
    "megatron.training.initialize:_initialize_distributed",
    group=MENDED,
    versions=VERSIONS,
    elsewhere="skip",  # another release needs no mending
    order=-1,  # a part of Megatron's own start-up: within what protects it
)
def initialize_distributed(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Make the groups where Megatron makes all others: on all ranks, in one order."""
    global _group
    result = wrapped(*args, **kwargs)
    space = _args()
    number = space.num_distributed_optimizer_instances
    if number > 1:
        for ranks in instances(megatron_layout.sizes(space), number):
            group = torch.distributed.new_group(list(ranks))
            if space.rank in ranks:
                _group = group
    return result


@REGISTRY.wrap(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.get_grad_stats_parallel_group",
    group=MENDED,
    versions=VERSIONS,
    elsewhere="skip",
)
def get_grad_stats_parallel_group(
    wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]
) -> Any:
    """The ranks of one instance instead of the world. (Experts, of which there is one instance, are refused.)"""
    return _group if _group is not None else wrapped(*args, **kwargs)


def declare() -> None:
    """Importing this module declares; calling this says so where it is used."""
