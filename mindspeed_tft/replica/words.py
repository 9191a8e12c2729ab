"""What a job says at start-up about its replicas: who holds what, what it costs, what one host can take away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mindspeed_tft.replica import holders
from mindspeed_tft.replica.holders import Precision
from mindspeed_tft.replica.hosts import WANTED, Finding

_NAMED = 64  # data-parallel ranks of which each shard is named


def replicas(copies: Mapping[str, int], number: int | None, precision: Precision) -> Iterator[str]:
    """Who holds what, with the bytes that it takes by the formula.

    Args:
        copies: size of the data-parallel lists by kind, "dense" and "expert".
        number: holders of each shard; None: all ranks of a list, which is not sharded.
    """
    if number == 1:
        yield f"no replicas ({holders.WITHOUT}): a destroyed shard is read from the last periodic checkpoint, online"
    for kind, size in copies.items():
        of, n = " of experts" if kind == "expert" else "", number or size
        plain = f"; without replicas {holders.bytes_per_parameter_plain(precision, size):g}" if number != 1 else ""
        if number != 1:
            yield f"N = {n} replicas{of} over {size} data-parallel ranks: {_who(number, size)}"
        yield (
            f"memory{of}: {holders.formula(precision)} = {holders.bytes_per_parameter(precision, n, size):g} bytes a"
            f" parameter ({precision.value}){plain}"
        )


def _who(number: int | None, size: int) -> str:
    if number is None:
        return "without --use-distributed-optimizer each holds everything"
    if size > _NAMED:
        return "shard i on positions i, i + d/N, i + 2d/N, ..."
    return "; ".join(f"shard {i} on positions {held}" for i, held in enumerate(holders.holders(size, number)))


def measured(
    total: int, parameters: Mapping[str, int], copies: Mapping[str, int], number: int | None, precision: Precision
) -> str:
    """The bytes of rank 0 beside the formula.

    Args:
        parameters: of rank 0 by kind. `copies` and `number` are as for `replicas`.
    """
    count = sum(parameters.values())
    wanted = sum(
        of_kind * holders.bytes_per_parameter(precision, number or copies[kind], copies[kind])
        for kind, of_kind in parameters.items()
    )
    return (
        f"memory measured on rank 0: {total} bytes for {count} parameters = {total / count:.3f} bytes a parameter"
        f" (formula {wanted / count:g}; buckets are padded)"
    )


def hosts(found: Finding | None) -> str:
    """A line about the hosts of the holders; `found` as `hosts.judge` gives it."""
    if found is None:
        return "hosts: no host holds all replicas of a shard"
    if found.alone:
        return f"hosts: {found.reason}; to survive that, {found.remedy}"
    return f"*** hosts: {found.reason}. Remedy: {found.remedy}. {WANTED} makes this an error. ***"
