"""Older releases of Megatron, as checkouts or unpacked wheels: the same faults, the same bytes.

Each test wants `TFT_MEGATRON_PATH` to name a release that it is for, and is skipped otherwise. To run all of them:
once with each of core_v0.12.1, 0.17.1 and 0.18.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import checkouts
import pytest

from mindspeed_tft.faults import control
from mindspeed_tft.faults.plans import Plan
from mindspeed_tft.faults.rehearsal import Rehearsal, rehearse
from mindspeed_tft.faults.spec import parse_fault, parse_layout

from .chains import in_a_row, went_on_after
from .compatibility import PROVED
from .conftest import Drilled, Quiet

pytestmark = [pytest.mark.megatron, pytest.mark.full]

OLDEST = "==0.12.*"
WHEELS = ">=0.17,<0.19"
PROGRAMS = Path(__file__).parent / "programs"
STEP_PHASES = ("data", "forward", "backward", "grad-reduce", "clip", "commit", "update", "param-gather")
PHASES = (*STEP_PHASES, "save", "eval")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")


@pytest.fixture
def on(drill: Callable[..., Drilled]) -> Callable[..., Drilled]:
    """`on(versions, *arguments)`: a drill with the Megatron that the environment names."""
    return lambda versions, *arguments: drill("--megatron", str(checkouts.megatron(versions)), *arguments)


def _arguments(faults: tuple[str, ...]) -> list[str]:
    return [word for fault in faults for word in ("--fault", fault)]


def _assert_exact(found: Drilled, *faults: str) -> None:
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert sorted(report["faults_fired"]) == sorted(faults)
    assert (report["steps_lost"], report["processes_left_behind"]) == (0, [])
    wanted = {"dump", "end"} if report["preset"] == "dump" else {"end"}
    assert {entry["what"] for entry in report["comparisons"]} == wanted
    assert all(entry["tensors"] > 30 and entry["bytes"] > 1_000_000 for entry in report["comparisons"])
    assert report["compared"]["different"] == 0


def _assert_repaired(found: Drilled, faults: tuple[str, ...]) -> None:
    """Each by itself, in the step in which it came."""
    _assert_exact(found, *faults)
    parsed = [parse_fault(fault) for fault in faults]
    recoveries = found.report["recoveries"]
    wanted = ["recover" if fault.ends_process else "retry" for fault in parsed]
    assert [each["strategy"] for each in recoveries] == wanted
    for text, each in zip(faults, recoveries, strict=True):
        assert each["step"] in went_on_after(text), (text, each)
    assert found.report["processes_restarted"] == sorted({fault.rank for fault in parsed if fault.ends_process})


# ------------------------------------------------------------------------------------------------ 0.12


@pytest.mark.parametrize(
    ("layout", "dtype", "fault"),
    [
        ("dp4", "fp32", "kill@1:7:backward"),
        ("dp4", "bf16", "kill@0:7:update"),
        ("tp2dp2", "bf16", "exc@2:7:forward"),
        ("tp2dp2", "fp32", "kill@3:7:param-gather"),
        ("pp2dp2", "fp32", "segv@3:7:grad-reduce"),
        ("pp2dp2", "bf16", "kill@0:7:commit"),
    ],
)
def test_dump(on: Callable[..., Drilled], layout: str, dtype: str, fault: str) -> None:
    _assert_exact(on(OLDEST, "--layout", layout, "--dtype", dtype, "--fault", fault), fault)


RETRIED = (
    ("dp4", "fp32", in_a_row(("uce", "link") * 5, (1, 2, 3, 0) * 3, PHASES)),
    ("tp2dp2", "bf16", in_a_row(("link", "uce") * 5, (0, 1, 2, 3) * 3, PHASES)),
    ("pp2dp2", "bf16", in_a_row(("uce", "link") * 5, (3, 2, 1, 0) * 3, PHASES)),
)


@pytest.mark.parametrize(("layout", "dtype", "faults"), RETRIED)
def test_retry(on: Callable[..., Drilled], layout: str, dtype: str, faults: tuple[str, ...]) -> None:
    steps = str(parse_fault(faults[-1]).step + 3)
    found = on(OLDEST, "--preset", "retry", "--layout", layout, "--dtype", dtype, "--steps", steps, *_arguments(faults))
    _assert_repaired(found, faults)


RECOVERED = (
    ("dp4", "bf16", in_a_row(("kill", "exc") * 2, (1, 3, 0, 2), ("backward", "update", "param-gather", "data"))),
    ("tp2dp2", "fp32", in_a_row(("exc", "kill") * 2, (0, 2, 1, 3), ("forward", "commit", "save", "clip"))),
    ("pp2dp2", "bf16", in_a_row(("kill", "segv") * 2, (3, 0, 2, 1), ("grad-reduce", "eval", "forward", "update"))),
)


@pytest.mark.parametrize(("layout", "dtype", "faults"), RECOVERED)
def test_recover(on: Callable[..., Drilled], layout: str, dtype: str, faults: tuple[str, ...]) -> None:
    steps = str(parse_fault(faults[-1]).step + 3)
    found = on(
        OLDEST, "--preset", "recover", "--layout", layout, "--dtype", dtype, "--steps", steps, *_arguments(faults)
    )
    _assert_repaired(found, faults)


def test_wrong_numbers_send_all_back_to_the_last_checkpoint(on: Callable[..., Drilled]) -> None:
    found = on(OLDEST, "--preset", "retry", "--fault", "nan@1:7:backward")
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert [each["strategy"] for each in report["recoveries"]] == ["rewind"]


def test_fp16_and_communication_that_overlaps(on: Callable[..., Drilled]) -> None:
    faults = ("kill@2:5:backward", "uce@0:8:commit")
    found = on(OLDEST, "--preset", "recover", "--dtype", "fp16", *_arguments(faults), "--", *OVERLAP)
    _assert_repaired(found, faults)


def test_without_the_distributed_optimizer(on: Callable[..., Drilled]) -> None:
    faults = ("uce@1:5:update", "kill@3:8:backward")
    found = on(OLDEST, "--preset", "recover", "--no-distributed-optimizer", "--dtype", "bf16", *_arguments(faults))
    _assert_repaired(found, faults)


def test_four_holders_of_each_shard(on: Callable[..., Drilled]) -> None:
    fault = "kill@2:7:update"
    _assert_exact(on(OLDEST, "--replicas", "4", "--fault", fault), fault)


@pytest.mark.parametrize("layout", ["dp4", "tp2dp2", "pp2dp2"])
@pytest.mark.parametrize("sharding", [(), ("--no-ckpt-fully-parallel-save",)], ids=["by-parameter", "gathered"])
def test_the_default_format(on: Callable[..., Drilled], layout: str, sharding: tuple[str, ...]) -> None:
    fault = "kill@1:7:update"
    found = on(OLDEST, "--layout", layout, "--fault", fault, "--", "--ckpt-format", "torch_dist", *sharding)
    _assert_exact(found, fault)


def test_a_newcomer_saves_the_default_format_with_the_others(on: Callable[..., Drilled]) -> None:
    fault = "kill@1:7:backward"
    found = on(OLDEST, "--preset", "recover", "--dtype", "bf16", "--fault", fault, "--", "--ckpt-format", "torch_dist")
    _assert_repaired(found, (fault,))


def _first_norm(work: Path, replicas: int) -> float:
    """The gradient norm of the first step of an unbroken run, as Megatron prints it."""
    fault = parse_fault("kill@1:2:backward")
    plan = Plan(parse_layout("dp4"), (fault,), steps=3, replicas=replicas, megatron=checkouts.megatron(OLDEST))
    rehearsal = Rehearsal(plan, work / f"work-{replicas}", work / f"references-{replicas}", Quiet())
    rehearsal.work.mkdir()
    rehearsal.reference()
    found = re.search(r"iteration +1/.*grad norm: ([0-9.]+)", rehearsal.ended[0].log.read_text())
    assert found is not None
    return float(found[1])


def test_the_norm_of_two_instances_is_that_of_one(tmp_path: Path) -> None:
    """Up to the order of sums: Megatron before 0.13 counts each gradient once for each instance, which is mended."""
    one, two = _first_norm(tmp_path, 1), _first_norm(tmp_path, 2)
    assert one > 0.5 and abs(two - one) <= 0.002 * one


def test_control_without_the_mending_the_norm_is_another(tmp_path: Path, spoil: Callable[..., None]) -> None:
    spoil("megatron_grad_norm", "instances = lambda *_: ()")
    one, two = _first_norm(tmp_path, 1), _first_norm(tmp_path, 2)
    assert abs(two / one - 2**0.5) < 0.01


@pytest.mark.parametrize(("layout", "fault"), [("dp4", "kill@1:7:update"), ("pp2dp2", "kill@2:7:backward")])
def test_its_own_program_with_the_one_line(
    layout: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pretrain_gpt.py` of the checkout, unchanged in the unbroken run, and with one import more in the broken one."""
    checkout = checkouts.megatron(OLDEST)
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    plan = Plan(
        parse_layout(layout),
        (parse_fault(fault),),
        preset="recover",
        launcher="tftrun",
        megatron=checkout,
        program="stock_gpt",
        extra=("--vocab-size", "4200"),  # its mock data has token ids up to 4096
    )
    (tmp_path / "work").mkdir()
    report = rehearse(plan, tmp_path / "work", tmp_path / "references", Quiet())
    assert (report.verdict.value, report.reasons) == ("exact", ()), report.tail
    assert report.strategy == "recover" and report.processes_restarted == (parse_fault(fault).rank,)
    (compared,) = report.evidence.comparisons
    assert compared.tensors > 30 and compared.bytes > 1_000_000 and compared.different == 0


