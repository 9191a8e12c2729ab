"""The files of `--ckpt-format torch_dist`, written without a collective: one data file for each part, and the index.

Megatron describes what a rank holds (`sharded_state_dict`), and torch's distributed checkpoint plans together with all
ranks who writes what. Here nobody can be asked. So one rank writes all of a part, as if it were the first of its
data-parallel group; what several parts hold is written by the part that Megatron takes as main replica; and each part
leaves its piece of the index, from which the publisher makes the whole one. The content, and the optimizer's sharding
type, are those of Megatron's own save; only which file holds what differs, and no reader depends on that.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mindspeed_tft.patches import (
    megatron_kinds,
    megatron_releases,
    megatron_rollback,
    megatron_torch_dist_012,
    megatron_torch_format,
)
from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.record import SmallState

if TYPE_CHECKING:
    from mindspeed_tft.patches.megatron_host import MegatronHost

INDEX = ".metadata"  # where torch's reader looks for it
COMMON = "common_state"  # everything that is not sharded, written by the first part

# Keys of the optimizer's state in its own layout: written once for all instances and ranks of a part.
_OF_A_GROUP = "optimizer.distributed.dp_group_idx_"


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _mpu() -> Any:
    return _module("megatron.core.parallel_state")


# ------------------------------------------------------------------------------------------------- a part


def write(
    host: MegatronHost,
    state: SmallState,
    rng: list[dict[str, Any]],
    states: list[dict[Any, Any] | None],
    directory: Path,
) -> dict[Path, str]:
    """Write the part of `host`, whose model, scheduler and scalers stand at `state`; returns sha256 by file.

    `rng`: the random states that Megatron saves, one or one for each data-parallel rank. `states`: the whole optimizer
    state, for each optimizer of the chain; None for one that is not sharded.

    Raises:
        DumpError: the disk is full or fails, or something in the model cannot be written this way.
    """
    path = host.checkpoint_directory(directory, state.step) / f"{host.part()}.distcp"
    sharded, common = _split(_content(host, state, rng, states))
    hashes: dict[Path, str] = {}
    if _is_first_part():
        if name := megatron_releases.common_file():
            hashes[path.with_name(name)] = files.write_verified(path.with_name(name), partial(torch.save, common))
        else:
            mapping = _module("megatron.core.dist_checkpointing.mapping")
            sharded.append(mapping.ShardedObject(COMMON, common, (1,), (0,)))
    piece = Metadata({}, storage_data={})
    hashes[path] = files.write_verified(path, lambda file: _write_items(sharded, Counting(file), path.name, piece))
    files.write_stamped(_piece(directory, host.part()), partial(pickle.dump, piece))
    return hashes


def _content(
    host: MegatronHost, state: SmallState, rng: list[dict[str, Any]], states: list[dict[Any, Any] | None]
) -> dict[str, Any]:
    """What Megatron would save, with the whole optimizer state of this part in the place of this rank's."""
    megatron_rollback.rerun_machine(host, state)
    rerun = megatron_releases.sharded_rerun_state(host)
    with ExitStack() as stack:
        for optimizer, assembled in zip(host.optimizers(), states, strict=True):
            stack.enter_context(_whole(optimizer, assembled))
        content: dict[str, Any] = megatron_releases.sharded_content(
            host, megatron_torch_format.arguments(state), state.step, _random_states(rng), rerun
        )
    content["num_floating_point_operations_so_far"] = state.flops
    return content


@megatron_releases.sharded_content.on(">=0.17")
def _with_metadata(host: MegatronHost, space: Any, step: int, rng: Any, rerun: Any) -> dict[str, Any]:
    checkpointing = _module("megatron.training.checkpointing")
    metadata = checkpointing._build_sharded_state_dict_metadata(space)
    content: dict[str, Any] = checkpointing.generate_state_dict(
        space,
        checkpointing.unwrap_model(host.model),
        host.optimizer,
        host.scheduler,
        rng,
        iteration=step,
        optim_sd_kwargs={"metadata": metadata},
        model_sd_kwargs={"metadata": metadata},
        rerun_state=rerun,
    )
    content["content_metadata"] = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    return content


