"""megatron.core.optimizer.distrib_optimizer: `--dist-ckpt-optim-fully-reshardable` where buckets have gaps behind them.

Megatron gathers the state of the optimizer without the gaps between buckets, and then looks for each parameter at its
place in the buffer, gaps included. From the second bucket on it saves the states of other parameters, and zeros at the
end; nothing fails. A job that goes on from such a checkpoint, or goes back to it, is not where it was. These patches
have what was gathered lie where it is looked for. Reading is right.

They are no part of fault tolerance, but no checkpoint is exact without them, and a drill's unbroken run has them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_tft.patches.groups import MENDED
from mindspeed_tft.registry import REGISTRY

VERSIONS = ">=0.17,<0.20"  # of the supported ones; 0.12 does not have this layout
GATHER = "get_parameter_state_dp_zero"
Arguments = tuple[Any, ...]


@REGISTRY.wrap(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
    group=MENDED,
    versions=VERSIONS,
    elsewhere="skip",
)
def sharded_param_state(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """While Megatron lays the state out, its gathering answers with the gaps in place."""
    before, gather = (
        vars(instance).get(GATHER),
        getattr(instance, GATHER),
    )  # a dump has it answered by what it assembled

    def with_gaps(*of_gather: Any, **options: Any) -> Any:
        state = gather(*of_gather, **options)
        return None if state is None else spread(instance.buffers, state)  # None: not gathered on this rank

    setattr(instance, GATHER, with_gaps)
    try:
        return wrapped(*args, **kwargs)
    finally:
        if before is None:
            delattr(instance, GATHER)
        else:
            setattr(instance, GATHER, before)


def spread(buffers: list[Any], gathered: dict[Any, Any]) -> dict[Any, Any]:
    """`gathered` (by buffer and dtype: flat fp32 tensors, bucket behind bucket) with each bucket at its place in the
    buffer, zeros in the gaps."""
    result = dict(gathered)
    for buffer_index, buffer in enumerate(buffers):
        size = max(bucket.offset + bucket.numel_unpadded for bucket in buffer.buckets)
        of_buffer = {}
        for dtype, tensors in gathered[buffer_index].items():
            of_buffer[dtype] = dict(tensors)
            for key, packed in tensors.items():
                if not torch.is_tensor(packed):
                    continue
                placed = torch.zeros(size, dtype=packed.dtype)
                start = 0
                for bucket in buffer.buckets:
                    placed[bucket.offset : bucket.offset + bucket.numel_unpadded] = packed[
                        start : start + bucket.numel_unpadded
                    ]
                    start += bucket.numel_unpadded
                of_buffer[dtype][key] = placed
        result[buffer_index] = of_buffer
    return result


def declare() -> None:
    """Importing this module declares; calling this says so where it is used."""
