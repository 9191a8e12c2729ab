"""Megatron's default checkpoint format: dumps that stock Megatron resumes from, repairs between its periodic saves.

A drill compares the dump with Megatron's own checkpoint of the same step, whatever files the two are spread over, and
the end of the run that goes on from it with the unbroken run's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_tft.faults import compare, control
from mindspeed_tft.recovery import files

from .conftest import Drilled

pytestmark = pytest.mark.megatron

FORMAT = ("--ckpt-format", "torch_dist")
ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
# Several buckets, and sizes between which Megatron leaves gaps.
UNEVEN = ("--hidden-size", "100", "--ffn-hidden-size", "200", "--ddp-bucket-size", "20000", *OVERLAP)

RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
GAPS = ("tp2dp2", "ep2dp4")  # the sizes of these do not add up to a multiple of what Megatron aligns to

EMBEDDINGS = "embedding.word_embeddings.weight"


def _arguments(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--fault", fault)]


def _assert_exact(found: Drilled, strategy: str, *compared: str, gaps: bool = False) -> None:
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert report["strategy"] == strategy
    assert {entry["what"] for entry in report["comparisons"]} == set(compared)
    for entry in report["comparisons"]:
        assert entry["different"] == 0
        assert entry["tensors"] > 20 and entry["bytes"] > 1_000_000
        # The sizes of most drills' models are multiples of what Megatron aligns to.
        assert (entry["padding"] > 0) == gaps
    assert report["processes_left_behind"] == []


def _assert_dumped(found: Drilled, step: int = 6, gaps: bool = False) -> Path:
    """The dump's directory."""
    _assert_exact(found, "dump", "dump", "end", gaps=gaps)
    assert found.report["resumed_at"] == step
    dump = compare.checkpoint_dir(found.directory / "dump")
    assert {".metadata", "metadata.json"} < set(files.verify_checkpoint(dump)["files"])
    assert not list((found.directory / "dump").glob(".tft-dump-*"))
    return dump


def test_the_first_stage_is_written_without_the_rank_that_broke(drill: Callable[..., Drilled]) -> None:
    """Two stages with tied embeddings: both hold them, and the dump has them once."""
    fault = ("--layout", "pp2dp2", "--dtype", "bf16", "--fault", "kill@0:7:update")
    dump = _assert_dumped(drill(*fault, "--", *FORMAT), 7)
    content = compare.open_sharded(dump)
    assert {stored.file for name, stored in content.pieces() if name == EMBEDDINGS} == {"tp0-pp0.distcp"}
    control.damaged_copy(dump, dump.parent.parent / "damaged")
    assert compare.compare_checkpoints(dump, dump).equal
    assert compare.compare_checkpoints(dump, dump.parent.parent / "damaged").different == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "faults", [("kill@1:7:update",), ("kill@2:7:backward",), ("kill@0:7:update", "kill@1:7:update")]
)
def test_data_parallel_ranks(drill: Callable[..., Drilled], faults: tuple[str, ...]) -> None:
    step = 7 if faults[0].endswith("update") else 6
    _assert_dumped(drill(*_arguments(*faults), "--", *FORMAT), step)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2dp2", "pp2dp2", "tp2pp2dp2"])
@pytest.mark.parametrize("extra", [(), (RESHARDABLE,), OVERLAP])
def test_layouts_and_sharding_types(drill: Callable[..., Drilled], layout: str, extra: tuple[str, ...]) -> None:
    job = ("--layout", layout, "--dtype", "bf16", "--fault", "kill@1:7:backward")
    # The other layout has each parameter for itself: gaps are only where these are looked for.
    _assert_dumped(drill(*job, "--", *FORMAT, *extra), gaps=layout in GAPS and RESHARDABLE not in extra)


@pytest.mark.full
@pytest.mark.parametrize(
    "extra",
    [
        ("--verify-integrity", "--no-ckpt-fully-parallel-save", "--data-parallel-random-init"),
        ("--ckpt-fully-parallel-load", "--untie-embeddings-and-output-weights", "--rerun-mode", "disabled"),
    ],
)
def test_flags_of_the_format(drill: Callable[..., Drilled], extra: tuple[str, ...]) -> None:
    _assert_dumped(drill("--fault", "kill@2:7:backward", "--", *FORMAT, *extra))


