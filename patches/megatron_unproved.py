"""Options of Megatron that no test has proved exact: each is refused at start-up, with the reason and what to do.

`docs/compatibility.md` lists them beside those that are proved. To lift one, take its line out here and in
`tests/megatron/refused.py`, and put what proves it into `tests/megatron/compatibility.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from mindspeed_tft.settings import flag_of


class Unproved(NamedTuple):
    """One option. `attribute`: of Megatron's arguments; `wrong`: says which values of it are refused."""

    attribute: str
    wrong: Callable[[Any], bool]
    reason: str
    remedy: str = "leave it out"
    spelled: str = ""  # the flag, where it is not spelled as its attribute

    @property
    def flag(self) -> str:
        return self.spelled or flag_of(self.attribute)

    @property
    def online(self) -> bool:
        """Whether it is in the way of a repair or a newcomer alone: a job that only dumps may have it."""
        return self.attribute in _IN_THE_WAY_OF_REPAIRS


def _stores_objects(value: Any) -> bool:
    """The option does nothing where the library is not there."""
    return bool(value) and importlib.util.find_spec("multistorageclient") is not None


def _several(value: Any) -> bool:
    return (value or 1) > 1


_CARRIED = "what it carries from one micro-batch to the next is not put back when a step is broken off"
_HOOKS = "it hangs hooks into the model for a step, and a step that is broken off leaves them there"
_KERNELS = "it needs kernels that the tests cannot run, so it is not proved exact"
_DATA = "a process that is started again could not put this data to where it stood"
_TRANSFORMER_ENGINE = "layers of TransformerEngine keep states of their own, which are not proved exact in this version"
_NOT_LOCAL = "use --transformer-impl local"
_FSDP = "FSDP keeps no optimizer replicas"
_DISTRIBUTED_OPTIMIZER = "use --use-distributed-optimizer"
_PLAIN_TYPES = "train in bf16, fp16 or fp32"
_GRAPHS = "captured graphs cannot be left in the middle of a step"

# Nothing is rolled back, regrouped or started again in a job that dumps and ends.
_IN_THE_WAY_OF_REPAIRS = frozenset(
    (
        "tp_comm_overlap",
        "use_ring_exchange_p2p",
        "nccl_ub",
        "create_all_gather_group",
        "distributed_timeout_seconds_after_init",
        "symmetric_ar_type",
        "moe_use_upcycling",
        "moe_router_force_biased",
        "result_rejected_tracker_filename",
        "ckpt_assume_constant_structure",
        "non_persistent_save_interval",
        "dataloader_type",
        "phase_transition_iterations",
        "logits_save_dir",
        "logits_load_dir",
        "fault_injector_ranks",
        "fault_injector_num_ranks",
        "log_straggler",
        "run_workload_inspector_server",
        "gpu_sniff_test_interval",
        "log_energy",
        "profile",
        "moe_routing_trace_path",
        "save_params_interval",
        "save_wgrads_interval",
        "save_dgrads_interval",
        "save_activations_interval",
        "save_tokens_per_expert_interval",
    )
)

# A program's own defaults and the files that flags name are in Megatron's arguments only once it has validated them.
SETTLED_LATE = ("iterations_to_skip", "dataloader_type")

