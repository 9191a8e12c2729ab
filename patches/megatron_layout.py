"""How Megatron lays a job out: its arguments as `replica.layout.Sizes`, and the host of each rank."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_tft.replica.layout import Sizes, data_parallel_lists

_LONGEST = 64  # bytes of a host name on Linux


def sizes(space: Any) -> Sizes:
    """From Megatron's arguments, which need not be validated yet."""
    return Sizes(
        world=space.world_size,
        tensor=space.tensor_model_parallel_size or 1,
        pipeline=space.pipeline_model_parallel_size or 1,
        context=space.context_parallel_size or 1,
        experts=(space.expert_model_parallel_size or 1) if space.num_experts else 0,
        expert_tensor=getattr(space, "expert_tensor_parallel_size", None) or 0,
        data_last=bool(getattr(space, "use_tp_pp_dp_mapping", False)),
    )


def replicas(space: Any, wanted: int) -> int | None:
    """Holders of each shard; None: without the distributed optimizer all ranks of a data-parallel list are."""
    return wanted if space.use_distributed_optimizer else None


def job(space: Any, wanted: int) -> dict[str, str]:
    """The job in the words of `tftctl drill`, for who reads an incident: layout, dtype, replicas ("" without the
    distributed optimizer), sharded ("yes" or "no")."""
    lengths = sizes(space)
    data = lengths.world // (lengths.tensor * lengths.pipeline * lengths.context)
    axes = {"tp": lengths.tensor, "pp": lengths.pipeline, "cp": lengths.context, "ep": lengths.experts, "dp": data}
    number = replicas(space, wanted)
    return {
        "layout": "".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "dp1",
        "dtype": "bf16" if space.bf16 else "fp16" if space.fp16 else "fp32",
        "replicas": "" if number is None else str(number),
        "sharded": "no" if number is None else "yes",
    }


def copies(space: Any) -> dict[str, int]:
    """Ranks of a data-parallel list, for "dense" and, where there are experts, "expert"."""
    return {name.rpartition("/")[2]: len(ranks) for name, ranks in data_parallel_lists(sizes(space)).items()}


def parameters(model: list[Any]) -> dict[str, int]:
    """How many parameters of either kind this rank has."""
    found: dict[str, int] = {}
    for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
        kind = "dense" if getattr(parameter, "allreduce", True) else "expert"  # as Megatron's own wrapper tells them
        found[kind] = found.get(kind, 0) + parameter.numel()
    return found


def hosts(mine: str) -> list[str]:
    """The host name of each rank: a collective of all, each with its own."""
    padded = mine.encode()[:_LONGEST].ljust(_LONGEST, b"\0")
    word = torch.tensor(list(padded), dtype=torch.uint8, device=torch.cuda.current_device())
    every = [torch.empty_like(word) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(every, word)
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in every]
