"""Bytes on real Megatron: what a rank with replicas takes, beside the formula, counted by storage."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from mindspeed_tft.faults import inject, jobs, plans
from mindspeed_tft.faults.spec import parse_layout
from mindspeed_tft.replica.holders import Precision, bytes_per_parameter

pytestmark = pytest.mark.megatron
PROGRAMS = Path(__file__).parent / "programs"
# So large that the padding of buckets, which the formula leaves out, is lost in it.
MODEL = ("--hidden-size", "256", "--ffn-hidden-size", "1024", "--num-layers", "3", "--vocab-size", "1023")
WITHIN = 0.01
FLAGS = {
    Precision.GRADS_16: ("--bf16", "--grad-reduce-in-bf16"),
    Precision.GRADS_32: ("--bf16",),
    Precision.FP32: (),
}
full = pytest.mark.full


def run(directory: Path, program: str, precision: Precision, replicas: int, fault: str = "") -> jobs.Ended:
    """Train a larger model than a drill's on four data-parallel ranks, each of which is `program`."""
    plan = plans.Plan(
        layout=parse_layout("dp4"), faults=(), replicas=replicas, steps=3, extra=(*MODEL, *FLAGS[precision])
    )
    flags = (*plans.plugin_flags(plan), "--save", str(directory / "save"), "--save-interval", "100")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d")
    place = ("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    command = (sys.executable, *launcher, *place, str(PROGRAMS / program), *flags)
    environ = {"TFT_TEST_BYTES": str(directory), inject.ENV_FAULTS: fault}
    return jobs.run(jobs.Job("bytes", (command,), directory / "bytes.log", 150, environ))


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        (Precision.GRADS_16, 2),
        pytest.param(Precision.GRADS_16, 4, marks=full),
        pytest.param(Precision.GRADS_32, 2, marks=full),
        pytest.param(Precision.GRADS_32, 4, marks=full),
        pytest.param(Precision.FP32, 2, marks=full),
    ],
)
def test_a_rank_takes_the_bytes_of_the_formula(tmp_path: Path, precision: Precision, replicas: int) -> None:
    ended = run(tmp_path, "bytes_rank.py", precision, replicas)
    assert (ended.returncode, ended.leftover) == (0, ()), ended.tail(60)
    wanted = bytes_per_parameter(precision, replicas, 4)
    log = ended.log.read_text()
    told = re.search(r"memory measured on rank 0: (\d+) bytes .* \(formula ([\d.]+);", log)
    assert told is not None, log
    for rank in range(4):
        weighed = json.loads((tmp_path / f"rank{rank}.json").read_text())
        numel, everything = weighed.pop("numel"), weighed.pop("everything")
        total = sum(weighed.values())
        assert numel > 2_000_000
        assert total / numel == pytest.approx(wanted, rel=WITHIN), weighed
        assert everything / numel == pytest.approx(wanted, rel=WITHIN), weighed  # nothing else lies there
        if rank == 0:  # what is printed leaves nothing out
            assert (int(told[1]), float(told[2])) == (total, wanted)


@full
@pytest.mark.parametrize("precision", [Precision.GRADS_16, Precision.FP32])
def test_a_dump_takes_no_device_memory(tmp_path: Path, precision: Precision) -> None:
    """Shards go to the host and to files from there; the model's parameters are set in place."""
    run(tmp_path, "dump_memory_rank.py", precision, 2, fault="kill@1:3:backward")
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "2"
    lines = [line for file in tmp_path.glob("rank*.jsonl") for line in file.read_text().splitlines()]
    found = [json.loads(line) for line in lines]
    assert {one["order"] for one in found} >= {"stage_shards", "write_part"}, found
    for one in found:
        assert one["state"] > 10_000_000 and one["touched"] > 50, one
        assert one["allocated"] < one["state"] / 1000, one["operations"]
