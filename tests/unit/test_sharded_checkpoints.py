"""Format torch_dist: pieces of several writers become one checkpoint that torch reads, and the oracle sees a byte."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from mindspeed_tft.faults import compare, control, torch_dist
from mindspeed_tft.patches import megatron_torch_dist
from mindspeed_tft.recovery import files

WEIGHT = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"
NUMELS = "optimizer.distributed.dp_group_idx_0.per_bucket_numel"
ARGS = argparse.Namespace(data_parallel_size=4, num_distributed_optimizer_instances=2, save="/a", lr=1e-3)


@dataclass
class ShardedTensor:
    """As Megatron's own, which cannot be imported where no device is (drills write with that one)."""

    key: str
    data: torch.Tensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0
    flattened_range: slice | None = None
    axis_fragmentations: tuple[int, ...] = (1,)

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        pairs = zip(self.global_offset, self.local_shape, strict=True)
        return tuple(offset // size for offset, size in pairs)


@dataclass
class ShardedObject:
    key: str
    data: Any

    @property
    def unique_key(self) -> str:
        return f"{self.key}/shard_0_1"


def _part(directory: Path, name: str, items: list[Any]) -> Metadata:
    """What one writer leaves: its data file, and its piece of the index."""
    piece = Metadata({}, storage_data={})
    path = directory / f"{name}.distcp"
    files.write_verified(
        path,
        lambda file: megatron_torch_dist._write_items(items, megatron_torch_dist.Counting(file), path.name, piece),
    )
    return pickle.loads(pickle.dumps(piece))  # type: ignore[no-any-return]


def _index(directory: Path, pieces: list[Metadata]) -> Path:
    (directory / torch_dist.INDEX).write_bytes(pickle.dumps(megatron_torch_dist.merge(pieces)))
    return directory


def _rows(rank: int, tensor: torch.Tensor = WEIGHT) -> Any:
    """Half of the rows of the weight."""
    half = tensor.shape[0] // 2
    mine = tensor[rank * half : (rank + 1) * half]
    return ShardedTensor("weight", mine, tuple(mine.shape), tuple(tensor.shape), (rank * half, 0))


def _slices(key: str, whole: torch.Tensor, cuts: list[int]) -> list[Any]:
    """A bucket as Megatron writes it: one piece for each parameter and gap of each rank."""
    ends = [*cuts[1:], whole.numel()]
    return [
        ShardedTensor(f"{BUCKET}.{key}", whole[begin:end], (end - begin,), (whole.numel(),), (begin,))
        for begin, end in zip(cuts, ends, strict=True)
    ]


def _bucket(content: dict[str, torch.Tensor], cuts: list[int]) -> list[Any]:
    common = {"args": ARGS, "iteration": 7}
    numels = ShardedObject(NUMELS, [{(torch.float32, torch.float32): [256]}])
    return [
        item for key, whole in content.items() for item in _slices(key, whole, cuts)
    ] + [numels, ShardedObject("common_state", common)]  # fmt: skip


def _checkpoint(directory: Path, content: dict[str, torch.Tensor], cuts: list[int]) -> Path:
    directory.mkdir()
    return _index(directory, [_part(directory, "only", _bucket(content, cuts))])


def test_what_two_writers_wrote_is_read_by_torch(tmp_path: Path) -> None:
    pieces = [_part(tmp_path, f"part{rank}", [_rows(rank), ShardedObject(f"rng{rank}", [rank])]) for rank in range(2)]
    _index(tmp_path, pieces)
    found = {"weight": torch.zeros(64, 64)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(str(tmp_path)), no_dist=True)
    assert torch.equal(found["weight"], WEIGHT)
    content = compare.open_sharded(tmp_path)
    assert torch.equal(content.value("weight"), WEIGHT)
    assert [content.value(f"rng{rank}/shard_0_1") for rank in range(2)] == [[[0]], [[1]]]
    size = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert WEIGHT.nbytes < size < WEIGHT.nbytes + 8192  # a view was not written with the whole storage below it


def test_the_state_of_a_parameter_is_stored_flat_as_megatron_0_12_reads_it(tmp_path: Path) -> None:
    """A moment of a weight that two tensor-parallel ranks cut by columns: a tensor of two pieces, each flat."""
    key = "optimizer.state.exp_avg.weight"
    halves = [WEIGHT[:, :32].reshape(-1), WEIGHT[:, 32:].reshape(-1)]
    pieces = []
    for rank, half in enumerate(halves):
        flat = ShardedTensor(
            key, half, (64, 32), (64, 64), (0, 32 * rank), flattened_range=slice(0, 2048), axis_fragmentations=(1, 2)
        )
        pieces.append(_part(tmp_path, f"part{rank}", [flat, _rows(rank)]))
    content = compare.open_sharded(_index(tmp_path, pieces))
    assert content.entries[key].size == torch.Size((1, 2, 2048))
    assert torch.equal(content.value(key), torch.stack(halves)[None])
    index = pickle.loads((tmp_path / torch_dist.INDEX).read_bytes())
    assert index.mcore_data == {key: {"nd_reformulated_orig_global_shape": (64, 64)}}
    assert torch.equal(content.value("weight"), WEIGHT)


def test_what_two_parts_hold_counts_once(tmp_path: Path) -> None:
    pieces = [_part(tmp_path, f"part{n}", [_rows(0), _rows(1), ShardedObject("rng", [n])]) for n in range(2)]
    content = compare.open_sharded(_index(tmp_path, pieces))
    assert torch.equal(content.value("weight"), WEIGHT)
    assert content.value("rng/shard_0_1") == [[0]]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ([], "has 4096 elements, its parts wrote 2048"),
        ([_rows(1, WEIGHT.double())], "disagree about its size or type"),
        ([_rows(1, torch.ones(64, 32))], "disagree about its size or type"),
        ([_rows(1), ShardedTensor("weight", WEIGHT[16:32], (16, 64), (64, 64), (16, 0))], "parts wrote 5120"),
    ],
)
def test_parts_that_do_not_fit_make_no_checkpoint(tmp_path: Path, second: list[Any], why: str) -> None:
    pieces = [_part(tmp_path, "first", [_rows(0)]), _part(tmp_path, "second", second)]
    with pytest.raises(files.DumpError, match=why):
        megatron_torch_dist.merge(pieces)


