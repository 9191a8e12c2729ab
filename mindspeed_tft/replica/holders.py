"""Who holds which optimizer shard, and what that costs. Arithmetic only.

In a data-parallel list of size d with N replicas there are d / N shards; shard i is held by the positions
i, i + d/N, i + 2d/N, ... This module knows no ranks, no groups and no tensors.
"""

from __future__ import annotations

from enum import Enum

FLAG = "--optimizer-replica-num"
WITHOUT = "--distributed-optimizer-no-replica"  # N = 1


class Precision(str, Enum):
    """What decides the bytes of a parameter: the types of parameters and gradients in device memory."""

    GRADS_16 = "16-bit parameters and gradients"
    GRADS_32 = "16-bit parameters, fp32 gradients"
    FP32 = "fp32 parameters and gradients"


# (bytes on every rank, bytes shared by the d / N ranks of one optimizer instance)
_BYTES = {Precision.GRADS_16: (4, 16), Precision.GRADS_32: (6, 12), Precision.FP32: (8, 8)}


def shard_count(d: int, n: int) -> int:
    """Number of shards in a data-parallel list of size `d` with `n` holders of each.

    Raises:
        ValueError: `n` replicas of equal shards are not possible on `d` ranks.
    """
    if n < 1:
        raise ValueError(f"{FLAG} {n}: a shard needs a holder; set it to 2 or more, or use {WITHOUT}")
    if n > d:
        raise ValueError(
            f"{FLAG} {n}: more replicas than the {d} data-parallel rank(s); lower it or use more data-parallel ranks"
        )
    if d % n:
        fitting = [k for k in range(2, d + 1) if d % k == 0]
        raise ValueError(f"{FLAG} {n}: does not divide the data-parallel size {d}; possible values are {fitting}")
    return d // n


def holders(d: int, n: int) -> list[list[int]]:
    """For each shard the positions in the data-parallel list that hold it."""
    count = shard_count(d, n)
    return [list(range(shard, d, count)) for shard in range(count)]


def shard_of(position: int, d: int, n: int) -> int:
    """The shard that the rank at `position` holds."""
    if not 0 <= position < d:
        raise ValueError(f"position {position} is outside a data-parallel list of size {d}")
    return position % shard_count(d, n)


def bytes_per_parameter(precision: Precision, n: int, d: int) -> float:
    """Device bytes a parameter costs on one rank, with `n` replicas on `d` data-parallel ranks.

    An optimizer instance spans d / n ranks, so what it shards costs n / d of its size on each.

    - 16-bit gradients, 4 + 16n/d: parameter 2 and gradient 2 everywhere; sharded: fp32 main parameter 4, fp32 main
      gradient 4 (the 16-bit gradient is cast for the update), two fp32 moments 8.
    - fp32 gradients, 6 + 12n/d: parameter 2 and gradient 4 everywhere; sharded: fp32 main parameter 4, moments 8. The
      main gradient is a view of the gradient buffer.
    - fp32 training, 8 + 8n/d: parameter 4 and gradient 4 everywhere; sharded: moments 8. The main parameter is a view
      of the model parameter, the main gradient one of the gradient buffer.
    """
    shard_count(d, n)
    everywhere, sharded = _BYTES[precision]
    return everywhere + sharded * n / d


def bytes_per_parameter_plain(precision: Precision, d: int) -> float:
    """Device bytes of a parameter with one copy of the optimizer state over `d` data-parallel ranks."""
    everywhere, sharded = _BYTES[precision]
    return everywhere + sharded / d


def formula(precision: Precision) -> str:
    """The formula behind `bytes_per_parameter`, for a start-up line."""
    everywhere, sharded = _BYTES[precision]
    return f"{everywhere} + {sharded}N/d"