def test_control_a_rule_that_is_missing_is_seen(on: Callable[..., Drilled], spoil: Callable[..., None]) -> None:
    """Without it the batches of the broken step are gone, and training goes on with those of the next."""
    spoil("megatron_rollback", "_data_iterators = lambda *_: []")
    found = on(OLDEST, "--preset", "retry", "--fault", "uce@1:7:backward", "--", *OVERLAP)
    assert found.report["verdict"] != "exact", found.output


def test_control_a_flipped_byte_of_a_dump_is_seen(on: Callable[..., Drilled]) -> None:
    from mindspeed_tft.faults import compare

    fault = "kill@1:7:backward"
    found = on(OLDEST, "--fault", fault)
    _assert_exact(found, fault)
    dump = compare.checkpoint_dir(found.directory / "dump")
    control.damaged_copy(dump, found.directory / "damaged")
    assert compare.compare_checkpoints(dump, found.directory / "damaged").different == 1


# Rows of the page of compatibility whose flags this release has, and which change what a fault leaves behind.
FEATURES = """
    sequence-parallel recompute-dropout train-samples gradient-types frozen frozen-dump untied watching cyclic-data
""".split()
# Of these rows, what this release cannot do by itself: it logs its progress to a directory that is not there yet.
NOT_THERE = ("--log-progress",)


