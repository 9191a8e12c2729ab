"""Real Megatron, a real fault, no process dies: the run ends byte for byte as if nothing had happened.

The few that run always damage memory and cut links; marker `full` runs the matrix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from .chains import assert_in_a_row, in_a_row, went_on_after
from .conftest import Drilled

pytestmark = pytest.mark.megatron

KINDS = ("uce", "link")
LAYOUTS = ("dp4", "tp2dp2", "pp2dp2")
DTYPES = ("fp32", "bf16", "fp16")
RANKS = (0, 1, 2, 3)
STEP_PHASES = ("data", "forward", "backward", "grad-reduce", "clip", "commit", "update", "param-gather")
PHASES = (*STEP_PHASES, "save", "eval")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
SCALED, BREAKS = (7, 9, 11, 13, 15, 17), ("backward", "commit", "save")


@pytest.fixture
def retry(drill: Callable[..., Drilled]) -> Callable[..., Drilled]:
    """`retry(*arguments)`: a drill with preset `retry`."""
    return lambda *arguments: drill("--preset", "retry", *arguments)


def _arguments(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--fault", fault)]


def _assert_exact(found: Drilled, *faults: str) -> None:
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert (report["strategy"], sorted(report["faults_fired"])) == ("retry", sorted(faults))
    assert report["steps_lost"] == 0
    assert report["processes_restarted"] == []
    # Weights, main weights, both moments, and the generators, at the end of the very job that was broken.
    (compared,) = report["comparisons"]
    assert (compared["what"], compared["different"]) == ("end", 0)
    assert compared["tensors"] > 30
    assert compared["bytes"] > 1_000_000
    assert report["processes_left_behind"] == []
    if len(faults) == 1:
        assert report["resumed_at"] in went_on_after(faults[0])


def test_damaged_memory_is_rebuilt_from_a_replica(retry: Callable[..., Drilled]) -> None:
    fault = "uce@1:7:backward"
    found = retry("--fault", fault)
    _assert_exact(found, fault)
    assert "bytes of" in _said(found, fault)  # it was destroyed indeed
    seconds = found.report["seconds"]
    assert seconds["detect"] < 1.0
    assert all(seconds[stage] is not None for stage in ("stop", "regroup", "repair", "rollback", "first_step", "total"))
    assert (seconds["reboot"], seconds["dump"]) == (None, None)
    # The incident tells who gave what, how much of it and how fast, and how to rehearse that.
    file = Path(found.report["incident"])
    incident = json.loads(file.read_text())
    (moved,) = incident["transfers"]
    assert (moved["shard"], moved["source"], moved["target"], moved["ok"]) == ("tp0-pp0/dense/1", 3, 1, True)
    assert moved["bytes"] > 200_000 and moved["gb_per_s"] > 0
    assert incident["reproduce"]["command"].endswith(
        f"--preset retry --layout dp4 --dtype fp32 --fault {fault} --steps 12"
    )
    assert "Rank 1 on host" in file.with_suffix(".html").read_text()


def test_a_broken_link_is_made_anew(retry: Callable[..., Drilled]) -> None:
    fault = "link@2:7:forward"
    found = retry("--layout", "tp2dp2", "--fault", fault)
    _assert_exact(found, fault)
    assert "connections cut" in _said(found, fault)


def _said(found: Drilled, fault: str) -> str:
    """What the fault did to the rank, in the words of the job's log."""
    lines = (found.directory / "broken.log").read_text().splitlines()
    return next(line for line in lines if f"drill: {fault}: " in line)


