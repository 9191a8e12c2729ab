"""Mixture of experts on real Megatron: experts have holders and checkpoint files of their own, and every byte counts.

Four ranks, experts divided over two. With two replicas each rank holds two shards: one of all that no expert has, of
which the checkpoint of its part needs another as well, and one of its experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_tft.faults import compare

from .conftest import Drilled

pytestmark = pytest.mark.megatron

# The router's bias is updated when gradients are final, before the commit: a step that is computed again would do it
# twice.
BIAS = ("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid")
EP = ("--layout", "ep2dp4")
SAVED = {"commit": (6, 7), "update": (7,), "param-gather": (7,)}


def _assert_exact(found: Drilled, fault: str, preset: str) -> None:
    report, phase = found.report, fault.rpartition(":")[2]
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert (report["strategy"], report["faults_fired"]) == (preset, [fault])
    assert (report["steps_lost"], report["processes_left_behind"]) == (0, [])
    assert report["resumed_at"] in SAVED.get(phase, (6,))
    expected = ["dump", "end"] if preset == "dump" else ["end"]
    assert [entry["what"] for entry in report["comparisons"]] == expected
    assert all(entry["different"] == 0 and entry["bytes"] > 1_000_000 for entry in report["comparisons"])


def _files(found: Drilled) -> set[str]:
    checkpoint = compare.checkpoint_dir(found.directory / "dump")
    return {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*.pt")}


def _strike(
    drill: Callable[..., Drilled], preset: str, fault: str, *flags: str, layout: tuple[str, ...] = EP
) -> Drilled:
    found = drill("--preset", preset, *layout, "--fault", fault, "--", *flags)
    _assert_exact(found, fault, preset)
    return found


@pytest.mark.full
def test_the_step_is_computed_again_after_the_bias_was_updated(drill: Callable[..., Drilled]) -> None:
    """The memory of a rank is destroyed between the update of the bias and the commit: all are put back."""
    found = _strike(drill, "retry", "uce@1:7:clip", *BIAS)
    transfers = [
        move for incident in found.incidents for each in incident["engine"]["repairs"] for move in each["transfers"]
    ]
    assert [move.rpartition("|")[0] for move in transfers] == ["tp0-pp0-ep1/expert/0|3", "tp0-pp0/dense/1|3"]


@pytest.mark.full
@pytest.mark.parametrize("fault", ["kill@1:7:backward", "kill@1:7:update", "kill@2:7:param-gather", "exc@0:7:clip"])
def test_a_dump_is_what_megatron_would_have_saved(drill: Callable[..., Drilled], fault: str) -> None:
    found = _strike(drill, "dump", fault, *BIAS)
    parts = ("mp_rank_00_000", "mp_rank_00_001")
    assert _files(found) == {f"{part}/{name}.pt" for part in parts for name in ("distrib_optim", "model_optim_rng")}


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), BIAS], ids=["plain", "bias"])
def test_repairs_and_reboots(drill: Callable[..., Drilled], flags: tuple[str, ...]) -> None:
    """One after the other in one job."""
    repaired = ("uce@1:4:update", "link@2:7:backward", "uce@3:10:param-gather")
    faults = (*repaired, "kill@1:13:update", "kill@0:16:forward", "kill@3:19:clip")
    words = [word for fault in faults for word in ("--fault", fault)]
    found = drill("--preset", "recover", *EP, "--steps", "24", "--timeout", "300", *words, "--", *flags)
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert (report["faults_fired"], report["processes_left_behind"]) == (list(faults), [])
    told = [(each["strategy"], each["step"]) for each in report["recoveries"]]
    assert told == [*zip(["retry"] * 3, (4, 6, 10), strict=True), *zip(["recover"] * 3, (13, 15, 18), strict=True)]
    (compared,) = report["comparisons"]
    assert (compared["what"], compared["different"]) == ("end", 0) and compared["bytes"] > 1_000_000


@pytest.mark.full
@pytest.mark.parametrize(("preset", "fault"), [("dump", "kill@1:7:update"), ("recover", "kill@2:7:clip")])
def test_in_bf16(drill: Callable[..., Drilled], preset: str, fault: str) -> None:
    """The bias becomes fp32 in a rank's first forward pass, which a newcomer has not made."""
    _strike(drill, preset, fault, *BIAS, layout=(*EP, "--dtype", "bf16"))


@pytest.mark.full
@pytest.mark.parametrize(("preset", "fault"), [("dump", "kill@1:7:update"), ("recover", "kill@0:7:backward")])
def test_experts_that_are_not_divided(drill: Callable[..., Drilled], preset: str, fault: str) -> None:
    # Without --disable-bias-linear this Megatron cannot compute the gradients of its experts on one rank.
    flags = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear")
    _strike(drill, preset, fault, *flags, layout=("--layout", "dp4"))


@pytest.mark.full
@pytest.mark.parametrize(("preset", "fault"), [("dump", "kill@1:7:update"), ("recover", "kill@0:7:backward")])
def test_without_distributed_optimizer(drill: Callable[..., Drilled], preset: str, fault: str) -> None:
    _strike(drill, preset, fault, *BIAS, layout=(*EP, "--no-distributed-optimizer"))


@pytest.mark.full
def test_control_a_bias_that_is_not_put_back_is_noticed(
    drill: Callable[..., Drilled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = (
        "import wrapt\n"
        "@wrapt.when_imported('mindspeed_tft.patches.megatron_rollback')\n"
        "def forget(module):\n"
        "    module.PUT_BACK = tuple(rule for rule in module.PUT_BACK if rule is not module.buffers)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    )
    found = drill("--preset", "retry", *EP, "--fault", "uce@1:7:clip", "--", *BIAS)
    assert found.report["verdict"] == "inexact", found.output
    assert found.report["compared"]["different"] > 0