@pytest.mark.parametrize("name", FEATURES)
def test_features(on: Callable[..., Drilled], name: str) -> None:
    (row,) = (row for row in PROVED if row.name == name)
    found = on(OLDEST, *(word for word in row.arguments() if word not in NOT_THERE))
    _assert_exact(found, *row.fault.split())
    assert re.search(row.seen, (found.directory / "broken.log").read_text()), row.seen


def test_a_step_that_the_loss_scaler_skips(on: Callable[..., Drilled]) -> None:
    """From step 6 on every other step is one of them, with this release."""
    fault = "kill@3:8:commit"
    words = ("--preset", "recover", "--dtype", "fp16", "--fault", fault, "--", "--loss-scale-window", "1")
    found = on(OLDEST, *words, "--hysteresis", "1")
    _assert_exact(found, fault)
    assert re.search(
        r"iteration +(8|10)/ +12 .*number of skipped iterations: +1 ", (found.directory / "broken.log").read_text()
    )


@pytest.mark.parametrize(("preset", "fault"), [("retry", "uce@1:7:backward"), ("recover", "kill@6:7:update")])
def test_virtual_pipeline(on: Callable[..., Drilled], preset: str, fault: str) -> None:
    """On 8 ranks, where sends need not overlap: where they do, this release computes NaN on gloo without any fault."""
    stages = ("--num-layers", "8", "--num-layers-per-virtual-pipeline-stage", "1", "--no-overlap-p2p-communication")
    words = ("--timeout", "400", "--preset", preset, "--layout", "pp4dp2", "--dtype", "bf16", "--fault", fault)
    _assert_exact(on(OLDEST, *words, "--", *stages, "--eval-interval", "3", "--eval-iters", "2"), fault)


# ------------------------------------------------------------------------------------------------ 0.17 and 0.18


@pytest.mark.parametrize(
    ("preset", "layout", "dtype", "faults"),
    [
        ("dump", "tp2dp2", "bf16", ("kill@1:7:update",)),
        ("retry", "dp4", "fp32", ("uce@1:4:backward", "link@2:7:commit", "uce@3:10:update")),
        ("recover", "pp2dp2", "bf16", ("kill@1:4:backward", "kill@2:8:param-gather")),
    ],
)
def test_releases_of_the_package_index(
    on: Callable[..., Drilled], preset: str, layout: str, dtype: str, faults: tuple[str, ...]
) -> None:
    found = on(WHEELS, "--preset", preset, "--layout", layout, "--dtype", dtype, *_arguments(faults))
    if preset == "dump":
        _assert_exact(found, *faults)
    else:
        _assert_repaired(found, faults)


def test_the_default_format_in_the_background(on: Callable[..., Drilled]) -> None:
    fault = "kill@1:7:backward"
    flags = ("--ckpt-format", "torch_dist", "--async-save", "--use-persistent-ckpt-worker")
    found = on(WHEELS, "--preset", "recover", "--save-interval", "3", "--fault", fault, "--", *flags)
    _assert_repaired(found, (fault,))
