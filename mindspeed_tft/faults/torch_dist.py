"""Read a checkpoint of format `torch_dist` for the oracle: every tensor in full, every object, whoever wrote what.

Which file holds what, and in how many pieces, is the writers' choice and means nothing. So the content is put together
first, by the index that torch's own reader uses. No process group is needed, and no code of a file runs.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

INDEX = ".metadata"
DATA_SUFFIX = ".distcp"

Load = Callable[[Any], Any]  # reads what `torch.save` wrote to a binary file

# A bucket of the optimizer in its own layout, and one of its tensors.
_BUCKET = re.compile(
    r"(?P<group>.*optimizer\.distributed\.dp_group_idx_\d+)\.gbuf_idx_(?P<buffer>\d+)\.dtype_.*"
    r"\.bucket_idx_(?P<bucket>\d+)\.\w+"
)
ALIGNED = 64  # elements: where a parameter may begin in a bucket


class UnreadableError(ValueError):
    """The index and the data files are no whole checkpoint."""


@dataclass(frozen=True)
class Stored:
    """Where one piece lies."""

    file: str
    offset: int  # bytes
    length: int


class Content:
    """A checkpoint whose index was read."""

    def __init__(self, directory: Path, index: Any, load: Load) -> None:
        self._directory, self._load = directory, load
        self.entries: dict[str, Any] = dict(index.state_dict_metadata)
        self._stored: dict[str, list[tuple[tuple[int, ...], Stored]]] = {name: [] for name in self.entries}
        for place, info in index.storage_data.items():
            if place.fqn not in self._stored:
                raise UnreadableError(f"{place.fqn} is stored, but the index does not describe it")
            stored = Stored(str(info.relative_path), int(info.offset), int(info.length))
            self._stored[place.fqn].append((tuple(place.offset or ()), stored))

    @property
    def names(self) -> set[str]:
        return set(self.entries)

    def is_tensor(self, name: str) -> bool:
        return isinstance(self.entries[name], TensorStorageMetadata)

    def value(self, name: str) -> Any:
        """The whole tensor, or the object, of that name.

        Raises:
            UnreadableError: a piece is missing, twice there, or is not what the index says.
        """
        if self.is_tensor(name):
            return self._tensor(name)
        if len(self._stored[name]) != 1:
            raise UnreadableError(f"{name}: {len(self._stored[name])} places")
        return self._read(self._stored[name][0][1])

    def pieces(self) -> Iterator[tuple[str, Stored]]:
        """(name, place) of all pieces of tensors."""
        for name, places in self._stored.items():
            if self.is_tensor(name):
                for _, stored in places:
                    yield name, stored

    def chunks(self, name: str) -> list[tuple[int, int]]:
        """(begin, end) of the pieces of a one-dimensional tensor, in order."""
        return sorted((chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in self.entries[name].chunks)

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        whole = torch.zeros(entry.size, dtype=entry.properties.dtype)
        seen = torch.zeros(entry.size, dtype=torch.bool)
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        for offsets, stored in self._stored[name]:
            piece = self._read(stored)
            if tuple(piece.shape) != sizes.get(offsets) or piece.dtype != whole.dtype:
                raise UnreadableError(f"{name}: the piece at {offsets} is {piece.dtype} {tuple(piece.shape)}")
            place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, piece.shape, strict=True))
            if bool(seen[place].any()):
                raise UnreadableError(f"{name}: the piece at {offsets} overlaps another")
            whole[place], seen[place] = piece, True
        if not bool(seen.all()):
            raise UnreadableError(f"{name}: {int((~seen).sum())} of {seen.numel()} elements are in no file")
        return whole

    def _read(self, stored: Stored) -> Any:
        with open(self._directory / stored.file, "rb") as file:
            file.seek(stored.offset)
            data = file.read(stored.length)
        return self._load(io.BytesIO(data))

    # ------------------------------------------------------------------------------------------- padding

    def padding(self, name: str) -> list[tuple[int, int]]:
        """(begin, end) of what belongs to no parameter in a bucket of the optimizer: Megatron writes there whatever
        was in memory.

        It is told from how Megatron slices a bucket: where a parameter begins or ends, and where a rank's share does.
        Parameters begin at multiples of 64 elements, so a slice that begins elsewhere, and not with a rank's share, is
        a gap. One that begins with a share goes on with what was before it. Where a gap begins exactly with a share,
        this cannot be seen, and it is taken for data: compared, never left out.
        """
        found = _BUCKET.fullmatch(name)
        if found is None or not self.is_tensor(name):
            return []
        chunks, shares = self.chunks(name), self._shares(found)
        gaps: list[tuple[int, int]] = []
        for begin, end in chunks:
            unaligned = begin % ALIGNED != 0
            goes_on = bool(gaps) and gaps[-1][1] == begin
            first = all(begin % share for share in shares)
            if unaligned and (first or goes_on) and end - begin < ALIGNED:
                gaps.append((begin, end))
        return gaps

    def _shares(self, bucket: re.Match[str]) -> set[int]:
        """Elements of a bucket that one rank of an optimizer instance holds. Which optimizer it is of is not told, so
        there may be two answers, of that for experts and of that for all else; 1 where nothing is known."""
        name = f"{bucket['group']}.per_bucket_numel/shard_0_1"
        common = "common_state/shard_0_1"
        if name not in self.entries or common not in self.entries:
            return {1}
        (numels,) = self.value(name)
        (told,) = self.value(common)
        (of_buffer,) = numels[int(bucket["buffer"])].values()
        size, instances = int(of_buffer[int(bucket["bucket"])]), told["args"].num_distributed_optimizer_instances
        return {max(1, size * instances // replicas) for replicas in _data_parallel_sizes(told["args"])}


def _data_parallel_sizes(arguments: Any) -> set[int]:
    """Ranks that hold the same parameters: of experts, and of all else."""
    sizes = {int(arguments.data_parallel_size)}
    experts = getattr(arguments, "expert_model_parallel_size", 1) or 1
    if experts > 1:
        tensor = getattr(arguments, "expert_tensor_parallel_size", None) or arguments.tensor_model_parallel_size
        sizes.add(int(arguments.world_size) // (tensor * experts * arguments.pipeline_model_parallel_size))
    return sizes


def is_checkpoint(directory: Path) -> bool:
    return (directory / INDEX).is_file() and any(directory.glob(f"*{DATA_SUFFIX}"))
