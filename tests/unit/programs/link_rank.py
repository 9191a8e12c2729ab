"""One rank of test_link_processes.py: moves its groups when a line on its standard input says so, and answers with JSON
lines. Arguments: rank, world size, address and port of the job's store."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_tft.patches import torch_distributed, torch_links
from mindspeed_tft.patches.groups import HIGH_AVAILABILITY
from mindspeed_tft.registry import REGISTRY

RANK, WORLD, ADDRESS, PORT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
LIMIT = timedelta(seconds=60)


def answer(event: str, **data: Any) -> None:
    print(json.dumps({"event": event, "rank": RANK, **data}), flush=True)


def do_move(link: str, epoch: str, seconds: str) -> None:
    """Link "-" is the default one."""
    count = torch_distributed.move(link.strip("-"), int(epoch), timedelta(seconds=float(seconds)))
    answer("moved", groups=count)


def do_try(seconds: str) -> None:
    tested = torch_links.try_groups(timedelta(seconds=float(seconds)))
    answer("tried", groups=tested.groups, bytes=tested.bytes)


def do_work(numbers: str) -> None:
    """Training's share: gradients of all, and of the pairs."""
    for group in [None, *groups]:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            mine = torch.full((int(numbers),), float(RANK + 1))
            dist.all_reduce(mine, group=group)
            assert mine.unique().item() == sum(rank + 1 for rank in dist.get_process_group_ranks(group))
    answer("worked")


REGISTRY.activate(HIGH_AVAILABILITY)
store = dist.TCPStore(ADDRESS, PORT, is_master=RANK == 0, wait_for_workers=False, timeout=LIMIT)
dist.init_process_group("gloo", rank=RANK, world_size=WORLD, store=store, timeout=LIMIT)
groups: list[Any] = [dist.new_group([RANK], timeout=LIMIT) if WORLD == 1 else dist.new_group([0, 1], timeout=LIMIT)]
answer("ready")
for line in sys.stdin:
    word, *rest = line.split()
    try:
        {"move": do_move, "try": do_try, "work": do_work}[word](*rest)
    except (AssertionError, RuntimeError) as exc:
        answer("failed", kind=type(exc).__name__, text=str(exc)[:500])
