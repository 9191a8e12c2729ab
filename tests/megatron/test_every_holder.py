"""Without Megatron's distributed optimizer every data-parallel rank holds all of its part, and any of them saves it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mindspeed_tft.faults import compare

from .conftest import Drilled

pytestmark = pytest.mark.megatron

WHOLE = "--no-distributed-optimizer"
OVERLAP = ("--overlap-grad-reduce",)
SAVED = {"commit": (6, 7), "update": (7,)}


def _strike(
    drill: Callable[..., Drilled], preset: str, *faults: str, job: tuple[str, ...] = (), flags: tuple[str, ...] = ()
) -> Drilled:
    words = [word for fault in faults for word in ("--fault", fault)]
    found = drill("--preset", preset, WHOLE, *job, *words, "--", *flags)
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert (report["strategy"], sorted(report["faults_fired"])) == (preset, sorted(faults))
    assert (report["steps_lost"], report["processes_left_behind"]) == (0, [])
    assert report["resumed_at"] in SAVED.get(faults[0].rpartition(":")[2], (6,))
    assert all(entry["different"] == 0 and entry["bytes"] > 1_000_000 for entry in report["comparisons"])
    return found


@pytest.mark.full
def test_a_rank_that_comes_back_gets_everything_from_another(drill: Callable[..., Drilled]) -> None:
    found = _strike(drill, "recover", "kill@1:7:update", job=("--dtype", "bf16"))
    assert found.report["processes_restarted"] == [1]
    checkpoint = compare.checkpoint_dir(found.directory / "dump")
    assert [path.name for path in checkpoint.rglob("*.pt")] == ["model_optim_rng.pt"]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["dp4", "tp2dp2", "pp2dp2"])
@pytest.mark.parametrize(
    ("preset", "fault"),
    [
        ("dump", "kill@0:7:update"),
        ("dump", "kill@3:7:backward"),
        ("retry", "uce@2:7:update"),
        ("retry", "link@1:7:backward"),
        ("recover", "kill@0:7:forward"),
        ("recover", "kill@3:7:update"),
    ],
)
def test_matrix(drill: Callable[..., Drilled], preset: str, fault: str, layout: str, dtype: str) -> None:
    _strike(drill, preset, fault, job=("--layout", layout, "--dtype", dtype))


@pytest.mark.full
@pytest.mark.parametrize(("preset", "fault"), [("dump", "kill@1:7:backward"), ("recover", "kill@1:7:backward")])
def test_gradients_that_are_reduced_during_backward(drill: Callable[..., Drilled], preset: str, fault: str) -> None:
    _strike(drill, preset, fault, flags=OVERLAP)


@pytest.mark.full
def test_one_rank_of_four_is_enough(drill: Callable[..., Drilled]) -> None:
    _strike(drill, "dump", "kill@0:7:backward", "kill@1:7:backward", "kill@3:7:backward")