# The bucket of the tests below, on two ranks that hold 128 elements each: a parameter of 70 elements, a gap up to 128,
# another parameter from there on, of 72 elements; nothing is saved behind it.
CUTS = [0, 70, 128]


def _moments() -> dict[str, torch.Tensor]:
    return {"param": torch.randn(200), "exp_avg": torch.randn(200)}


def test_how_many_pieces_there_are_means_nothing(tmp_path: Path) -> None:
    content = _moments()
    a, b = (_checkpoint(tmp_path / name, content, cuts) for name, cuts in (("a", [0]), ("b", CUTS)))
    result = compare.compare_checkpoints(a, b)
    assert result.equal, result.differences
    assert (result.tensors, result.bytes, result.padding) == (2, 2 * 200 * 4, 2 * 58)


def test_a_gap_is_left_out_and_counted_whatever_is_in_it(tmp_path: Path) -> None:
    content = _moments()
    other = {key: value.clone() for key, value in content.items()}
    other["param"][70:128] = 7
    result = compare.compare_checkpoints(
        _checkpoint(tmp_path / "a", content, CUTS), _checkpoint(tmp_path / "b", other, [0])
    )
    assert result.equal, result.differences
    assert result.padding == 2 * 58


@pytest.mark.parametrize("element", [0, 69, 128, 199])
def test_the_elements_beside_a_gap_are_compared(tmp_path: Path, element: int) -> None:
    content = _moments()
    other = {key: value.clone() for key, value in content.items()}
    other["exp_avg"][element] += 1
    a, b = _checkpoint(tmp_path / "a", content, CUTS), _checkpoint(tmp_path / "b", other, CUTS)
    result = compare.compare_checkpoints(a, b)
    assert result.different == 1
    assert str(result.first_difference).startswith(f"{BUCKET}.exp_avg")


@pytest.mark.parametrize(
    ("cuts", "gaps"),
    [
        ([0, 64, 128, 192], []),  # parameters without gaps
        ([0, 70, 128], [(70, 128)]),
        ([0, 100, 128, 130, 192], [(100, 128), (130, 192)]),
        ([0, 110, 140, 180], [(110, 140)]),  # what is not aligned behind a gap is one, unless it is too long
    ],
)
def test_gaps_are_told_from_the_pieces(tmp_path: Path, cuts: list[int], gaps: list[tuple[int, int]]) -> None:
    content = compare.open_sharded(_checkpoint(tmp_path / "a", {"param": torch.zeros(230)}, cuts))
    assert [gap for gap in content.padding(f"{BUCKET}.param") if gap in gaps] == gaps
    assert all(end - begin < torch_dist.ALIGNED for begin, end in content.padding(f"{BUCKET}.param"))


def test_one_changed_byte_is_found(tmp_path: Path) -> None:
    a = _checkpoint(tmp_path / "a", _moments(), CUTS)
    assert "exp_avg" in control.damaged_copy(a, tmp_path / "b")
    result = compare.compare_checkpoints(a, tmp_path / "b")
    assert result.different == 1
    assert "exp_avg" in str(result.first_difference)


def _lose_a_file(directory: Path) -> None:
    (directory / "only.distcp").rename(directory / "other.distcp")


def _lose_the_index(directory: Path) -> None:
    (directory / torch_dist.INDEX).unlink()


def _lose_a_piece(directory: Path) -> None:
    index = pickle.loads((directory / torch_dist.INDEX).read_bytes())
    lost = next(place for place in index.storage_data if place.fqn.endswith(".exp_avg"))
    del index.storage_data[lost]
    (directory / torch_dist.INDEX).write_bytes(pickle.dumps(index))


def _forget_a_name(directory: Path) -> None:
    index = pickle.loads((directory / torch_dist.INDEX).read_bytes())
    index.state_dict_metadata = {k: v for k, v in index.state_dict_metadata.items() if not k.endswith(".exp_avg")}
    (directory / torch_dist.INDEX).write_bytes(pickle.dumps(index))


@pytest.mark.parametrize("damage", [_lose_a_file, _lose_the_index, _lose_a_piece, _forget_a_name])
def test_what_cannot_be_read_is_a_difference(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    content = _moments()
    a, b = (_checkpoint(tmp_path / name, content, CUTS) for name in ("a", "b"))
    assert compare.compare_checkpoints(a, b).equal
    damage(b)
    assert not compare.compare_checkpoints(a, b).equal
    assert not compare.compare_checkpoints(b, a).equal


def test_a_code_carrying_index_runs_nothing(tmp_path: Path) -> None:
    a, b = (_checkpoint(tmp_path / name, _moments(), CUTS) for name in ("a", "b"))
    (b / torch_dist.INDEX).write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    assert not compare.compare_checkpoints(a, b).equal
    assert not (tmp_path / "ran").exists()
