"""Without Megatron's distributed optimizer every data-parallel rank holds all of its part, and any of them saves it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from mindspeed_tft.faults import compare

from .chains import went_on_after
from .conftest import Drilled

pytestmark = pytest.mark.megatron

WHOLE = "--no-distributed-optimizer"
OVERLAP = ("--overlap-grad-reduce",)


def _strike(
    drill: Callable[..., Drilled], preset: str, *faults: str, job: tuple[str, ...] = (), flags: tuple[str, ...] = ()
) -> Drilled:
    words = [word for fault in faults for word in ("--fault", fault)]
    found = drill("--preset", preset, WHOLE, *job, *words, "--", *flags)
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert (report["strategy"], sorted(report["faults_fired"])) == (preset, sorted(faults))
    assert (report["steps_lost"], report["processes_left_behind"]) == (0, [])
    if len(faults) == 1:
        assert report["resumed_at"] in went_on_after(faults[0])
    assert all(entry["different"] == 0 and entry["bytes"] > 900_000 for entry in report["comparisons"])
    return found


@pytest.mark.full
def test_a_rank_that_comes_back_gets_everything_from_another(drill: Callable[..., Drilled]) -> None:
    found = _strike(drill, "recover", "kill@1:7:update", job=("--dtype", "bf16"))
    assert found.report["processes_restarted"] == [1]
    checkpoint = compare.checkpoint_dir(found.directory / "dump")
    assert [path.name for path in checkpoint.rglob("*.pt")] == ["model_optim_rng.pt"]


JOBS = list(product(("dp4", "tp2dp2", "pp2dp2"), ("fp32", "bf16", "fp16")))


@pytest.mark.full
@pytest.mark.parametrize(("layout", "dtype"), JOBS)
def test_a_dump(drill: Callable[..., Drilled], layout: str, dtype: str) -> None:
    fault = ("kill@0:7:update", "kill@3:7:backward")[JOBS.index((layout, dtype)) % 2]
    _strike(drill, "dump", fault, job=("--layout", layout, "--dtype", dtype))


@pytest.mark.full
@pytest.mark.parametrize(("layout", "dtype"), JOBS)
def test_repairs_and_reboots(drill: Callable[..., Drilled], layout: str, dtype: str) -> None:
    """One after the other in one job."""
    faults = ("uce@2:4:update", "link@1:7:backward", "kill@0:10:forward", "kill@3:13:update")
    job = ("--layout", layout, "--dtype", dtype, "--steps", "18", "--timeout", "240")
    found = _strike(drill, "recover", *faults, job=job)
    told = [(each["strategy"], each["step"]) for each in found.report["recoveries"]]
    assert told == [("retry", 4), ("retry", 6), ("recover", 9), ("recover", 13)]
    assert found.report["processes_restarted"] == [0, 3]


@pytest.mark.full
@pytest.mark.parametrize(("preset", "fault"), [("dump", "kill@1:7:backward"), ("recover", "kill@1:7:backward")])
def test_gradients_that_are_reduced_during_backward(drill: Callable[..., Drilled], preset: str, fault: str) -> None:
    _strike(drill, preset, fault, flags=OVERLAP)


@pytest.mark.full
def test_one_rank_of_four_is_enough(drill: Callable[..., Drilled]) -> None:
    _strike(drill, "dump", "kill@0:7:backward", "kill@1:7:backward", "kill@3:7:backward")
