"""Process groups on the backend of a device: swappable like those on gloo, and mended by the device where it can."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Processes

# One rank; the "device" is a plugin of torch over gloo, as torch_npu's is one over hccl.
PROGRAM = """
import logging, os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from mindspeed_tft.groups import CommunicationAborted, SwappableGroup
from mindspeed_tft.patches import torch_distributed as patched
from mindspeed_tft.registry import REGISTRY

logging.basicConfig(stream=sys.stdout)
made = []

def create(options, wanted):
    made.append((options.group_id, wanted))
    return ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)

try:
    patched.swap_device_groups("toy", str)
except RuntimeError as exc:
    assert "torch knows no backend toy" in str(exc)
else:
    raise AssertionError("it was not registered yet")
dist.Backend.register_backend("toy", create, extended_api=True, devices=["cpu"])
REGISTRY.activate("high-availability")
patched.swap_device_groups("toy", lambda text: "HALTED" in text)
dist.init_process_group("toy", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
world, own = dist.group.WORLD, dist.new_group([0], backend="toy", pg_options="wish")
gloo = dist.new_group([0], backend="gloo")
assert isinstance(world, SwappableGroup) and isinstance(own, SwappableGroup)
assert (dist.get_backend(), dist.get_backend_config(own), dist.get_backend(gloo)) == ("toy", "cpu:toy", "gloo")
assert [wish for _, wish in made] == [None, "wish"]
dist.all_reduce(torch.ones(2), group=own)
table = patched.table()
assert table.device_groups() == [world, own]

def backends():
    return [group._inner for group in (world, own, gloo)]

def regroup(epoch, mend):
    before = backends()
    table.abort("test", epoch)
    try:
        dist.all_reduce(torch.ones(2), group=own)
    except CommunicationAborted as exc:
        assert "stopped (test)" in str(exc)
    patched.regroup(epoch, timedelta(seconds=5), mend=mend)
    total = torch.ones(2)
    dist.all_reduce(total, group=own)
    assert total.tolist() == [1, 1]
    return [old is new for old, new in zip(before, backends())]

asked = []
assert regroup(1, lambda group: asked.append(group) or True) == [True, True, False]
assert asked == [world, own]  # those on gloo are always built anew
assert regroup(2, lambda group: group is world) == [False, False, False]

def refuses(group):
    raise RuntimeError("no")

assert regroup(3, refuses) == [False, False, False]
assert [wish for _, wish in made] == [None, "wish"] * 3

# Errors of the device arrive as they are, also after a stop; only that it was stopped is no error of this rank.
class Failing:
    def __init__(self, text):
        self.text = text
    def __getattr__(self, name):
        raise RuntimeError(self.text)

kept, own._inner = own._inner, Failing("UCE ERROR")
for text, kind in (("UCE ERROR", RuntimeError), ("HALTED", CommunicationAborted)):
    own._inner.text = text
    try:
        own.guarded(lambda: own._inner.allreduce)
    except RuntimeError as exc:
        assert type(exc) is kind, (text, exc)
own._inner = kept
own.break_link("SUSPECT REMOTE ERROR")
try:
    dist.all_reduce(torch.ones(2), group=own)
except RuntimeError as exc:
    assert type(exc) is RuntimeError and str(exc) == "SUSPECT REMOTE ERROR"
assert regroup(4, lambda group: True) == [True, True, False]
print("done")
"""


def test_groups_of_a_device(processes: Processes, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    output = processes.run([sys.executable, program, tmp_path], timeout=60)
    assert output.rstrip().endswith("done")
    assert "the device does not mend group" in output  # epoch 2
    assert "(RuntimeError: no); all groups of the device are built anew" in output  # epoch 3