UNPROVED: tuple[Unproved, ...] = (
    # ------------------------------------------------------------------------------------------ parallelism
    Unproved(
        "context_parallel_size",
        _several,
        "the attention that it needs comes with TransformerEngine, so that it is not proved exact in this version",
        "use context parallel size 1",
    ),
    Unproved("hybrid_context_parallel", bool, "context parallelism is not proved exact in this version"),
    Unproved("tensor_parallel_num_weight_shards", _several, "a holder map of its own would be needed for such weights"),
    Unproved(
        "expert_tensor_parallel_num_weight_shards", _several, "a holder map of its own would be needed for such weights"
    ),
    Unproved("overlap_moe_expert_parallel_comm", bool, _CARRIED),
    Unproved("tp_comm_overlap", bool, "its buffers belong to communicators that a repair replaces"),
    Unproved("use_ring_exchange_p2p", bool, "it needs a torch whose process groups a repair cannot replace"),
    Unproved(
        "nccl_ub", bool, "its memory is registered with communicators that a repair replaces", spelled="--use-nccl-ub"
    ),
    Unproved("create_all_gather_group", bool, "the groups that it makes are not proved to come back after a repair"),
    Unproved("pipeline_model_parallel_comm_backend", bool, "a rank cannot be taken out of a collective of it"),
    Unproved("fake_process_group", bool, "with it no rank has a peer that could hold a replica"),
    Unproved(
        "distributed_timeout_seconds_after_init", bool, "the groups that a repair makes would not have that timeout"
    ),
    Unproved("symmetric_ar_type", bool, "its memory is registered with communicators that a repair replaces"),
    # ------------------------------------------------------------------------------------------ layers
    Unproved("transformer_impl", lambda value: value != "local", _TRANSFORMER_ENGINE, _NOT_LOCAL),
    Unproved(
        "gradient_accumulation_fusion",
        bool,
        "it needs a kernel that the tests cannot run, so that it is not proved exact",
        "add --no-gradient-accumulation-fusion",
        "--gradient-accumulation-fusion (on by default)",
    ),
    Unproved("delay_wgrad_compute", bool, _CARRIED),
    Unproved("defer_embedding_wgrad_compute", bool, _CARRIED),
    Unproved("cpu_offloading_num_layers", bool, "activations that are on their way would not be waited for"),
    Unproved("fine_grained_activation_offloading", bool, "activations that are on their way would not be waited for"),
    Unproved("mtp_num_layers", bool, "multi-token prediction is not proved exact in this version"),
    Unproved("experimental_attention_variant", bool, "it is not proved exact in this version"),
    Unproved("hybrid_layer_pattern", bool, _KERNELS),
    Unproved("hybrid_override_pattern", bool, _KERNELS),
    Unproved("is_hybrid_model", bool, _KERNELS),
    Unproved("use_kitchen_attention", bool, _KERNELS),
    Unproved("freeze_all_layers", bool, "without a parameter to train there is no optimizer to keep replicas of"),
    # ------------------------------------------------------------------------------------------ experts
    Unproved(
        "moe_use_upcycling",
        bool,
        "a process in another's place would not turn its dense model into experts",
        "convert the checkpoint before",
    ),
    Unproved("moe_grouped_gemm", bool, _KERNELS),
    Unproved(
        "moe_token_dispatcher_type",
        lambda value: value == "flex",
        "its buffers belong to communicators that a repair replaces",
        "use --moe-token-dispatcher-type alltoall",
    ),
    Unproved("moe_enable_deepep", bool, "its buffers belong to communicators that a repair replaces"),
    Unproved("moe_shared_expert_overlap", bool, "what is on its stream when a step is broken off is not waited for"),
    Unproved("moe_paged_stash", bool, "activations that are on their way would not be waited for"),
    Unproved(
        "moe_enable_routing_replay",
        bool,
        "the routes that it has recorded are not put back when a step is broken off",
    ),
    Unproved(
        "moe_router_load_balancing_type",
        lambda value: "quantile_balancing" in (value if isinstance(value, list) else [value]),
        "its bias is not proved exact in this version",
        "use aux_loss, seq_aux_loss, global_aux_loss, sinkhorn or none",
    ),
    Unproved(
        "moe_router_force_biased",
        lambda value: value is not None and value < 0,
        "the bias that a layer draws once is not put back, nor is it given to a process in another's place",
        "give it a positive value, or leave it out",
    ),
    # ------------------------------------------------------------------------------------------ checkpoints
    Unproved(
        "ckpt_assume_constant_structure",
        bool,
        "a process in another's place has no plan of the last save, and the others would rely on theirs",
    ),
    Unproved(
        "non_persistent_save_interval",
        bool,
        "a later start would load such a checkpoint also where training went back behind it",
    ),
    # ------------------------------------------------------------------------------------------ optimizer, precision
    Unproved("optimizer", lambda value: value != "adam", "only Adam's states are covered", "use --optimizer adam"),
    Unproved("use_precision_aware_optimizer", bool, "its states are not plain fp32 and a dump would lose bits"),
    Unproved("optimizer_cpu_offload", bool, "offloaded optimizer states are not covered yet"),
    Unproved(
        "overlap_param_gather_with_optimizer_step", bool, "it gathers parameters before the whole update is committed"
    ),
    Unproved("use_torch_fsdp2", bool, _FSDP, _DISTRIBUTED_OPTIMIZER),
    Unproved("use_megatron_fsdp", bool, _FSDP, _DISTRIBUTED_OPTIMIZER),
    Unproved("use_custom_fsdp", bool, _FSDP, _DISTRIBUTED_OPTIMIZER),
    Unproved("fp8", bool, "fp8 scaling states are not covered yet", _PLAIN_TYPES, "--fp8-format"),
    Unproved("fp4", bool, "fp4 scaling states are not covered yet", _PLAIN_TYPES, "--fp4-format"),
    Unproved("enable_cuda_graph", bool, _GRAPHS),
    Unproved("external_cuda_graph", bool, _GRAPHS),
    Unproved("cuda_graph_impl", lambda value: value not in (None, "none"), _GRAPHS),
    Unproved("optimizer_cuda_graph", bool, _GRAPHS),
    Unproved(
        "ddp_reduce_scatter_with_fp32_accumulation", bool, "what it has in flight is not proved to be given up cleanly"
    ),
    Unproved("ddp_param_name_patterns_for_fp32_local_accumulation", bool, "its own sums of gradients are not put back"),
    Unproved("no_save_optim", bool, "a dump without the optimizer cannot continue exactly"),
    Unproved("no_save_rng", bool, "a dump without random states cannot continue exactly"),
    Unproved("qk_clip", bool, "it changes weights after the update, outside of the optimizer"),
    Unproved("log_max_attention_logit", bool, _CARRIED),
    Unproved("fp8_param_gather", bool, "fp8 parameters are not covered yet"),
    Unproved("fp4_param_gather", bool, "fp4 parameters are not covered yet"),
    Unproved("te_precision_config_file", bool, _TRANSFORMER_ENGINE),
    Unproved("te_rng_tracker", bool, "its random states are not those that are put back"),
    Unproved("inference_rng_tracker", bool, "its random states are not those that are put back"),
    # ------------------------------------------------------------------------------------------ data, steps
    Unproved(
        "rampup_batch_size",
        bool,
        "Megatron 0.19 ignores it, and how older releases count is not proved exact",
        "use --step-batch-size-schedule",
    ),
    Unproved(
        "iterations_to_skip",
        bool,
        "a fault while the batches of such a step are passed over would shift the data",
        "leave it out (and empty the file of --result-rejected-tracker-filename)",
    ),
    Unproved(
        "result_rejected_tracker_filename",
        bool,
        "a process in another's place would read there of more steps to skip than the others did when they started",
    ),
    Unproved("dataloader_type", lambda value: value == "external", _DATA, "use --dataloader-type single or cyclic"),
    Unproved("phase_transition_iterations", bool, _DATA),
    Unproved("full_validation", bool, "how many batches it reads is not known when a fault falls into an evaluation"),
    Unproved("multiple_validation_sets", bool, "the places in several validation sets are not put back"),
    Unproved(
        "enable_msc",
        _stores_objects,
        "its checkpoints lie in an object store, and a dump is written to a file system",
        "leave it out (it is on by default in 0.17: add --disable-msc)",
    ),
    Unproved("fim_data", bool, "its dataset draws from a generator of its own, which is not put back"),
    Unproved("sft", bool, "the lengths of packed sequences are summed up over a step, and that sum is not put back"),
    Unproved(
        "dataloader_inter_document_masking",
        bool,
        "the lengths of packed sequences are summed up over a step, and that sum is not put back",
    ),
    Unproved("logits_save_dir", bool, "what is written in a step that is computed again would be there twice"),
    Unproved("logits_load_dir", bool, _DATA),
    Unproved("vision_pretraining", bool, "the teacher of such a training changes outside of the optimizer"),
    # ------------------------------------------------------------------------------------------ watching, diagnosing
    Unproved("check_for_spiky_loss", bool, "the largest values that it has seen so far are not put back"),
    Unproved("check_for_large_grads", bool, "the largest values that it has seen so far are not put back"),
    Unproved(
        "rerun_mode",
        lambda value: value == "report_stats",
        "the statistics that it has gathered so far are not put back",
        "use --rerun-mode validate_results or disabled",
    ),
    Unproved("perform_rl_step", bool, "reinforcement learning steps are not covered", "train without it"),
    Unproved("inprocess_restart", bool, "two systems would both try to recover the job", "use one of them"),
    Unproved("yaml_cfg", bool, "it replaces all command line flags", "use flags"),
    Unproved("error_injection_rate", bool, "Megatron's injector is not put back", "use tftctl drill"),
    Unproved("fault_injector_ranks", bool, "it would be set up once more after each repair", "use tftctl drill"),
    Unproved("fault_injector_num_ranks", bool, "it would be set up once more after each repair", "use tftctl drill"),
    Unproved("enable_ft_package", bool, "two systems would both try to recover the job", "use one of them"),
    Unproved("adlr_autoresume", bool, "two systems would both decide when the job ends", "use one of them"),
    Unproved("log_straggler", bool, "its measurements of a step that is broken off are not put back"),
    Unproved("run_workload_inspector_server", bool, "its server would be started once more after each repair"),
    Unproved("gpu_sniff_test_interval", bool, "its benchmark would be run once more after each repair"),
    Unproved("log_energy", bool, "its counters would be set up once more after each repair"),
    Unproved("profile", bool, "a profiler would be started once more after each repair"),
    Unproved("moe_routing_trace_path", bool, _HOOKS),
    Unproved("save_params_interval", bool, "what is written in a step that is computed again is not proved the same"),
    Unproved("save_wgrads_interval", bool, "what is written in a step that is computed again is not proved the same"),
    Unproved("save_dgrads_interval", bool, _HOOKS),
    Unproved("save_activations_interval", bool, _HOOKS),
    Unproved("save_tokens_per_expert_interval", bool, _HOOKS),
)


def first(
    space: Any, table: tuple[Unproved, ...] = UNPROVED, online: bool = True, among: Collection[str] = ()
) -> Unproved | None:
    """The first option of Megatron's arguments that is refused, if there is one. Options that this Megatron does not
    know are not looked at. `online`: whether faults are repaired, or processes started again. `among`: these
    attributes alone."""
    for option in table:
        if among and option.attribute not in among:
            continue
        if option.online and not online:
            continue
        if hasattr(space, option.attribute) and option.wrong(getattr(space, option.attribute)):
            return option
    return None
