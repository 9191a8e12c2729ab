"""A rank's share of a dump: its shards as files for a writer, and the whole optimizer state of a part from all of them.

Nothing here communicates: the world may be broken. What the files of the checkpoint look like is another module's
knowledge (`megatron_torch_format`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_tft.patches import megatron_torch_format
from mindspeed_tft.patches.megatron_shards import buckets, local_shards, state_keys
from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.record import SmallState

if TYPE_CHECKING:
    from mindspeed_tft.patches.megatron_host import MegatronHost


def stage_shards(host: MegatronHost, shards: Iterable[str], directory: Path) -> dict[str, str]:
    """Write own shards below `directory`; returns sha256 by file name.

    Raises:
        DumpError: the disk is full or fails.
    """
    hashes = {}
    for shard in shards:
        tensors = {
            f"{index}/{name}": tensor
            for index, optimizer in enumerate(host.optimizers())
            for name, tensor in local_shards(optimizer).items()
        }
        if host.partners is not None:
            tensors.update(host.partners.to_tensors())
        path = _staged(directory, shard)
        hashes[path.name] = files.write_verified(path, partial(torch.save, tensors))
        files.write_text(path.with_suffix(".sha256"), hashes[path.name])
    return hashes


def write_part(host: MegatronHost, state: SmallState, sources: dict[str, str], directory: Path) -> dict[Path, str]:
    """Write the files of this rank's part at the end of `state.step`; returns their sha256. `sources`: shard to "self"
    or to who has staged it. Model, scheduler and scalers of this rank are brought to that step: it does not train on.

    Raises:
        DumpError: a staged shard is missing or is not what was staged, or the disk is full or fails.
    """
    staged = {shard: _load_staged(directory, shard) for shard, source in sources.items() if source != "self"}
    rng = [state.rng]
    if host.partners is not None:
        rng = host.partners.of_all(state.step, state.rng, list(staged.values()))
    states = _assemble(host, sources, staged)
    for optimizer, assembled in zip(host.optimizers(), states, strict=True):
        copy_to_model(optimizer, assembled)
    _apply(host, state)
    return megatron_torch_format.write(host, state, rng, states, directory)


def _assemble(
    host: MegatronHost, sources: dict[str, str], staged: dict[str, dict[str, torch.Tensor]]
) -> list[dict[Any, Any]]:
    """The whole optimizer state of this part, per optimizer of the chain, from own and staged shards."""
    ordered = sorted(sources, key=lambda shard: int(shard.rsplit("/", 1)[1]))
    own = {index: local_shards(optimizer) for index, optimizer in enumerate(host.optimizers())}
    result = []
    for index, optimizer in enumerate(host.optimizers()):
        shards = [own[index] if sources[shard] == "self" else _of_optimizer(staged[shard], index) for shard in ordered]
        result.append(assemble(optimizer, shards))
    return result


def _apply(host: MegatronHost, state: SmallState) -> None:
    """Bring scheduler (and with it the learning rates in the optimizer) and scalers to `state`."""
    missing = state.scheduler["num_steps"] - host.scheduler.num_steps
    if missing < 0:
        raise files.DumpError(f"the scheduler stands {-missing} samples after the end of step {state.step}")
    if missing:
        host.scheduler.step(increment=missing)
    for scaler, saved in zip(host.scalers(), state.scalers, strict=True):
        if scaler is not None:
            scaler.load_state_dict(saved)


def _staged(directory: Path, shard: str) -> Path:
    return directory / "staging" / f"{shard.replace('/', '_')}.pt"


def _load_staged(directory: Path, shard: str) -> dict[str, torch.Tensor]:
    path = _staged(directory, shard)
    try:
        stated = path.with_suffix(".sha256").read_text().strip()
        found = files.sha256_of(path)
    except OSError as exc:
        raise files.DumpError(f"staged shard {shard} cannot be read: {exc}") from exc
    if found != stated:
        raise files.DumpError(f"staged shard {shard} has sha256 {found[:12]}, its holder stated {stated[:12]}")
    tensors: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return tensors


def _of_optimizer(tensors: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    prefix = f"{index}/"
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def assemble(optimizer: Any, shards: list[dict[str, torch.Tensor]]) -> dict[Any, Any]:
    """Megatron's whole parameter state (the content of `distrib_optim.pt`) from the shards of all ranks of an
    instance, in rank order: per buffer and dtype one float32 tensor a key, without the padding between buckets."""
    state: dict[Any, Any] = {"buckets_coalesced": True}
    offsets: dict[tuple[int, Any], int] = {}
    for buffer_index, dtype, bucket_index, _ in buckets(optimizer):
        buffer = optimizer.buffers[buffer_index]
        bucket = buffer.buckets[bucket_index]
        world = state.setdefault(buffer_index, {}).setdefault(dtype, {})
        start = offsets.get((buffer_index, dtype), 0)
        end = offsets[(buffer_index, dtype)] = start + bucket.numel_unpadded
        for key in ("param", *state_keys(optimizer)):
            if key not in world:
                world[key] = torch.zeros(buffer.numel_unpadded, dtype=torch.float32)
            pieces = torch.cat([shard[f"{buffer_index}/{bucket_index}/{key}"] for shard in shards])
            if pieces.numel() != bucket.grad_data.numel():
                raise files.DumpError(
                    f"bucket {bucket_index} has {bucket.grad_data.numel()} elements, its shards {pieces.numel()}"
                )
            world[key][start:end].copy_(pieces[: bucket.numel_unpadded])
        world["numel_unpadded"] = buffer.numel_unpadded
    return state


@torch.no_grad()
def copy_to_model(optimizer: Any, state: dict[Any, Any]) -> None:
    """Set the model's parameters from the assembled main parameters, with the cast that Megatron's own update does.

    Each rank updates its shard only and gathers the rest; after a fault that gather is missing.
    """
    for buffer_index, buffer in enumerate(optimizer.buffers):
        dtype = next(iter(optimizer.gbuf_ranges[buffer_index]))
        main = state[buffer_index][dtype]["param"]
        starts: list[int] = []
        total = 0
        for bucket in buffer.buckets:
            starts.append(total - bucket.offset)
            total += bucket.numel_unpadded
        for parameter, (begin, end, bucket_id) in buffer.param_index_map.items():
            shift = starts[bucket_id]
            parameter.data.copy_(main[begin + shift : end + shift].view(parameter.shape))
