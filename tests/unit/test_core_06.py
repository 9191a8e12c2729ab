"""What belongs to Megatron core_r0.6.0 and needs no Megatron: its optimizer's file, flags of drills, refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_tft.faults import compare, releases
from mindspeed_tft.patches import megatron_06_kinds, megatron_06_unproved, megatron_unproved
from mindspeed_tft.recovery.files import DumpError

KEY = (torch.bfloat16, torch.float32)


def optimizer(parameters: dict[Any, tuple[int, int, int]]) -> Any:
    """Two buckets, of 8 and 6 elements; the second ends with one of padding."""
    sizes = [(0, 8, 8), (8, 6, 5)]
    made = [
        SimpleNamespace(grad_data=torch.zeros(numel), offset=offset, numel_unpadded=unpadded)
        for offset, numel, unpadded in sizes
    ]
    return SimpleNamespace(
        buffers=[SimpleNamespace(buckets=made, param_index_map=parameters)],
        gbuf_ranges=[{KEY: [{"param_map": {}}, {"param_map": {}}]}],
        per_bucket_numel=[{KEY: [8, 6]}],
        per_bucket_numel_unpadded=[{KEY: [8, 5]}],
    )


def shard(first: int, half: float) -> dict[str, torch.Tensor]:
    """Of an instance of two ranks: numbers from `first` on."""
    keys = ("param", "exp_avg", "exp_avg_sq")
    return {
        f"0/{bucket}/{key}": torch.arange(first, first + length, dtype=torch.float32) + half
        for key in keys
        for bucket, length in enumerate((4, 3))
    }


def test_the_file_has_each_bucket_whole_and_the_model_gets_what_is_in_it() -> None:
    one, other = torch.zeros(2, 3), torch.zeros(5, dtype=torch.bfloat16)
    of = optimizer({one: (2, 8, 0), other: (8, 13, 1)})
    state = megatron_06_kinds.assemble(of, [shard(0, 0.0), shard(10, 0.5)])
    assert state["per_bucket_numel_unpadded"] == [{KEY: [8, 5]}]
    first, second = state[0][KEY]["param"]
    assert first.tolist() == [0, 1, 2, 3, 10.5, 11.5, 12.5, 13.5]
    assert second.tolist() == [0, 1, 2, 10.5, 11.5, 12.5]
    assert state[0][KEY].keys() == {"param", "exp_avg", "exp_avg_sq"}
    megatron_06_kinds.copy_to_model(of, state)
    assert one.flatten().tolist() == [2, 3, 10.5, 11.5, 12.5, 13.5]
    assert other.tolist() == [0, 1, 2, 10.5, 11.5]


def test_shards_that_are_too_few_are_no_bucket() -> None:
    with pytest.raises(DumpError, match="bucket 0 has 8 elements, its shards 4"):
        megatron_06_kinds.assemble(optimizer({}), [shard(0, 0.0)])


def test_padding_is_compared_by_nobody_and_all_else_is(tmp_path: Path) -> None:
    """Megatron leaves there what was in the memory."""
    state = megatron_06_kinds.assemble(optimizer({}), [shard(0, 0.0), shard(10, 0.5)])
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    torch.save(state, tmp_path / "a" / "distrib_optim.pt")
    state[0][KEY]["exp_avg"][1][5] = float("nan")
    torch.save(state, tmp_path / "b" / "distrib_optim.pt")
    state[0][KEY]["exp_avg"][1][4] = 0.0
    torch.save(state, tmp_path / "c" / "distrib_optim.pt")
    same = compare.compare_checkpoints(tmp_path / "a", tmp_path / "b")
    assert (same.different, same.padding, same.tensors) == (0, 3, 6)
    other = compare.compare_checkpoints(tmp_path / "a", tmp_path / "c")
    assert other.different == 1 and "element 4" in str(other.first_difference)


def test_flags_that_this_release_does_not_know_are_left_out() -> None:
    words = ["--ckpt-format", "torch", "--seed", "1", "--eval-interval", "1000", "--eval-iters", "0"]
    assert releases.flags("0.19.2", words) == words
    found = releases.flags("0.6.0", words)
    assert found == [*words[2:-1], "1", "--use-mcore-models"]
    assert releases.flags("0.6.0", ["--eval-iters", "2"])[:2] == ["--eval-iters", "2"]
    assert not releases.knows("0.6.0", "--num-distributed-optimizer-instances")
    assert releases.knows("0.12.1", "--num-distributed-optimizer-instances")


PROVED = {
    "use_mcore_models": True,
    "use_dist_ckpt": False,
    "num_experts": None,
    "use_distributed_optimizer": True,
    "overlap_param_gather": False,
    "log_num_zeros_in_grad": False,
    "data_parallel_random_init": False,
    "pipeline_model_parallel_split_rank": None,
    "retro_add_retriever": False,
}


@pytest.mark.parametrize("attribute", PROVED)
def test_what_is_not_proved_on_it_is_refused(attribute: str) -> None:
    table = megatron_06_unproved.UNPROVED
    assert {option.attribute for option in table} == PROVED.keys()
    assert megatron_unproved.first(SimpleNamespace(**PROVED), table) is None
    wrong = {**PROVED, attribute: 2 if PROVED[attribute] is None else not PROVED[attribute]}
    found = megatron_unproved.first(SimpleNamespace(**wrong), table)
    assert found is not None and found.attribute == attribute and found.reason and found.remedy