@pytest.mark.full
@pytest.mark.parametrize("job", [("--dtype", "bf16"), ("--layout", "ep2dp4")])
def test_optimizers_that_are_not_sharded(drill: Callable[..., Drilled], job: tuple[str, ...]) -> None:
    _assert_dumped(drill(*job, "--no-distributed-optimizer", "--fault", "kill@1:7:update", "--", *FORMAT), 7)


@pytest.mark.full
@pytest.mark.parametrize("extra", [(), (RESHARDABLE,)])
def test_what_is_of_no_expert_is_written_once(drill: Callable[..., Drilled], extra: tuple[str, ...]) -> None:
    job = ("--layout", "ep2dp4", "--fault", "kill@1:7:update")
    dump = _assert_dumped(drill(*job, "--", *FORMAT, *extra), 7, gaps=not extra)
    first, second = ((dump / f"tp0-pp0-ep{rank}.distcp").stat().st_size for rank in range(2))
    held = {stored.file for name, stored in compare.open_sharded(dump).pieces() if "expert" not in name}
    assert second < 0.8 * first and EMBEDDINGS in {name for name, _ in compare.open_sharded(dump).pieces()}
    assert "tp0-pp0-ep0.distcp" in held


@pytest.mark.full
def test_buckets_with_gaps(drill: Callable[..., Drilled]) -> None:
    _assert_dumped(drill("--fault", "kill@2:7:backward", "--", *FORMAT, *UNEVEN), gaps=True)


@pytest.mark.full
def test_fp16_with_its_loss_scaler(drill: Callable[..., Drilled]) -> None:
    _assert_dumped(drill("--dtype", "fp16", "--fault", "kill@2:7:backward", "--", *FORMAT))


@pytest.mark.full
def test_a_repair_between_periodic_saves(drill: Callable[..., Drilled]) -> None:
    fault = ("--preset", "retry", "--save-interval", "3", "--fault", "uce@1:7:backward")
    _assert_exact(drill(*fault, "--", *FORMAT), "retry", "end")


@pytest.mark.full
@pytest.mark.parametrize("fault", ["kill@1:7:backward", "kill@0:6:save"])
def test_a_newcomer_saves_with_the_others(drill: Callable[..., Drilled], fault: str) -> None:
    found = drill("--preset", "recover", "--save-interval", "3", "--fault", fault, "--", *FORMAT)
    _assert_exact(found, "recover", "end")


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "phase"), [("dp4", "backward"), ("tp2dp2", "backward"), ("ep2dp4", "update"), ("ep2dp4", "param-gather")]
)
def test_back_to_a_checkpoint(drill: Callable[..., Drilled], layout: str, phase: str) -> None:
    """Without replicas: all ranks load the last checkpoint, in the same job. Experts may have counted one update
    less than the rest."""
    fault = ("--preset", "retry", "--replicas", "1", "--layout", layout, "--fault", f"uce@1:7:{phase}")
    _assert_exact(drill(*fault, "--", *FORMAT), "rewind", "end", gaps=layout in GAPS)


@pytest.mark.full
@pytest.mark.parametrize("step", [6, 7])
def test_a_save_in_the_background_is_given_up_for_the_dump(drill: Callable[..., Drilled], step: int) -> None:
    """The rank dies in a step in which the checkpoint of the step before is still being written, or finalized."""
    fault = ("--save-interval", "3", "--fault", f"kill@1:{step + 1}:forward")
    dump = _assert_dumped(drill(*fault, "--", *FORMAT, *ASYNC), step)
    manifest = json.loads((dump / files.MANIFEST).read_text())
    assert sorted(manifest["files"]) == [".metadata", "metadata.json", "tp0-pp0.distcp"]


@pytest.mark.full
@pytest.mark.parametrize(("preset", "fault"), [("retry", "uce@1:7:forward"), ("recover", "kill@1:7:forward")])
def test_saves_in_the_background_go_on_after_a_repair(drill: Callable[..., Drilled], preset: str, fault: str) -> None:
    found = drill("--preset", preset, "--save-interval", "3", "--fault", fault, "--", *FORMAT, *ASYNC)
    _assert_exact(found, preset if preset == "retry" else "recover", "end")
