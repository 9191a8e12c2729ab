"""The distributed optimizer of Megatron core_r0.6.0, as `megatron_kinds` wants it: its update is no function of its
own, its gather belongs to it, and its file has one tensor a bucket, padding included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_tft.patches import megatron_06_replicas, megatron_kinds
from mindspeed_tft.patches.megatron_kinds import Shard, buckets, state_keys
from mindspeed_tft.recovery import files


class Distributed06(megatron_kinds.Distributed):
    """A shard is what it is in newer releases."""

    def complete(self, optimizer: Any, shards: Sequence[Shard | None]) -> dict[Any, Any]:
        own = self.take(optimizer) if None in shards else {}
        state = assemble(optimizer, [own if shard is None else shard for shard in shards])
        copy_to_model(optimizer, state)
        return state

    @torch.no_grad()
    def update(self, optimizer: Any) -> None:
        optimizer.optimizer.step()
        optimizer._copy_main_params_to_model_params()
        optimizer.update_successful = True  # what was updated has to be gathered

    def gather(self, model: Sequence[Any]) -> None:
        for buffer in (buffer for chunk in model for buffer in chunk.buffers):
            mine = megatron_06_replicas.instance()
            group = buffer.data_parallel_group if mine is None else mine.ranks
            for bucket in buffer.buckets:
                own = torch.chunk(bucket.param_data, group.size())[group.rank()]
                torch.distributed.all_gather_into_tensor(bucket.param_data, own, group=group)


def assemble(optimizer: Any, shards: list[Shard]) -> dict[Any, Any]:
    """The content of `distrib_optim.pt` from the shards of all ranks of an instance, in rank order: per buffer, dtype
    and key one float32 tensor a bucket, which begins as the bucket does and ends with its padding.

    Raises:
        DumpError: the shards do not make up the buckets of this optimizer.
    """
    state: dict[Any, Any] = {
        "per_bucket_numel": optimizer.per_bucket_numel,
        "per_bucket_numel_unpadded": optimizer.per_bucket_numel_unpadded,
    }
    for buffer_index, dtype, bucket_index, _ in buckets(optimizer):
        world = state.setdefault(buffer_index, {}).setdefault(dtype, {})
        numel = optimizer.buffers[buffer_index].buckets[bucket_index].grad_data.numel()
        for key in ("param", *state_keys(optimizer)):
            whole = torch.cat([shard[f"{buffer_index}/{bucket_index}/{key}"] for shard in shards])
            if whole.numel() != numel:
                raise files.DumpError(f"bucket {bucket_index} has {numel} elements, its shards {whole.numel()}")
            world.setdefault(key, []).append(whole)
    return state


@torch.no_grad()
def copy_to_model(optimizer: Any, state: dict[Any, Any]) -> None:
    """As `megatron_kinds.copy_to_model`."""
    for buffer_index, buffer in enumerate(optimizer.buffers):
        dtype = next(iter(optimizer.gbuf_ranges[buffer_index]))
        for parameter, (begin, end, bucket_index) in buffer.param_index_map.items():
            offset = buffer.buckets[bucket_index].offset
            main = state[buffer_index][dtype]["param"][bucket_index]
            parameter.data.copy_(main[begin - offset : end - offset].view(parameter.shape))


DISTRIBUTED = Distributed06()
