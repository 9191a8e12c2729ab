"""The groups that Megatron really builds, seen by every rank: torch's fake backend talks to nobody, so one process is
each rank of each layout in turn. Reads layouts as JSON, prints a JSON line for each."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import mindspeed_tft.on_cpu

mindspeed_tft.on_cpu.install_before_megatron()
from megatron.core import parallel_state  # noqa: E402


def ranks_of(group: Any) -> list[int]:
    return list(torch.distributed.get_process_group_ranks(group))


def seen_by(rank: int, world: int, layout: dict[str, Any]) -> dict[str, Any]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
    dense = f"tp{parallel_state.get_tensor_model_parallel_rank()}-pp{parallel_state.get_pipeline_model_parallel_rank()}"
    found = {
        "dense": [
            f"{dense}/dense",
            ranks_of(parallel_state.get_data_parallel_group(with_context_parallel=True)),
            ranks_of(parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)),
        ],
        "expert": [
            [
                parallel_state.get_expert_tensor_parallel_rank(),
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_expert_model_parallel_rank(),
            ],
            ranks_of(parallel_state.get_expert_data_parallel_group()),
            ranks_of(parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)),
        ],
    }
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return found


for case in json.loads(sys.stdin.read()):
    world, layout = case["world"], case["layout"]
    print("CASE", json.dumps([seen_by(rank, world, layout) for rank in range(world)]), flush=True)
