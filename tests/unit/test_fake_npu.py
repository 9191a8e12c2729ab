"""The torch_npu over CPU tensors has the habits of the real one that the drills on it rest on, and what a stop and a
regroup do on two ranks of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Processes

# Two ranks. Rank 1 does not come to the second all-reduce; rank 0 waits for it until its device is stopped.
PROGRAM = """
import os, sys, threading, time
import torch, torch_npu
import torch_npu.contrib.transfer_to_npu
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
assert dist.get_backend() == "hccl"
backend = dist.group.WORLD._get_backend(torch.device("cpu"))

def total():
    value = torch.full((2,), float(rank + 1))
    dist.all_reduce(value)
    return value.tolist()

def forced(call):
    try:
        call()
    except RuntimeError as exc:
        return str(exc).startswith("FORCE STOP")
    return False

store = dist.distributed_c10d._get_default_store()
assert total() == [3.0, 3.0]
if rank == 0:
    threading.Timer(0.3, lambda: torch_npu.npu.stop_device(0)).start()
    assert forced(total)  # the other one waits nowhere, and no connection breaks
else:
    store.get("stopped")
    assert torch_npu.npu.stop_device(0) == 0
assert forced(total) and forced(torch_npu.npu.synchronize)  # a stopped device does nothing any more
store.set("stopped", "1")
torch_npu.npu.restart_device(0)
torch_npu.npu.synchronize()
try:  # the communicators are gone until somebody rebuilds them
    total()
except RuntimeError as exc:
    assert "was ended and not rebuilt" in str(exc), exc
else:
    raise AssertionError("an ended communicator communicates")
torch_npu.distributed.reinit_process_group(group=None, rebuild_link=True)
store.add("met", 1)
while store.add("met", 0) < 2:
    time.sleep(0.01)
assert total() == [3.0, 3.0]
try:
    torch_npu.npu.check_uce_in_memory(0)
    raise AssertionError("it is refused")
except RuntimeError as exc:
    assert "refuses npu.check_uce_in_memory" in str(exc), exc
assert torch_npu.npu.check_uce_in_memory(0) == 2
dist.barrier()

# Now as a recovery does it: a group that outlives its communicator, and the platform.
from datetime import timedelta
from mindspeed_tft.faults.classify import classify
from mindspeed_tft.groups import CommunicationAborted, SwappableGroup
from mindspeed_tft.patches import torch_distributed as patched
from mindspeed_tft.platforms.npu import NpuPlatform
from mindspeed_tft.recovery.halt import Halt
from mindspeed_tft.registry import REGISTRY

platform = NpuPlatform()
platform.claim_device()
halt = Halt(platform.stop_device, platform.restart_device)
REGISTRY.activate("high-availability")
patched.swap_device_groups("hccl", lambda text: classify(text, "npu").kind == "stopped")
group = dist.new_group([0, 1], backend="nccl")
assert isinstance(group, SwappableGroup) and dist.get_backend(group) == "hccl"
group_of = {"all_reduce": lambda value: dist.all_reduce(value, group=group),
            "reduce_scatter": lambda value: dist.reduce_scatter_tensor(value[:1].clone(), value, group=group)}

def stop(epoch):
    patched.table().abort("test", epoch)
    halt.stop(epoch)

def recover(epoch, operation):
    if rank == 0:  # waits for the other one
        threading.Timer(0.2, stop, (epoch,)).start()
        try:
            group_of[operation](torch.ones(2))
        except CommunicationAborted as exc:
            assert "stopped (test)" in str(exc)
        else:
            raise AssertionError("it came out of nowhere")
        store.set(f"stopped {epoch}", "1")
    else:
        store.get(f"stopped {epoch}")
        stop(epoch)
    halt.restart(epoch, 5.0)
    before = group._inner
    patched.regroup(epoch, timedelta(seconds=10), mend=platform.rebuild_in_place)
    value = torch.full((2,), float(rank + 1))
    for name in group_of:
        group_of[name](value.clone())
    dist.all_reduce(value, group=group)
    assert value.tolist() == [3.0, 3.0]
    (dist.send if rank == 0 else dist.recv)(message := torch.full((2,), 7.0 if rank == 0 else 0.0), 1 - rank, group)
    assert message.tolist() == [7.0, 7.0]
    return group._inner is before

group_of["all_reduce"](torch.ones(2))
assert recover(1, "all_reduce")
assert recover(2, "reduce_scatter")
assert not recover(3, "all_reduce")  # rank 1 refuses: new communicators on both
assert recover(4, "all_reduce")
if rank == 1:
    group.drop()  # as a process that is new
    assert not recover(5, "all_reduce")
else:
    assert not recover(5, "all_reduce")
print("done", flush=True)
store.add("over", 1)
while store.add("over", 0) < 2:
    time.sleep(0.01)
os._exit(0)
"""


def test_two_ranks_on_the_fake(processes: Processes, root: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    common = {
        "PYTHONPATH": str(root / "tests" / "support" / "fake_torch_npu"),
        "FAKE_NPU_RECORD": str(tmp_path),
        "FAKE_NPU_REFUSE": "npu.check_uce_in_memory@0:1,npu.check_uce_in_memory@1:1,"
        "distributed.reinit_process_group@1:4",  # the third of a recovery
        "FAKE_NPU_DAMAGE": "2",
    }
    started = [
        processes.start([sys.executable, program, tmp_path], env={**common, "RANK": str(rank)}) for rank in (0, 1)
    ]
    for process in started:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and output.rstrip().endswith("done"), output
    for rank in (0, 1):
        lines = (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()
        calls = [json.loads(line)["call"] for line in lines]
        recovery = ["npu.stop_device", "npu.restart_device", "distributed.reinit_process_group"]
        last = recovery if rank == 0 else recovery[:2]  # a process that is new has nothing that could be mended
        assert [call for call in calls if call != "op"] == [
            "start",
            *recovery, "npu.check_uce_in_memory", "npu.check_uce_in_memory", *recovery * 4, *last,
        ]  # fmt: skip
        assert "op" in calls  # the tensor of an all-reduce on a stopped device is seen