def _random_states(rng: list[dict[str, Any]]) -> Any:
    mpu = _mpu()
    return _module("megatron.core.dist_checkpointing.mapping").ShardedObject(
        "rng_state",
        rng,
        (mpu.get_pipeline_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size()),
        (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()),
    )


@megatron_releases.sharded_rerun_state.on(">=0.17")
def _rerun(_host: MegatronHost) -> dict[str, Any] | None:
    """Every rank saves it for itself. None runs at the end of a step, so nothing in it is that of one rank, and this
    rank speaks for all of its part."""
    found: dict[str, Any] | None = megatron_releases.rerun_state([], "torch_dist")
    if found:
        group = _mpu().get_data_parallel_group(with_context_parallel=True)
        mine = found["sharded"]
        found["sharded"] = {
            rank: dataclasses.replace(mine, global_offset=(rank,))
            for rank in torch.distributed.get_process_group_ranks(group)
        }
    return found


@contextmanager
def _whole(optimizer: Any, assembled: dict[Any, Any] | None) -> Iterator[None]:
    """While Megatron asks `optimizer` for its sharded state: answer with `assembled` instead of this rank's shard.
    None: the state of this optimizer is not sharded over ranks."""
    if assembled is None:
        yield
        return
    answers: dict[str, Callable[..., Any]] = megatron_releases.whole_of_a_part(optimizer, assembled)
    vars(optimizer).update(answers)
    try:
        yield
    finally:
        for name in answers:
            delattr(optimizer, name)


@megatron_releases.whole_of_a_part.on(">=0.17")
def _answers(optimizer: Any, assembled: dict[Any, Any]) -> dict[str, Callable[..., Any]]:
    """By the name of the optimizer's method that is asked."""
    return {
        "sharded_param_state_dp_reshardable": lambda *_args, **_kwargs: _in_buckets(optimizer, assembled),
        "get_parameter_state_dp_zero": lambda *_args, **_kwargs: assembled,  # `megatron_reshardable` adds the gaps
    }


def _keys(tensors: dict[str, Any]) -> list[str]:
    return [key for key, value in tensors.items() if torch.is_tensor(value)]


def _in_buckets(optimizer: Any, assembled: dict[Any, Any]) -> dict[Any, Any]:
    """Sharding type `dp_reshardable`: each bucket one tensor a key, which Megatron saves in slices, one for each
    parameter and gap of each rank. A reader takes what it wants from however many slices there are."""
    mapping = _module("megatron.core.dist_checkpointing.mapping")
    group = f"{_OF_A_GROUP}{optimizer.data_parallel_group_idx}"
    # What is of no expert is the same in all expert parts; the first one writes it.
    copy_number = int(not megatron_kinds.is_expert(optimizer) and _mpu().get_expert_model_parallel_rank() > 0)
    result: dict[Any, Any] = {
        name: mapping.ShardedObject(f"{group}.{name}", getattr(optimizer, name), (1,), (0,))
        for name in ("per_bucket_numel", "per_bucket_numel_unpadded")
    }
    for buffer_index, buffer in enumerate(optimizer.buffers):
        for dtype, tensors in assembled[buffer_index].items():
            start = 0
            of_buffer = result.setdefault(buffer_index, {}).setdefault(dtype, [])
            for bucket_index, bucket in enumerate(buffer.buckets):
                end = start + bucket.numel_unpadded
                place = f"{group}.gbuf_idx_{buffer_index}.dtype_{dtype}.bucket_idx_{bucket_index}"
                of_buffer.append(
                    {
                        key: mapping.ShardedTensor.from_rank_offsets(
                            f"{place}.{key}", tensors[key][start:end], replica_id=copy_number
                        )
                        for key in _keys(tensors)
                    }
                )
                start = end
    return result


