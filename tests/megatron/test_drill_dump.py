"""Real Megatron, a real fault, every byte: a rank breaks, the dump is what stock Megatron would have saved.

The few that run always take different ways through the dump; marker `full` runs the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from .conftest import Drilled

pytestmark = pytest.mark.megatron

LAYOUTS = ("dp4", "tp2dp2", "pp2dp2")
PHASES = ("data", "forward", "backward", "grad-reduce", "clip", "commit", "update", "param-gather")
KINDS = ("kill", "term", "segv", "exc")
# Past the commit point every rank had final gradients: the step of the fault is finished and saved.
SAVED = {"commit": (6, 7), "update": (7,), "param-gather": (7,)}


def _matrix() -> Iterator[tuple[str, str, str, int, str]]:
    """Every kind in every phase; layout, data type and rank so that every pair of values meets somewhere."""
    for (number, kind), (place, phase) in product(enumerate(KINDS), enumerate(PHASES)):
        layout, dtype = LAYOUTS[(number + place) % 3], ("fp32", "bf16")[(number + place // 2) % 2]
        yield kind, layout, dtype, (number + place + place // 4) % 4, phase


def _assert_exact(found: Drilled, fault: str) -> None:
    report, phase = found.report, fault.rpartition(":")[2]
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert report["faults_fired"] == [fault]
    # A rank that is asked to end trains on until the stop arrives.
    assert report["resumed_at"] in ((6, 7, 8) if fault.startswith("term") else SAVED.get(phase, (6,)))
    assert report["steps_lost"] == 0
    assert report["compared"]["different"] == 0
    # Both comparisons looked at both files: weights, main weights, both moments, and the generators.
    assert {entry["what"] for entry in report["comparisons"]} == {"dump", "end"}
    assert all(entry["tensors"] > 30 and entry["bytes"] > 1_000_000 for entry in report["comparisons"])
    assert report["processes_left_behind"] == []
    assert report["seconds"]["detect"] < 1.0


def test_a_killed_rank_loses_nothing(drill: Callable[..., Drilled]) -> None:
    found = drill()
    _assert_exact(found, "kill@1:7:backward")
    report = found.report
    assert (report["strategy"], report["step_at_fault"], report["resumed_at"]) == ("dump", 7, 6)
    assert report["processes_restarted"] == [0, 1, 2, 3]
    assert Path(report["incident"]).is_file()
    last = (found.directory / "broken.log").read_text().strip().splitlines()[-3:]
    assert "Step 6 is saved in" in " ".join(last)
    assert "--load" in last[1] and last[2].startswith("[mindspeed_tft] incident: ")
    assert _flipped_byte_is_found(found.directory)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "fault"), [("dp4", "uce@1:7:backward"), ("tp2dp2", "uce@0:7:update")])
def test_a_rank_whose_memory_is_broken_gives_nothing(drill: Callable[..., Drilled], layout: str, fault: str) -> None:
    """It lives, and reads garbage: the other holder of its shard is used, though nobody would repair anything here."""
    found = drill("--layout", layout, "--fault", fault)
    _assert_exact(found, fault)
    (incident,) = found.incidents
    assert "device" in {each["kind"] for each in incident["faults"]}


def _flipped_byte_is_found(directory: Path) -> bool:
    from mindspeed_tft.faults import compare, control

    dump = compare.checkpoint_dir(directory / "dump")
    control.damaged_copy(dump, directory / "damaged")
    assert compare.compare_checkpoints(dump, dump).equal
    return compare.compare_checkpoints(dump, directory / "damaged").different == 1


def test_the_update_of_a_step_is_finished_without_the_rank_that_broke_in_it(drill: Callable[..., Drilled]) -> None:
    fault = "kill@0:7:update"
    _assert_exact(drill("--layout", "pp2dp2", "--dtype", "bf16", "--fault", fault), fault)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout", "dtype", "rank", "phase"), list(_matrix()))
def test_matrix(drill: Callable[..., Drilled], kind: str, layout: str, dtype: str, rank: int, phase: str) -> None:
    fault = f"{kind}@{rank}:7:{phase}"
    _assert_exact(drill("--layout", layout, "--dtype", dtype, "--fault", fault), fault)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "tftrun"])
def test_both_launchers(drill: Callable[..., Drilled], launcher: str) -> None:
    _assert_exact(drill("--launcher", launcher), "kill@1:7:backward")


@pytest.mark.full
def test_fp16_with_its_loss_scaler(drill: Callable[..., Drilled]) -> None:
    fault = "kill@2:9:commit"
    found = drill("--dtype", "fp16", "--fault", fault)
    assert (found.status, found.report["compared"]["different"]) == (0, 0), found.output


@pytest.mark.full
def test_eight_ranks_in_three_axes(drill: Callable[..., Drilled]) -> None:
    fault = "kill@5:7:backward"
    _assert_exact(drill("--layout", "tp2pp2dp2", "--fault", fault), fault)


@pytest.mark.full
def test_flags_for_megatron(drill: Callable[..., Drilled]) -> None:
    """Overlapped communication moves the gradient reduction into the backward pass, the gather into the next step."""
    fault = "kill@1:7:backward"
    found = drill("--fault", fault, "--", "--overlap-grad-reduce", "--overlap-param-gather")
    assert (found.status, found.report["compared"]["different"]) == (0, 0), found.output
