"""One of four data-parallel ranks with two replicas, each with random states of its own.

    partners_rank.py RANK WORLD PORT

All give each other their states. Rank 2 forgets what it knew and is told by rank 0, its partner; rank 0 makes the list
for a checkpoint from what it knows and what rank 1 leaves in a file. Each says the next number that it draws, and the
next numbers of those whose states it knows.
"""

from __future__ import annotations

import json
import random
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from mindspeed_tft.patches import megatron_random, megatron_releases
from mindspeed_tft.patches.megatron_random import Partners
from mindspeed_tft.recovery import random_states

STEP = 7


class Mpu:
    """The groups that Megatron makes for these ranks."""

    def __init__(self, world: int) -> None:
        pairs = [dist.new_group([first, first + world // 2]) for first in range(world // 2)]
        self._partners = pairs[dist.get_rank() % len(pairs)]

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_inter_distributed_optimizer_instance_group(self, check_initialized: bool = True) -> Any:
        return self._partners


def states() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
    }


def next_of(found: dict[str, Any]) -> float:
    generator = random.Random()
    generator.setstate(found["random_rng_state"])
    return generator.random()


def known(partners: Partners) -> dict[int, float]:
    book = random_states.in_tensors(partners.to_tensors(), STEP)
    return {rank: next_of(random_states.from_bytes(found)) for rank, found in book.items()}


def main() -> None:
    rank, world, port = map(int, sys.argv[1:])
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mpu = Mpu(world)
    megatron_random._mpu = megatron_releases._mpu = lambda: mpu
    random.seed(100 + rank)
    partners = Partners(states, sharded=True)
    partners.give(STEP)
    said: dict[str, Any] = {"next": next_of(states()), "knows": known(partners)}
    if rank == 0:
        partners.send(2)
    elif rank == 2:
        partners = Partners(states, sharded=True)
        partners.receive(0)
        said["told"] = known(partners)
    beside: list[Any] = [None] * world
    dist.all_gather_object(beside, partners.to_tensors())
    if rank == 0:
        said["whole"] = [next_of(found) for found in partners.of_all(STEP, states(), [beside[1]])]
    dist.barrier()
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