def _split(content: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """What this part has to write: Megatron's `ShardedTensor` and `ShardedObject`, once each; and all the rest."""
    mapping = _module("megatron.core.dist_checkpointing.mapping")
    preprocess = _module("megatron.core.dist_checkpointing.state_dict_utils").save_preprocess
    nested_values = _module("megatron.core.dist_checkpointing.dict_utils").nested_values
    sharded, common = preprocess(content, validate_access_integrity=False)
    found = [item for item in nested_values(sharded) if mapping.is_main_replica(megatron_releases.copy_number(item))]
    return found, common


@megatron_releases.common_file.on(">=0.17")
def _no_file() -> str:
    return ""


@megatron_releases.copy_number.on(">=0.17")
def _replica(item: Any) -> Any:
    """Which copy this is, were this rank the first of its data-parallel group: Megatron's last number says which rank
    of that group has it; for what is kept in the optimizer's layout the first one says which instance."""
    if isinstance(item.replica_id, int):
        return item.replica_id
    if _OF_A_GROUP in item.key:
        return 0
    mpu = _mpu()
    if mpu.get_expert_model_parallel_rank() and item.replica_id[-1] != mpu.get_expert_data_parallel_rank():
        return 1  # of no expert: the rank is one of the dense data-parallel group, and the first expert part writes it
    return (*item.replica_id[:-1], 0)


def _is_first_part() -> bool:
    mpu = _mpu()
    model = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    return (*model, mpu.get_expert_model_parallel_rank()) == (0, 0, 0)


class Counting:
    """A binary file that knows how much was written to it."""

    def __init__(self, file: Any) -> None:
        self._file, self.size = file, 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        count = memoryview(data).nbytes
        self.size += count
        return count

    def flush(self) -> None:
        self._file.flush()


def _write_items(items: list[Any], file: Any, name: str, piece: Metadata) -> None:
    """Append each item to `file` (a `Counting`), as torch's own writer does, and note it in `piece`."""
    for item in items:
        begin = file.size
        if hasattr(item, "local_shape"):  # a ShardedTensor
            index = _note_tensor(item, piece)
            torch.save(_plain(item), file)
        else:
            index = MetadataIndex(item.unique_key)
            piece.state_dict_metadata[index.fqn] = BytesStorageMetadata()
            file.write(_serialized(item.data))
        piece.storage_data[index] = _StorageInfo(name, begin, file.size - begin)


def _serialized(data: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save([data], buffer)  # Megatron's reader takes the first of a list
    return buffer.getvalue()


def _plain(item: Any) -> torch.Tensor:
    """On the host, contiguous, and with no more storage than its elements: all of a storage would be written."""
    data: torch.Tensor = item.data.detach().cpu().reshape(_shape(item))
    data = data.contiguous()
    return data if data.untyped_storage().nbytes() == data.nbytes else data.clone()


def _note_tensor(item: Any, piece: Metadata) -> MetadataIndex:
    whole, offset, sizes = tuple(item.global_shape), tuple(item.global_offset), tuple(_shape(item))
    if item.flattened_range is not None:
        whole, offset = megatron_torch_dist_012.flattened(item)
        of_megatron = vars(piece).setdefault("mcore_data", {})  # its own addition to torch's index
        of_megatron[item.key] = {"nd_reformulated_orig_global_shape": tuple(item.global_shape)}
    of_key = piece.state_dict_metadata.setdefault(
        item.key, TensorStorageMetadata(TensorProperties(dtype=item.data.dtype), torch.Size(whole), [])
    )
    assert isinstance(of_key, TensorStorageMetadata)
    of_key.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
    return MetadataIndex(item.key, torch.Size(offset), len(of_key.chunks) - 1)


def _shape(item: Any) -> tuple[int, ...]:
    """Of the tensor as it is stored: with the axes that only the whole has."""
    if item.flattened_range is not None:
        return (*(1 for _ in item.global_shape), item.data.numel())
    return (*(1 for _ in range(item.prepend_axis_num)), *item.local_shape)


# ------------------------------------------------------------------------------------------------- the whole


def complete(checkpoint: Path, directory: Path, parts: list[str]) -> dict[Path, str]:
    """Write what makes the data files of all `parts` one checkpoint: torch's index and Megatron's `metadata.json`.
    `directory`: of the attempt. Returns sha256 by file.

    Raises:
        DumpError: the piece of a part is missing or damaged, a tensor is not covered by its pieces, or the disk fails.
    """
    index = merge([pickle.loads(files.read_stamped(_piece(directory, part))) for part in sorted(parts)])
    core = _module("megatron.core.dist_checkpointing.core")
    config = checkpoint / core.CONFIG_FNAME
    files.write_text(config, megatron_releases.describe_format(core))
    hashes = {
        checkpoint / INDEX: files.write_verified(checkpoint / INDEX, partial(pickle.dump, index)),
        config: files.sha256_of(config),
    }
    if getattr(_module("megatron.training.global_vars").get_args(), "verify_integrity", False):
        manifest = _integrity(checkpoint, directory, parts, hashes)
        hashes[manifest] = files.sha256_of(manifest)
    return hashes


def _integrity(checkpoint: Path, directory: Path, parts: list[str], hashes: dict[Path, str]) -> Path:
    """Megatron's own list of hashes, which it asks for when it loads with `--verify-integrity`: those of the writers,
    who have read their files back, and those of the index."""
    validation = _module("megatron.core.dist_checkpointing.validation")
    manifest = checkpoint / str(validation.INTEGRITY_FNAME)
    listed = {path.name: sha for path, sha in hashes.items()}
    for part in parts:
        listed.update((name, entry["sha256"]) for name, entry in files.read_fragment(directory, part).items())
    files.write_text(manifest, json.dumps({"algorithm": validation._HASH_ALGORITHM, "files": listed}, indent=2))
    return manifest


def _piece(directory: Path, part: str) -> Path:
    return directory / "pieces" / part


@megatron_releases.describe_format.on(">=0.17")
def _config(core: Any) -> str:
    strategy = _module("megatron.core.dist_checkpointing.strategies.torch").TorchDistSaveShardedStrategy()
    config = core.CheckpointingConfig(strategy.backend, strategy.version)
    return json.dumps(dataclasses.asdict(config))


def merge(pieces: list[Metadata]) -> Metadata:
    """One index of the pieces of all parts, in order; where two have the same chunk, the first one counts.

    Raises:
        DumpError: they contradict each other, or a tensor has missing or overlapping chunks.
    """
    whole = Metadata({}, storage_data={}, version=CURRENT_DCP_VERSION)
    for piece in pieces:
        if of_megatron := vars(piece).get("mcore_data"):
            vars(whole).setdefault("mcore_data", {}).update(of_megatron)
        for key, found in piece.state_dict_metadata.items():
            if isinstance(found, TensorStorageMetadata):
                _merge_tensor(whole, key, found)
            else:
                whole.state_dict_metadata.setdefault(key, found)
        for index, info in piece.storage_data.items():
            whole.storage_data.setdefault(index, info)
    for key, found in whole.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            covered = sum(chunk.sizes.numel() for chunk in found.chunks)
            if covered != found.size.numel():
                raise files.DumpError(f"{key} has {found.size.numel()} elements, its parts wrote {covered}")
    return whole


def _merge_tensor(whole: Metadata, key: str, found: TensorStorageMetadata) -> None:
    of_key = whole.state_dict_metadata.setdefault(key, TensorStorageMetadata(found.properties, found.size, []))
    if not isinstance(of_key, TensorStorageMetadata) or (of_key.size, of_key.properties.dtype) != (
        found.size,
        found.properties.dtype,
    ):
        raise files.DumpError(f"{key}: parts disagree about its size or type: {of_key} and {found}")
    known = {tuple(chunk.offsets) for chunk in of_key.chunks}
    of_key.chunks.extend(chunk for chunk in found.chunks if tuple(chunk.offsets) not in known)
