"""Recoveries on real Megatron through the NPU platform, over a device that is not there.

`tests/support/fake_torch_npu` is torch_npu over CPU tensors: its device can be stopped, its hccl waits for peers that
are gone, and it records what it is asked for. So these drills show which calls a rank makes, in which order, and that
what comes out is exact. They do not show that an NPU answers as this one does.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tft.cli.drill import make_plan
from mindspeed_tft.faults import rehearsal
from mindspeed_tft.platforms.npu import CANN

from .conftest import Quiet

pytestmark = [pytest.mark.megatron, pytest.mark.full]

STEPS = 8
TESTS = Path(__file__).resolve().parent.parent
STOP, RESTART = "npu.stop_device", "npu.restart_device"
ASK, SAFE = "npu.check_uce_in_memory", "npu._recovery.update_npu_tensor_to_safe"
REINIT, STREAM = "distributed.reinit_process_group", "npu.set_stream"


@dataclass(frozen=True)
class Ran:
    report: rehearsal.Report
    calls: dict[int, list[dict[str, Any]]]  # by rank, in order

    def named(self, rank: int, process: int = 0) -> list[str]:
        """Names of the calls of a rank, each kind once where it comes several times in a row; of its first process, or
        of the one that took its place."""
        pids = list(dict.fromkeys(call["pid"] for call in self.calls[rank]))
        found: list[str] = []
        for call in self.calls[rank]:
            if call["pid"] == pids[process] and found[-1:] != [call["call"]]:
                found.append(str(call["call"]))
        return found

    @property
    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.report.logs)


@pytest.fixture
def on_npu(tmp_path: Path, references: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """`on_npu(*faults, preset=..., refuse=...)`: a drill whose broken job trains on the recording device."""
    cann, records = tmp_path / "cann", tmp_path / "records"
    records.mkdir()
    _build_cann(cann)
    program, fake = TESTS / "megatron" / "programs", TESTS / "support" / "fake_torch_npu"
    monkeypatch.syspath_prepend(str(program))
    monkeypatch.setenv("PYTHONPATH", f"{program}:{fake}")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cann))
    monkeypatch.setenv("FAKE_NPU_RECORD", str(records))

    def run(*faults: str, preset: str = "retry", refuse: str = "") -> Ran:
        monkeypatch.setenv("FAKE_NPU_REFUSE", refuse)
        plan = make_plan(preset=preset, faults=list(faults), steps=STEPS, timeout=100)
        plan = dataclasses.replace(plan, program="npu_job")
        work = tmp_path / "drill"
        work.mkdir()
        report = rehearsal.rehearse(plan, work, references, Quiet())
        calls = {
            int(path.stem.removeprefix("rank")): [json.loads(line) for line in path.read_text().splitlines()]
            for path in records.glob("rank*.jsonl")
        }
        return Ran(report, calls)

    return run


def _build_cann(folder: Path) -> None:
    """Libraries with the functions that a start-up looks for, and nothing in them."""
    folder.mkdir()
    for name, functions in CANN.items():
        source = folder / f"{name}.c"
        source.write_text("".join(f"int {function}(void) {{ return 0; }}\n" for function in functions))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / name, source], check=True, timeout=60)


def _assert_exact(ran: Ran, strategy: str) -> None:
    report = ran.report.as_json()
    assert (report["verdict"], report["reasons"], report["strategy"]) == ("exact", [], strategy), ran.log[-6000:]
    assert report["steps_lost"] == 0 and report["compared"]["tensors"] > 30


def _rounds(calls: list[str]) -> list[list[str]]:
    """The calls of each recovery: each begins with a stop."""
    found: list[list[str]] = []
    for call in calls:
        if call == STOP and (not found or RESTART in found[-1]):
            found.append([])
        if found:
            found[-1].append(call)
    return found


def test_a_repair_asks_the_device_in_this_order(on_npu: Callable[..., Ran]) -> None:
    ran = on_npu("uce@1:4:forward", "uce@2:6:update", "link@3:7:backward")
    _assert_exact(ran, "retry")
    healthy = [STOP, RESTART, REINIT, STREAM]
    for rank in range(4):
        first, second, third = _rounds(ran.named(rank))
        # The rank whose memory failed stops its own device before it asks what was hit, and is stopped like all others.
        assert first == ([STOP, ASK, STOP, RESTART, REINIT, SAFE, STREAM] if rank == 1 else healthy)
        assert second == ([STOP, ASK, STOP, RESTART, REINIT, SAFE, STREAM] if rank == 2 else healthy)
        assert third == healthy
    assert "all groups of the device are built anew" not in ran.log


def test_nothing_is_computed_on_a_stopped_device(on_npu: Callable[..., Ran]) -> None:
    """What a rank does between its stop and the restart needs no device: there it would fail."""
    ran = on_npu("uce@1:4:backward")
    _assert_exact(ran, "retry")
    for rank in range(4):
        assert "op" not in ran.named(rank)


def test_a_process_that_died_is_replaced(on_npu: Callable[..., Ran]) -> None:
    """The newcomer has no communicators that could be mended, so all ranks build new groups."""
    ran = on_npu("kill@2:5:backward", preset="recover")
    _assert_exact(ran, "recover")
    assert ran.report.processes_restarted == (2,)
    for rank in (0, 1, 3):
        (calls,) = _rounds(ran.named(rank))
        assert calls == [STOP, RESTART, REINIT, STREAM]
    assert STOP not in ran.named(2, process=0)
    newcomer = ran.named(2, process=1)
    assert REINIT not in newcomer and newcomer[-1] == STREAM
    assert "this process is new; all groups of the device are built anew" in ran.log


def test_a_device_that_mends_no_group_leads_to_new_groups(on_npu: Callable[..., Ran]) -> None:
    ran = on_npu("uce@1:4:forward", refuse=f"{REINIT}@3:2")
    _assert_exact(ran, "retry")
    assert "the fake NPU refuses distributed.reinit_process_group (call 2 of rank 3)" in ran.log
    assert "not mended on 1 ranks; all groups of the device are built anew" in ran.log


def test_a_device_that_does_not_restart_is_lost_and_said_so(on_npu: Callable[..., Ran]) -> None:
    """Its rank can give nothing; the others save the last completed step, which goes on byte for byte."""
    ran = on_npu("uce@1:4:forward", refuse=f"{RESTART}@2:1")
    report = ran.report.as_json()
    assert (report["verdict"], report["strategy"], report["steps_lost"]) == ("degraded", "dump", 0), ran.log[-6000:]
    assert all(compared["different"] == 0 for compared in report["comparisons"])
    assert report["comparisons"]
    assert "the device does not go on after the stop: the fake NPU refuses npu.restart_device" in ran.log
    assert RESTART in ran.named(2) and REINIT not in ran.named(0)  # nobody tried to go on with it


def test_a_memory_error_outside_of_torch_ends_in_a_dump(
    on_npu: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NPU_DAMAGE", "1")
    ran = on_npu("uce@1:4:backward")
    report = ran.report.as_json()
    assert (report["verdict"], report["strategy"], report["steps_lost"]) == ("degraded", "dump", 0), ran.log[-6000:]
    assert all(compared["different"] == 0 for compared in report["comparisons"])
    assert ASK in ran.named(1)
