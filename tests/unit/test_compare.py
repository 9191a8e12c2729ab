"""The oracle sees a single byte, and never says equal when it looked at nothing."""

from __future__ import annotations

import argparse
import enum
import math
import random
import shutil
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_tft.faults import compare, control
from mindspeed_tft.recovery import files

NAN = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]  # a NaN whose payload is not the usual one


class Backend(enum.Enum):
    LOCAL = 1
    FUSED = 2


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value


def _model() -> dict[str, Any]:
    weights = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    state = OrderedDict(weight=weights, half=torch.ones(5, dtype=torch.bfloat16), empty=torch.empty(0))
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    generator = np.random.RandomState(7)
    return {
        "args": argparse.Namespace(
            save="/a",
            lr=1e-3,
            consumed_train_samples=96,
            params_dtype=torch.bfloat16,
            backend=Backend.LOCAL,
            layers=[1, 2],
        ),
        "iteration": 6,
        "model": state,
        "opt_param_scheduler": {"num_steps": 96, "max_lr": 1e-3},
        "rng_state": [
            {
                "random_rng_state": random.Random(3).getstate(),
                "np_rng_state": generator.get_state(),
                "torch_rng_state": torch.zeros(16, dtype=torch.uint8),
                "rng_tracker_states": {"model-parallel-rng": torch.ones(16, dtype=torch.uint8)},
            }
        ],
        "num_floating_point_operations_so_far": 3.5e9,
        "zero": torch.tensor([0.0, 1.0]),
        "not_a_number": math.nan,
        "custom": Custom(4),
    }


def _optimizer() -> dict[Any, Any]:
    return {
        "buckets_coalesced": True,
        0: {(torch.bfloat16, torch.float32): {"param": torch.randn(20, generator=torch.Generator().manual_seed(1))}},
    }


def _write(path: Path, change: Callable[[dict[str, Any], dict[Any, Any]], None] | None = None) -> Path:
    """A checkpoint as Megatron lays it out, changed in one thing."""
    model, optimizer = _model(), _optimizer()
    if change is not None:
        change(model, optimizer)
    for rank in ("mp_rank_00", "mp_rank_01"):
        (path / rank).mkdir(parents=True)
        torch.save(model, path / rank / "model_optim_rng.pt")
        torch.save(optimizer, path / rank / "distrib_optim.pt")
    return path


def test_equal_checkpoints_are_equal_and_everything_was_looked_at(tmp_path: Path) -> None:
    result = compare.compare_checkpoints(_write(tmp_path / "a"), _write(tmp_path / "b"))
    assert result.equal, result.differences
    assert result.files == 4
    # per rank: 3 of the model, 1 of the optimizer, 2 + 1 of the generators, `zero`
    assert result.tensors == 2 * 8
    assert result.bytes == 2 * (48 + 10 + 0 + 80 + 16 + 16 + 624 * 4 + 8)
    assert result.padding == 0


def _set(path: str, value: Any) -> Callable[[dict[str, Any], dict[Any, Any]], None]:
    def change(model: dict[str, Any], optimizer: dict[Any, Any]) -> None:
        exec(f"{path} = value", {"model": model, "optimizer": optimizer, "value": value, "torch": torch})

    return change


RNG = "model['rng_state'][0]"


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("model['model']['weight'][1, 2]", 6.0000005, "['weight']: byte 24 of 48 (element 6)"),
        ("model['model']['weight']", torch.arange(12, dtype=torch.float64).reshape(3, 4), "torch.float32"),
        ("model['model']['weight']", torch.arange(12, dtype=torch.float32), "(3, 4)"),
        ("model['model']['half'][4]", 1.0078125, "['half']: byte 8 of 10 (element 4)"),
        ("model['model']['more']", torch.ones(1), "['more']: missing on the first side"),
        ("model['model']._metadata", OrderedDict({"": {"version": 2}}), "['version']"),
        ("model['zero'][0]", -0.0, "['zero']: byte 3"),
        ("model['not_a_number']", NAN, "['not_a_number']"),
        ("model['iteration']", 7, "['iteration']"),
        ("model['iteration']", 6.0, "['iteration']: int 6 against float 6.0"),
        ("model['num_floating_point_operations_so_far']", 3.5e9 + 1e-6, "floating_point"),
        ("model['opt_param_scheduler']['num_steps']", 112, "['num_steps']"),
        ("model['args'].lr", 1.0000000000000002e-3, "['lr']"),
        ("model['args'].consumed_train_samples", 112, "['consumed_train_samples']"),
        ("model['args'].params_dtype", torch.float16, "['params_dtype']"),
        ("model['args'].backend", Backend.FUSED, "['backend']"),
        ("model['args'].layers", (1, 2), "['layers']"),
        ("model['args'].new_flag", 1, "['new_flag']: missing on the first side"),
        ("model['custom']", Custom(5), "['custom']"),
        (f"{RNG}['random_rng_state']", random.Random(4).getstate(), "['random_rng_state']"),
        (f"{RNG}['np_rng_state']", np.random.RandomState(8).get_state(), "['np_rng_state']"),
        (f"{RNG}['torch_rng_state'][15]", 1, "['torch_rng_state']: byte 15 of 16"),
        (f"{RNG}['rng_tracker_states']['model-parallel-rng'][0]", 0, "['model-parallel-rng']: byte 0"),
        ("optimizer[0][(torch.bfloat16, torch.float32)]['param'][19]", 5.0, "['param']: byte 76 of 80"),
    ],
)
def test_every_difference_is_found_and_named(tmp_path: Path, path: str, value: Any, where: str) -> None:
    result = compare.compare_checkpoints(_write(tmp_path / "a"), _write(tmp_path / "b", _set(path, value)))
    assert not result.equal
    assert result.first_difference is not None
    assert where in result.first_difference, result.differences
    assert result.first_difference.startswith("mp_rank_00/")


