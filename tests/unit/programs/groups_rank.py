"""One rank of test_groups.py: every operation that Megatron uses, then blocked in one while a peer is killed."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import _coalescing_manager

from mindspeed_tft.groups import CommunicationAborted, SwappableGroup
from mindspeed_tft.patches import torch_distributed
from mindspeed_tft.patches.groups import HIGH_AVAILABILITY
from mindspeed_tft.registry import REGISTRY

speaking = threading.Lock()


def say(word: str, **data: object) -> None:
    """A whole line, also while the other thread speaks."""
    with speaking:
        print(f"{word} {json.dumps(data)}", flush=True)


REGISTRY.activate(HIGH_AVAILABILITY)
rank, world, store_path, blocked_in, victim = (
    int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]),
)  # fmt: skip
store = dist.FileStore(store_path, world)
dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=datetime.timedelta(seconds=60))
half = dist.new_group([0, 1])
everyone = dist.new_group(list(range(world)), backend="gloo")


def operations() -> list[object]:
    """The results of each operation, as plain values, to be compared with the expected ones."""
    found: list[object] = [dist.get_backend(), dist.get_backend(everyone), type(everyone).__name__]
    total = torch.ones(3) * rank
    dist.all_reduce(total)
    gathered = torch.empty(world * 2)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)), group=everyone)
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, torch.arange(2.0 * world))
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    swapped = torch.empty(world)
    dist.all_to_all_single(swapped, torch.full((world,), float(rank)))
    shared = torch.full((2,), float(rank))
    dist.broadcast(shared, 2)
    coalesced = [torch.empty(world), torch.empty(world)]
    with _coalescing_manager(everyone, async_ops=True) as manager:
        for out in coalesced:
            dist.all_gather_into_tensor(out, torch.tensor([float(rank)]), group=everyone)
    manager.wait()
    received = torch.empty(2)
    for work in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]):  # fmt: skip
        work.wait()
    dist.barrier(group=everyone)
    if rank < 2:
        dist.barrier(group=half)
    tensors = [total, gathered, scattered, swapped, shared, *coalesced, received]
    return found + [tensor.tolist() for tensor in tensors] + objects


assert isinstance(c10d._get_default_group(), SwappableGroup)
say("RESULT", rank=rank, values=operations())
dist.barrier()
if rank == victim:
    os.kill(os.getpid(), signal.SIGKILL)


def watch() -> None:
    """The control plane's part: told through the store file's neighbour, abort from a thread of its own."""
    end = time.monotonic() + 30
    while not os.path.exists(store_path + ".abort") and time.monotonic() < end:
        time.sleep(0.01)
    told = time.monotonic()
    torch_distributed.table().abort("test", 1)
    say("ABORTED", rank=rank, seconds=time.monotonic() - told)
    done.wait(10)
    say("FREE", rank=rank, seconds=time.monotonic() - told)
    os._exit(0 if done.is_set() else 1)


done = threading.Event()
threading.Thread(target=watch, daemon=True).start()
say("BLOCKING", rank=rank)
try:
    if blocked_in == "recv":
        dist.recv(torch.empty(1), (rank + 1) % world)
    elif blocked_in == "reduce_scatter":
        dist.reduce_scatter_tensor(torch.empty(1000), torch.ones(1000 * world))
    else:
        with _coalescing_manager(everyone):
            for _ in range(2):
                dist.all_gather_into_tensor(torch.empty(1000 * world), torch.ones(1000), group=everyone)
    print("NOT ABORTED", flush=True)
    os._exit(3)
except CommunicationAborted as exc:
    say("CAUGHT", rank=rank, text=str(exc))
    try:
        dist.all_reduce(torch.ones(1))
        print("NOT CLOSED", flush=True)
        os._exit(4)
    except CommunicationAborted:
        pass
    done.set()
    threading.Event().wait(20)  # the watcher ends this process
