"""What format torch_dist looks like in Megatron 0.12, where that differs: see `megatron_torch_dist`.

All that is not sharded lies in a file of its own. The optimizer has two sharding types. `fully_sharded_model_space`
(the default) has a tensor for each parameter and moment, cut like the parameter, and each piece cut flat over the
data-parallel ranks; stored is a tensor of the pieces, each flat. A part written by one rank has its pieces uncut.
`dp_zero_gather_scatter` (--no-ckpt-fully-parallel-save) is the state of format torch, as one object.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_tft.patches import megatron_releases, megatron_rollback

if TYPE_CHECKING:
    from mindspeed_tft.patches.megatron_host import MegatronHost

VERSIONS = "<0.13"

# Keys of the optimizer's state in its own layout: written once for all ranks of a part.
_OF_A_GROUP = "optimizer.distributed.dp_group_idx_"


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _mapping() -> Any:
    return _module("megatron.core.dist_checkpointing.mapping")


@megatron_releases.sharded_content.on(VERSIONS)
def content(host: MegatronHost, space: Any, step: int, rng: Any, rerun: Any) -> dict[str, Any]:
    checkpointing = _module("megatron.training.checkpointing")
    sharding = {}
    if space.use_distributed_optimizer:
        parallel = space.ckpt_fully_parallel_save
        sharding["sharding_type"] = "fully_sharded_model_space" if parallel else "dp_zero_gather_scatter"
    found: dict[str, Any] = checkpointing.generate_state_dict(
        space,
        checkpointing.unwrap_model(host.model),
        host.optimizer,
        host.scheduler,
        rng,
        iteration=step,
        optim_sd_kwargs=sharding,
        rerun_state=rerun,
    )
    return found


@megatron_releases.sharded_rerun_state.on(VERSIONS)
def rerun_state(host: MegatronHost) -> dict[str, Any]:
    """The first data-parallel rank saves it, and this rank speaks for it."""
    found: dict[str, Any] = megatron_releases.rerun_state(megatron_rollback.iterators(host.data), "torch_dist")
    return {**found, "sharded": dataclasses.replace(found["sharded"], replica_id=0)}


@megatron_releases.common_file.on(VERSIONS)
def common_file() -> str:
    return str(_module("megatron.core.dist_checkpointing.strategies.common").COMMON_STATE_FNAME)


@megatron_releases.describe_format.on(VERSIONS)
def describe_format(core: Any) -> str:
    return json.dumps(dataclasses.asdict(core.CheckpointingConfig("torch_dist", 1)))


@megatron_releases.copy_number.on(VERSIONS)
def copy_number(item: Any) -> Any:
    """Megatron's last number says which data-parallel rank has it, or which instance."""
    if _OF_A_GROUP in item.key:
        return 0
    return item.replica_id if isinstance(item.replica_id, int) else (*item.replica_id[:-1], 0)


@megatron_releases.whole_of_a_part.on(VERSIONS)
def answers(optimizer: Any, assembled: dict[Any, Any]) -> dict[str, Callable[..., Any]]:
    """By the name of the optimizer's method that is asked."""
    return {
        "sharded_param_state_fs_model_space": lambda model, *_args: _by_parameter(optimizer, assembled, model),
        "sharded_param_state_dp_zero": lambda *_args: _mapping().ShardedObject(
            f"{_OF_A_GROUP}{optimizer.data_parallel_group_idx}.param_state", assembled, (1,), (0,)
        ),
    }


def _by_parameter(optimizer: Any, assembled: dict[Any, Any], model: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """For each parameter its main parameter and moments, described like the parameter itself, and flat."""
    described, _ = _module("megatron.core.dist_checkpointing.utils").extract_sharded_tensors_and_factories(model)
    nested_values = _module("megatron.core.dist_checkpointing.dict_utils").nested_values
    of_parameter = {item.data: item for item in nested_values(described)}
    found: dict[int, dict[str, Any]] = {}
    for buffer_index, buffer in enumerate(optimizer.buffers):
        for tensors in assembled[buffer_index].values():
            starts: dict[int, int] = {}
            total = 0
            for number, bucket in enumerate(buffer.buckets):
                starts[number] = total - bucket.offset
                total += bucket.numel_unpadded
            for parameter, (begin, end, bucket_id) in buffer.param_index_map.items():
                place = slice(begin + starts[bucket_id], end + starts[bucket_id])
                found[len(found)] = {
                    name: _like(of_parameter[parameter], name, tensors[key][place])
                    for key, name in (("param", "fp32_param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))
                }
    return found


def _like(described: Any, name: str, data: torch.Tensor) -> Any:
    replaced = {
        "key": f"optimizer.state.{name}.{described.key}",
        "data": data,
        "dtype": data.dtype,
        "flattened_range": slice(0, data.numel()),
        "replica_id": (*described.replica_id[:2], 0),
    }
    if isinstance(described, _mapping().ShardedTensorFactory):
        del replaced["dtype"]
    return dataclasses.replace(described, **replaced)


def flattened(item: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) under which a flat piece of a tensor is stored: one axis for each of the whole, counted in
    pieces, and one for the elements of a piece."""
    local = 1
    for size in item.local_shape:
        local *= size
    return (*item.axis_fragmentations, local), (*item.local_chunk_offset_in_global(), item.flattened_range.start)
