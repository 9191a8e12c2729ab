"""The torch_npu over CPU tensors has the habits of the real one that the drills on it rest on."""

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
os._exit(0)
"""


def test_habits_of_the_fake(processes: Processes, root: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    common = {
        "PYTHONPATH": str(root / "tests" / "support" / "fake_torch_npu"),
        "FAKE_NPU_RECORD": str(tmp_path),
        "FAKE_NPU_REFUSE": "npu.check_uce_in_memory@0:1,npu.check_uce_in_memory@1:1",
        "FAKE_NPU_DAMAGE": "2",
    }
    started = [
        processes.start([sys.executable, program, tmp_path], env={**common, "RANK": str(rank)}) for rank in (0, 1)
    ]
    for process in started:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
    for rank in (0, 1):
        lines = (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()
        calls = [json.loads(line)["call"] for line in lines]
        assert [call for call in calls if call != "op"] == [
            "npu.stop_device", "npu.restart_device", "distributed.reinit_process_group",
            "npu.check_uce_in_memory", "npu.check_uce_in_memory",
        ]  # fmt: skip
        assert "op" in calls  # the tensor of an all-reduce on a stopped device is seen
