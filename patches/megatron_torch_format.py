"""The files of `--ckpt-format torch`: one with the optimizer and one with everything else for each part."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_tft.patches import megatron_kinds, megatron_rollback
from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.record import SmallState

if TYPE_CHECKING:
    from mindspeed_tft.patches.megatron_host import MegatronHost


def _module(name: str) -> Any:
    return importlib.import_module(name)


def write(
    host: MegatronHost,
    state: SmallState,
    rng: list[dict[str, Any]],
    states: list[dict[Any, Any] | None],
    directory: Path,
) -> dict[Path, str]:
    """Write the part of `host`, whose model, scheduler and scalers stand at `state`; returns sha256 by file.

    `rng`: the random states that Megatron saves, one or one for each data-parallel rank. `states`: the whole optimizer
    state, for each optimizer of the chain; None for one whose state is saved with everything else.

    Raises:
        DumpError: the disk is full or fails.
    """
    checkpointing = _module("megatron.training.checkpointing")
    name = checkpointing.get_checkpoint_name(str(directory), state.step)
    hashes: dict[Path, str] = {}
    saved = [
        found if found is not None and _saves(optimizer) else None
        for optimizer, found in zip(host.optimizers(), states, strict=True)
    ]
    if any(found is not None for found in saved):
        optimizer_path = Path(checkpointing.get_distributed_optimizer_checkpoint_name(name))
        content = saved[0] if len(saved) == 1 else saved
        hashes[optimizer_path] = files.write_verified(optimizer_path, partial(torch.save, content))
    model_state = _model_state(host, state, rng, checkpointing)
    hashes[Path(name)] = files.write_verified(Path(name), partial(torch.save, model_state))
    return hashes


def _saves(optimizer: Any) -> bool:
    """Whether the file of this part has the state of this optimizer: in Megatron the first rank of each instance writes
    it, and where experts are divided, that is a rank of the first expert part for all that no expert has."""
    mpu = _module("megatron.core.parallel_state")
    if megatron_kinds.is_expert(optimizer) or mpu.get_expert_model_parallel_world_size() == 1:
        return True
    everybody = torch.distributed.get_process_group_ranks(mpu.get_data_parallel_group(with_context_parallel=True))
    instance = optimizer.data_parallel_group.size()
    part = torch.distributed.get_process_group_ranks(mpu.get_expert_data_parallel_group())
    return not set(everybody[::instance]).isdisjoint(part)


def arguments(state: SmallState) -> Any:
    """Megatron's arguments as a checkpoint of `state` has them, whatever was counted since."""
    space = copy.copy(_module("megatron.training.global_vars").get_args())
    for key in megatron_rollback.COUNTERS:
        if key in state.counters:
            setattr(space, key, state.counters[key])
    return space


def _model_state(
    host: MegatronHost, state: SmallState, rng: list[dict[str, Any]], checkpointing: Any
) -> dict[str, Any]:
    model = checkpointing.unwrap_model(host.model)
    content: dict[str, Any] = checkpointing.generate_state_dict(
        arguments(state),
        model,
        host.optimizer,
        host.scheduler,
        rng,
        iteration=state.step,
        **host.replay_to_save(state),
    )
    content["num_floating_point_operations_so_far"] = state.flops
    return content