def _chains() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Every phase of a step in every layout and data type, one fault after the other in one job. Kinds and ranks change
    from job to job, so that each pair of two values of different columns occurs."""
    for (number, layout), (place, dtype) in product(enumerate(LAYOUTS), enumerate(DTYPES)):
        kinds = [KINDS[(phase + number + place) % 2] for phase in range(len(PHASES))]
        ranks = [RANKS[(phase + number + 3 * place) % 4] for phase in range(len(PHASES))]
        yield layout, dtype, in_a_row(kinds, ranks, PHASES)


def _assert_chain(found: Drilled, faults: Sequence[str]) -> None:
    """Each was repaired, by itself, in the step in which it came."""
    _assert_exact(found, *faults)
    assert_in_a_row(found.report["recoveries"], "retry", faults)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "dtype", "faults"), list(_chains()))
def test_matrix(retry: Callable[..., Drilled], layout: str, dtype: str, faults: tuple[str, ...]) -> None:
    job = ("--layout", layout, "--dtype", dtype, "--steps", "36")
    _assert_chain(retry(*job, *_arguments(*faults)), faults)


@pytest.mark.full
def test_communication_that_overlaps_computing(retry: Callable[..., Drilled]) -> None:
    """The gradient reduction runs inside the backward pass, the gather inside the next forward pass."""
    phases = ("data", "forward", "backward", "grad-reduce", "clip") * 2
    faults = in_a_row([KINDS[place // 5] for place in range(10)], [1, 2, 3, 0] * 3, phases)
    _assert_chain(retry("--steps", "36", *_arguments(*faults), "--", *OVERLAP), faults)


@pytest.mark.full
def test_two_ranks_of_different_shards_at_once(retry: Callable[..., Drilled]) -> None:
    faults = ("uce@0:7:forward", "uce@1:7:forward")
    _assert_exact(retry(*_arguments(*faults)), *faults)


@pytest.mark.full
def test_both_holders_of_a_shard_at_once_cannot_be_repaired(retry: Callable[..., Drilled]) -> None:
    """On dp4 with 2 replicas ranks 1 and 3 hold the same shard: nobody is left to give it, so nothing is made up."""
    found = retry(*_arguments("uce@1:7:forward", "uce@3:7:forward"))
    assert (found.status, found.report["verdict"]) == (5, "lost"), found.output


@pytest.mark.full
def test_one_fault_after_the_other(retry: Callable[..., Drilled]) -> None:
    faults = ("uce@1:4:backward", "link@0:7:clip", "uce@1:9:update")
    found = retry(*_arguments(*faults))
    _assert_exact(found, *faults)
    assert [recovery["strategy"] for recovery in found.report["recoveries"]] == ["retry"] * 3


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_defect_that_hits_no_live_tensor_moves_no_bytes(retry: Callable[..., Drilled], layout: str) -> None:
    fault = "uce-low@2:7:backward"
    found = retry("--layout", layout, "--fault", fault)
    _assert_exact(found, fault)
    orders = [order for incident in found.incidents for order in incident["orders"]]
    assert orders
    assert [order for order in orders if order["kind"] == "repair"] == []


@pytest.mark.full
def test_steps_that_the_loss_scaler_skips(retry: Callable[..., Drilled]) -> None:
    """The scale doubles until a step finds infinities, is skipped everywhere and halves it: so is every second step or
    third, and faults fall into such steps and between them."""
    faults = [f"{kind}@3:{step}:{phase}" for step, (kind, phase) in zip(SCALED, product(KINDS, BREAKS), strict=True)]
    job = ("--dtype", "fp16", "--steps", "20", *_arguments(*faults))
    found = retry(*job, "--", "--loss-scale-window", "1", "--hysteresis", "1")
    _assert_chain(found, faults)
    log = (found.directory / "broken.log").read_text()
    for step in (7, 10, 16):
        assert re.search(rf"iteration +{step}/ +20 .*number of skipped iterations: +1 ", log), step


@pytest.mark.full
def test_with_dropout_the_same_masks_are_drawn_again(retry: Callable[..., Drilled]) -> None:
    fault = "uce@2:7:backward"
    _assert_exact(retry("--fault", fault, "--", "--hidden-dropout", "0.2", "--attention-dropout", "0.2"), fault)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "tftrun"])
def test_both_launchers(retry: Callable[..., Drilled], launcher: str) -> None:
    _assert_exact(retry("--launcher", launcher), "uce@1:7:backward")


@pytest.mark.full
def test_what_cannot_be_repaired_is_saved(retry: Callable[..., Drilled]) -> None:
    found = retry("--fault", "kill@2:7:forward")
    report = found.report
    assert (found.status, report["verdict"], report["strategy"]) == (4, "degraded", "dump"), found.output
    assert (report["resumed_at"], report["steps_lost"], report["compared"]["different"]) == (6, 0, 0)


# ----------------------------------------------------------------------------- faults that come again, or in a repair


def _numbers(found: Drilled) -> list[int]:
    """How many tries each incident took, in order."""
    incidents = sorted(found.incidents, key=lambda incident: incident["opened"])
    return [len(incident["engine"]["repairs"]) for incident in incidents]


@pytest.mark.full
def test_a_fault_that_comes_three_times_is_repaired_three_times(retry: Callable[..., Drilled]) -> None:
    faults = ["uce@1:7:backward"] * 3
    found = retry(*_arguments(*faults))
    _assert_exact(found, *faults)
    assert [(each["strategy"], each["step"]) for each in found.report["recoveries"]] == [("retry", 6)] * 3
    assert _numbers(found) == [1, 1, 1]


@pytest.mark.full
def test_a_fault_that_comes_a_fourth_time_is_given_up_and_the_job_saved(retry: Callable[..., Drilled]) -> None:
    found = retry(*_arguments(*["uce@1:7:backward"] * 4))
    report = found.report
    assert (found.status, report["verdict"], report["strategy"]) == (4, "degraded", "dump"), found.output
    assert (report["steps_lost"], report["compared"]["different"]) == (0, 0)
    assert [each["strategy"] for each in report["recoveries"]] == ["retry", "retry", "retry", "dump"]
    assert report["recoveries"][-1]["step"] == 6
    last = max(found.incidents, key=lambda incident: incident["opened"])
    assert "3 repairs after step 6 did not help (memory of rank 1)" in last["summary"]


PAIRS = [
    *(("uce@1:{}:backward", f"{kind}@2:{{}}:{phase}")
      for kind, phase in product(("uce", "uce-low", "exc"), ("regroup", "rollback"))),
    ("uce@1:{}:backward", "link@2:{}:rollback"),
    ("uce@1:{}:backward", "uce@1:{}:repair"),
    ("uce@1:{}:update", "link@3:{}:repair"),
    ("link@0:{}:forward", "uce@3:{}:rollback"),
]  # fmt: skip


@pytest.mark.full
def test_a_fault_inside_a_repair_is_repaired_at_the_second_try(retry: Callable[..., Drilled]) -> None:
    steps = range(4, 4 + 3 * len(PAIRS), 3)
    faults = [fault.format(step) for step, pair in zip(steps, PAIRS, strict=True) for fault in pair]
    found = retry("--steps", "36", *_arguments(*faults))
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert sorted(report["faults_fired"]) == sorted(faults)
    assert (report["steps_lost"], report["processes_restarted"]) == (0, [])
    assert _numbers(found) == [2] * len(PAIRS)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", "segv"])
@pytest.mark.parametrize(("rank", "phase"), [(0, "regroup"), (1, "repair"), (3, "rollback")])
def test_a_rank_that_dies_in_a_repair_leaves_a_dump(
    retry: Callable[..., Drilled], kind: str, rank: int, phase: str
) -> None:
    """Rank 3 gives its shard to rank 1: it dies after that, or rank 1 does before it."""
    found = retry(*_arguments("uce@1:7:backward", f"{kind}@{rank}:7:{phase}"))
    report = found.report
    assert (found.status, report["verdict"], report["strategy"]) == (4, "degraded", "dump"), found.output
    assert (report["resumed_at"], report["steps_lost"], report["compared"]["different"]) == (6, 0, 0)


# ------------------------------------------------------------------------------------------ back to a checkpoint


def _assert_rewound(found: Drilled, *faults: str, lost: int = 2, rewinds: int = 1) -> None:
    """From the checkpoint of step 4, every 4th being saved; byte for byte at the end all the same."""
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert (report["strategy"], sorted(report["faults_fired"])) == ("rewind", sorted(faults))
    assert [(each["strategy"], each["step"]) for each in report["recoveries"]] == [("rewind", 4)] * rewinds
    assert (report["resumed_at"], report["steps_lost"], report["processes_restarted"]) == (4, lost, [])
    (compared,) = report["comparisons"]
    assert (compared["what"], compared["different"]) == ("end", 0)
    assert compared["tensors"] > 30


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_after_a_corrupted_gradient_all_go_back_to_the_last_checkpoint(
    retry: Callable[..., Drilled], layout: str, dtype: str
) -> None:
    fault = "nan@1:7:backward"
    found = retry("--layout", layout, "--dtype", dtype, "--fault", fault)
    _assert_rewound(found, fault)
    assert "becomes NaN" in _said(found, fault)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_verdict_of_megatrons_rerun_sends_all_back_to_the_last_checkpoint(
    retry: Callable[..., Drilled], layout: str
) -> None:
    """Megatron computes the step again, finds another result, and would end the job."""
    fault = "nan@1:7:backward"
    found = retry("--layout", layout, "--fault", fault, "--", "--rerun-mode", "validate_results")
    _assert_rewound(found, fault)
    (incident,) = found.incidents
    assert "Megatron's rerun would end the job with exit status 17" in incident["summary"]


@pytest.mark.full
def test_a_gradient_that_is_corrupted_again_goes_back_again(retry: Callable[..., Drilled]) -> None:
    faults = ["nan@2:7:backward"] * 2
    _assert_rewound(retry(*_arguments(*faults)), *faults, rewinds=2)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("phase", "lost"), [("backward", 2), ("update", 3)])
def test_without_replicas_a_lost_shard_comes_from_the_last_checkpoint(
    retry: Callable[..., Drilled], layout: str, phase: str, lost: int
) -> None:
    fault = f"uce@1:7:{phase}"
    _assert_rewound(retry("--layout", layout, "--replicas", "1", "--fault", fault), fault, lost=lost)


@pytest.mark.full
def test_without_replicas_a_broken_link_costs_no_step(retry: Callable[..., Drilled]) -> None:
    fault = "link@1:7:forward"
    _assert_exact(retry("--replicas", "1", "--fault", fault), fault)


@pytest.mark.full
def test_with_both_holders_hit_a_checkpoint_is_a_weaker_way_out(retry: Callable[..., Drilled]) -> None:
    found = retry("--save-interval", "4", *_arguments("uce@1:7:forward", "uce@3:7:forward"))
    report = found.report
    assert (found.status, report["verdict"], report["strategy"]) == (4, "degraded", "rewind"), found.output
    assert (report["resumed_at"], report["steps_lost"], report["compared"]["different"]) == (4, 2, 0)