def test_both_values_are_shown(tmp_path: Path) -> None:
    changed = _write(tmp_path / "b", _set("model['zero'][1]", 2.0))
    result = compare.compare_checkpoints(_write(tmp_path / "a"), changed)
    assert result.first_difference is not None
    assert "1.0 [0000803f] against 2.0 [00000040]" in result.first_difference


def test_what_may_differ_is_listed_with_its_reason(tmp_path: Path) -> None:
    a = _write(tmp_path / "a")
    for name in ("save", "load", "rank", "tft_deadline", "optimizer_replica_num"):
        b = _write(tmp_path / name, _set(f"model['args'].{name}", "elsewhere"))
        assert compare.compare_checkpoints(a, b).equal
    assert all(reason.strip() for reason in compare.IGNORED_ARGS.values())
    assert all(reason.strip() for reason in compare.IGNORED_FILES.values())


def test_the_manifest_of_a_dump_is_no_difference_but_any_other_file_is(tmp_path: Path) -> None:
    a, b = _write(tmp_path / "a"), _write(tmp_path / "b")
    (b / files.MANIFEST).write_text("{}")
    assert compare.compare_checkpoints(a, b).equal
    (b / "mp_rank_00" / "more.pt").write_bytes(b"")
    result = compare.compare_checkpoints(a, b)
    assert result.first_difference is not None
    assert "mp_rank_00/more.pt: only in" in result.first_difference


def test_a_missing_rank_is_a_difference(tmp_path: Path) -> None:
    a, b = _write(tmp_path / "a"), _write(tmp_path / "b")
    shutil.rmtree(b / "mp_rank_01")
    assert compare.compare_checkpoints(a, b).different == 2


def test_two_empty_directories_are_never_equal(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    result = compare.compare_checkpoints(tmp_path / "a", tmp_path / "b")
    assert not result.equal
    assert "nothing was compared" in str(result.first_difference)


def test_one_flipped_byte_in_the_file_is_found(tmp_path: Path) -> None:
    a = _write(tmp_path / "a")
    told = control.damaged_copy(a, tmp_path / "b")
    result = compare.compare_checkpoints(a, tmp_path / "b")
    assert result.different == 1, told
    assert "byte 40 of 80" in str(result.first_difference)


def test_every_flipped_byte_of_a_file_is_found_or_changes_nothing_that_is_read(tmp_path: Path) -> None:
    """Also in the pickle and in the zip's own bookkeeping: never a crash, and tensor bytes are never missed."""
    a, b = _write(tmp_path / "a"), _write(tmp_path / "b")
    target = b / "mp_rank_00" / "distrib_optim.pt"
    whole = target.read_bytes()
    payload = whole.index(_optimizer()[0][(torch.bfloat16, torch.float32)]["param"].numpy().tobytes())
    for position in sorted({*range(0, len(whole), 61), *range(payload, payload + 80)}):
        target.write_bytes(whole[:position] + bytes([whole[position] ^ 0x01]) + whole[position + 1 :])
        result = compare.compare_checkpoints(a, b)
        if payload <= position < payload + 80:
            assert not result.equal, position


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    for name in ("a", "b"):
        _write(tmp_path / name, _set("model['evil']", Evil()))
    assert compare.compare_checkpoints(tmp_path / "a", tmp_path / "b").equal
    assert not (tmp_path / "ran").exists()


def test_a_save_directory_stands_for_the_checkpoint_it_tracks(tmp_path: Path) -> None:
    a = _write(tmp_path / "a" / "iter_0000006")
    (tmp_path / "a" / compare.TRACKER).write_text("6\n")
    assert compare.checkpoint_dir(tmp_path / "a") == a
    assert compare.compare_checkpoints(tmp_path / "a", a).equal
    (tmp_path / "a" / compare.TRACKER).write_text("release")
    with pytest.raises(compare.CheckpointError, match="'release' is no iteration"):
        compare.checkpoint_dir(tmp_path / "a")


@pytest.mark.parametrize(("changed", "status"), [(False, 0), (True, 3)])
def test_the_command_says_it_with_its_exit_status(tmp_path: Path, changed: bool, status: int) -> None:
    a = _write(tmp_path / "a")
    b = _write(tmp_path / "b", _set("model['iteration']", 7) if changed else None)
    command = [sys.executable, "-m", "mindspeed_tft.faults.compare", str(a), str(b)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert "16 tensors" in ended.stdout
    assert ("['iteration']: int 6 against int 7" in ended.stdout) is changed


def test_a_directory_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left:
        compare.main([str(tmp_path / "none"), str(tmp_path)])
    assert left.value.code == 2
