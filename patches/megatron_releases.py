"""What we call in Megatron and what releases have elsewhere, under another name, or not at all: each difference once.

A function here says what is wanted; below it stand the ways to it, each with the releases that have it. What differs in
what Megatron calls of ours is a wrapper, and states its releases where it is declared.
"""

from __future__ import annotations

import importlib
from typing import Any

from mindspeed_tft.registry import Variants

HOST = "megatron"


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _mpu() -> Any:
    return _module("megatron.core.parallel_state")


# ------------------------------------------------------------------------------------------------ groups

holders_group = Variants("the process group of the ranks that hold the same optimizer shard", HOST)


@holders_group.on(">=0.13")
def _inter_instance() -> Any:
    """None: there is one instance, so a shard is on one rank."""
    return _mpu().get_inter_distributed_optimizer_instance_group(check_initialized=False)


@holders_group.on("<0.13")
def _inter_partial() -> Any:
    """Without instances this release has no such group, and an assertion in the place of an answer."""
    return _mpu()._INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP


instance_group_of_experts = Variants("the process group over which the optimizer of experts is sharded", HOST)


@instance_group_of_experts.on(">=0.13")
def _part_of_expert_data_parallel() -> Any:
    return _mpu().get_expert_data_parallel_group(partial_expert_data_parallel=True)


@instance_group_of_experts.on("<0.13")
def _all_of_expert_data_parallel() -> Any:
    """Its instances are of the dense parameters alone."""
    return _mpu().get_expert_data_parallel_group()


# ------------------------------------------------------------------------------------------------ a broken step

forget_ready_gradients = Variants("forget whose gradients a bucket group has had in a backward pass", HOST)


@forget_ready_gradients.on(">=0.16")
def _counts(group: Any) -> None:
    group.per_param_grad_ready_counts = {}


@forget_ready_gradients.on("<0.16")
def _names(group: Any) -> None:
    group.params_with_grad = set()


forget_expert_counts = Variants("forget what routers count up in a step and log of their losses", HOST)


@forget_expert_counts.on(">=0.18")
def _tracker(config: Any, model: list[Any]) -> None:
    _module("megatron.core.distributed.finalize_model_grads").reset_model_temporary_tensors(config, model)
    _module("megatron.core.transformer.moe.moe_logging").get_moe_metrics_tracker().clear()


@forget_expert_counts.on(">=0.15,<0.18")
def _aux_losses(config: Any, model: list[Any]) -> None:
    _module("megatron.core.distributed.finalize_model_grads").reset_model_temporary_tensors(config, model)
    _module("megatron.core.transformer.moe.moe_utils").clear_aux_losses_tracker()


@forget_expert_counts.on("<0.15")
def _aux_losses_alone(_config: Any, model: list[Any]) -> None:
    for chunk in model:
        for module in chunk.modules():
            if getattr(module, "local_tokens_per_expert", None) is not None:
                module.local_tokens_per_expert.zero_()
    _module("megatron.core.transformer.moe.moe_utils").clear_aux_losses_tracker()


# ------------------------------------------------------------------------------------------------ data

build_data_loader = Variants("build a data loader that begins at a sample", HOST)


@build_data_loader.on(">=0.16")
def _of_training(dataset: Any, consumed: int) -> Any:
    return _module("megatron.training.datasets.data_samplers").build_pretraining_data_loader(dataset, consumed)


@build_data_loader.on("<0.16")
def _of_legacy(dataset: Any, consumed: int) -> Any:
    return _module("megatron.legacy.data.data_samplers").build_pretraining_data_loader(dataset, consumed)


# ------------------------------------------------------------------------------------------------ checkpoints

rerun_state = Variants("what a checkpoint has of Megatron's replay of wrong results, at the end of a step", HOST)


@rerun_state.on(">=0.14")
def _only_if_it_runs(_iterators: list[Any], form: str) -> Any:
    """None where nothing runs; and without it for every format but torch_dist."""
    return _machine().state_dict(None, form)


@rerun_state.on("<0.14")
def _always(iterators: list[Any], form: str) -> Any:
    """Also what the iterators keep of the step for the replay, which is nothing when it has ended."""
    kept = [_module("megatron.core.rerun_state_machine").RerunDataIterator(None) for _ in iterators]
    return _machine().state_dict(kept, form)


def _machine() -> Any:
    return _module("megatron.core.rerun_state_machine").get_rerun_state_machine()


# What format torch_dist looks like: the ways are in `megatron_torch_dist` and `megatron_torch_dist_012`.

sharded_content = Variants("what Megatron saves in format torch_dist, from one rank's point of view", HOST)
whole_of_a_part = Variants(
    "the optimizer state of a whole part, in the place of this rank's, in format torch_dist", HOST
)
sharded_rerun_state = Variants("Megatron's replay of wrong results in format torch_dist, for all ranks of a part", HOST)
copy_number = Variants("which copy of something this is, were this rank the first of its data-parallel group", HOST)
common_file = Variants("the name of the file for all that is not sharded, if there is one", HOST)
describe_format = Variants("the content of metadata.json in format torch_dist", HOST)
