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

from mindspeed_tft.patches import (
    megatron_kinds,
    megatron_rollback,
    megatron_shards,
    megatron_torch_dist,
    megatron_torch_format,
)
from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.record import SmallState

if TYPE_CHECKING:
    from mindspeed_tft.patches.megatron_host import MegatronHost

_UPDATES = "updates"  # in a staged shard, beside its tensors


def stage_shards(host: MegatronHost, shards: Iterable[str], directory: Path) -> dict[str, str]:
    """Write own shards below `directory`; returns sha256 by file name.

    Raises:
        DumpError: the disk is full or fails.
    """
    hashes = {}
    for shard in shards:
        optimizer = host.optimizer_of(shard)
        tensors = {}
        if optimizer is not None:
            tensors = megatron_kinds.of(optimizer).take(optimizer)
            tensors[_UPDATES] = torch.tensor(megatron_shards.updates(optimizer))
        if host.partners is not None and megatron_shards.is_dense(shard):  # its holders are those partners
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
    _count_updates(host, staged)
    states = _complete(host, sources, staged)
    _apply(host, state)
    if host.checkpoint_format() == "torch_dist":
        return megatron_torch_dist.write(host, state, rng, states, directory)
    return megatron_torch_format.write(host, state, rng, states, directory)


def _count_updates(host: MegatronHost, staged: dict[str, dict[str, torch.Tensor]]) -> None:
    """Bring what the holders of other shards count to where nothing of the own one is trained."""
    counts = {shard: int(tensors.pop(_UPDATES, 0)) for shard, tensors in staged.items()}
    for optimizer in host.optimizers():
        mine = [count for shard, count in counts.items() if host.optimizer_of(shard) is optimizer]
        if optimizer is not None and mine:
            megatron_shards.count_updates(optimizer, max(mine))


def _complete(
    host: MegatronHost, sources: dict[str, str], staged: dict[str, dict[str, torch.Tensor]]
) -> list[dict[Any, Any] | None]:
    """The whole state of each optimizer of the chain from own and staged shards, as `megatron_kinds.Kind.complete`."""
    ordered = sorted(sources, key=lambda shard: int(shard.rsplit("/", 1)[1]))
    states = []
    for optimizer in host.optimizers():
        shards = [staged.get(shard) for shard in ordered if host.optimizer_of(shard) is optimizer]
        states.append(megatron_kinds.of(optimizer).complete(optimizer, shards))
    return states


def _apply(host: MegatronHost, state: SmallState) -> None:
    """Bring scheduler (and with it the learning rates in the optimizer), scalers and buffers to `state`."""
    missing = state.scheduler["num_steps"] - host.scheduler.num_steps
    if missing < 0:
        raise files.DumpError(f"the scheduler stands {-missing} samples after the end of step {state.step}")
    if missing:
        host.scheduler.step(increment=missing)
    for scaler, saved in zip(host.scalers(), state.scalers, strict=True):
        if scaler is not None:
            scaler.load_state_dict(saved)
    megatron_rollback.buffers(host, state)


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
