"""Megatron core_r0.6.0 (a checkout, TFT_MEGATRON_PATH): replicas that are ours, and on them dump, retry and recover.

The unbroken run is stock Megatron without replicas, as this release has none: replicas must not change a byte.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import checkouts
import pytest

from mindspeed_tft.faults import compare, gpt_job, jobs, plans, rehearsal
from mindspeed_tft.faults.spec import parse_layout
from mindspeed_tft.patches.groups import MEGATRON_06

from .conftest import Drilled, Quiet

pytestmark = [pytest.mark.megatron, pytest.mark.full]


@pytest.fixture
def checkout() -> Path:
    return checkouts.megatron(MEGATRON_06)


# Stock 0.6.0 cannot save before its first update, so that must not overflow.
SCALE = ("--initial-loss-scale", "256", "--loss-scale-window", "3")


def _unbroken(plan: plans.Plan, references: Path, work: Path, begin: int = 0) -> tuple[Path, Path, str]:
    """(save directory of the stock run, that of a run with the plugin and no fault, its log). `begin`: the step of the
    stock run from whose checkpoint it goes on."""
    made = rehearsal.Rehearsal(plan, work, references, Quiet())
    stock = made.reference()
    flags = (gpt_job.WITH_PLUGIN, *plans.plugin_flags(plan), "--save", str(work / "save"), "--save-interval", "3")
    if begin:
        shutil.copytree(stock / f"iter_{begin:07d}", work / "load" / f"iter_{begin:07d}")
        (work / "load" / compare.TRACKER).write_text(str(begin))
        flags += ("--load", str(work / "load"))
    command = jobs.torchrun(jobs.Size(plan.layout.world_size), plans.PROGRAM, flags)
    found = (str(plan.megatron), os.environ.get("PYTHONPATH", ""))
    environ = {"PYTHONPATH": os.pathsep.join(place for place in found if place)}
    ended = jobs.run(jobs.Job("unbroken", command, work / "unbroken.log", 150, environ))
    assert (ended.returncode, ended.leftover) == (0, ()), ended.tail(60)
    return stock, work / "save", ended.log.read_text()


def _different(stock: Path, own: Path, steps: int, begin: int = 0) -> int:
    """Values that differ in the periodic checkpoints after `begin`, of which the one of `steps` is the last."""
    different = 0
    for step in range(begin + 3, steps + 1, 3):
        found = compare.compare_checkpoints(stock / f"iter_{step:07d}", own / f"iter_{step:07d}")
        assert found.tensors > 30 and found.bytes > 1_000_000
        different += found.different
    return different


@pytest.mark.parametrize(
    ("layout", "dtype", "replicas", "flags"),
    [
        ("dp4", "fp32", 2, ()),
        ("dp4", "bf16", 4, ("--overlap-grad-reduce",)),
        ("dp4", "fp16", 2, SCALE),
        ("tp2dp2", "bf16", 2, ()),
        ("pp2dp2", "fp32", 2, ()),
    ],
)
def test_replicas_change_no_byte(
    checkout: Path, references: Path, tmp_path: Path, layout: str, dtype: str, replicas: int, flags: tuple[str, ...]
) -> None:
    plan = plans.Plan(
        layout=parse_layout(layout),
        faults=(),
        dtype=dtype,
        replicas=replicas,
        megatron=checkout,
        extra=flags,
    )
    stock, own, log = _unbroken(plan, references, tmp_path)
    assert _different(stock, own, plan.steps) == 0
    assert f"N = {replicas}" in log


def test_a_run_with_replicas_goes_on_from_a_checkpoint_without(
    checkout: Path, references: Path, tmp_path: Path
) -> None:
    plan = plans.Plan(layout=parse_layout("dp4"), faults=(), dtype="bf16", megatron=checkout)
    stock, own, _ = _unbroken(plan, references, tmp_path, begin=6)
    assert not (own / "iter_0000006").exists()
    assert _different(stock, own, plan.steps, begin=6) == 0


@pytest.mark.parametrize(
    ("module", "spoiled"),
    [
        # Holders that keep their own, unreduced gradients outside of what they reduced themselves.
        ("megatron_06_replicas", "give_to_holders = lambda *_args: None"),
        # A norm to which each shard adds as often as it has holders.
        ("megatron_06_replicas", "_stock_slices = (lambda of: lambda *args: 2 * of(*args))(module._stock_slices)"),
    ],
    ids=["not exchanged", "counted twice"],
)
def test_control_a_replica_that_is_not_exact_is_found_out(
    spoil: Callable[..., None], checkout: Path, references: Path, tmp_path: Path, module: str, spoiled: str
) -> None:
    spoil(module, spoiled)
    plan = plans.Plan(layout=parse_layout("dp4"), faults=(), megatron=checkout)
    stock, own, _ = _unbroken(plan, references, tmp_path)
    assert _different(stock, own, plan.steps) > 0


# ------------------------------------------------------------------------------------------------ faults


def _assert_exact(found: Drilled, preset: str, faults: tuple[str, ...]) -> None:
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert sorted(report["faults_fired"]) == sorted(faults) and report["strategy"] == preset
    assert (report["steps_lost"], report["compared"]["different"], report["processes_left_behind"]) == (0, 0, [])
    assert {entry["what"] for entry in report["comparisons"]} == ({"dump", "end"} if preset == "dump" else {"end"})
    assert all(entry["tensors"] > 30 and entry["bytes"] > 1_000_000 for entry in report["comparisons"])


@pytest.mark.parametrize(
    ("preset", "layout", "dtype", "faults", "flags"),
    [
        ("dump", "dp4", "fp32", ("kill@1:7:backward",), ()),
        ("dump", "dp4", "bf16", ("exc@0:7:update",), ("--overlap-grad-reduce",)),
        ("dump", "dp4", "fp16", ("kill@3:7:clip",), SCALE),
        ("dump", "tp2dp2", "bf16", ("kill@3:7:commit",), ()),
        ("dump", "pp2dp2", "fp32", ("kill@2:7:param-gather",), ()),
        ("retry", "dp4", "fp32", ("uce@1:4:backward", "link@2:7:grad-reduce", "uce@3:9:update"), ()),
        ("retry", "dp4", "bf16", ("uce@0:5:clip", "uce@2:8:param-gather"), ("--overlap-grad-reduce",)),
        ("retry", "dp4", "bf16", ("uce@1:4:eval", "link@2:7:save"), ()),
        ("recover", "dp4", "fp32", ("kill@1:5:backward", "kill@2:9:update"), ()),
        ("recover", "pp2dp2", "fp32", ("uce@1:4:backward", "kill@2:9:param-gather"), ()),
        ("recover", "dp4", "bf16", ("kill@0:7:grad-reduce",), ("--overlap-grad-reduce",)),
    ],
)
def test_a_fault_changes_no_byte(
    drill: Callable[..., Drilled],
    checkout: Path,
    preset: str,
    layout: str,
    dtype: str,
    faults: tuple[str, ...],
    flags: tuple[str, ...],
) -> None:
    words = [word for fault in faults for word in ("--fault", fault)]
    place = (
        "--megatron",
        str(checkout),
        "--layout",
        layout,
        "--dtype",
        dtype,
        "--preset",
        preset,
    )
    _assert_exact(drill(*place, *words, *(["--", *flags] if flags else [])), preset, faults)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("uce@1:7:backward", ("--replicas", "1")), ("nan@1:7:backward", ())],
    ids=["no replica", "wrong numbers"],
)
def test_all_go_back_to_the_last_checkpoint(
    drill: Callable[..., Drilled], checkout: Path, fault: str, words: tuple[str, ...]
) -> None:
    """Megatron's own load, with what is not loaded put back."""
    found = drill("--megatron", str(checkout), "--preset", "retry", "--fault", fault, *words)
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert (report["strategy"], report["compared"]["different"]) == ("rewind", 0)
