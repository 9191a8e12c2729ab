"""Options of MindSpeed that no test has proved exact: each is refused at start-up, with the reason and what to do.

As `megatron_unproved`, for the features that MindSpeed adds, in all its releases for Megatron core_v0.12.1.
`docs/mindspeed.md` lists them beside those that are proved and those that do not touch what a recovery puts back. What
else an option brings along (`--swap-optimizer-times`) is refused with it.
"""

from __future__ import annotations

from typing import Any

from mindspeed_tft.patches.megatron_unproved import Unproved, first


def _on(value: Any) -> bool:
    """Of an option whose word for "off" is one of its choices."""
    return value not in (None, "", "disable")


_SWAPPED = "tensors that are on their way between device and host when a step is broken off are not waited for"
_STATES = "the optimizer's states are not plain fp32 tensors on the device, which a dump and a repair expect"
_SCHEDULE = "its own pipeline schedule keeps operations and micro-batches that a broken step leaves behind"
_EXPERTS = "its expert layers keep operations or counts that a broken step leaves behind"
_KERNELS = "it needs kernels that the tests cannot run, so it is not proved exact"
_LAYERS = "its layers are not proved exact in this version"
_LOOP = "it replaces a part of the training loop that a recovery enters again"
_GROUPS = "the groups that it makes are not proved to come back after a repair"
_OTHER_SYSTEM = "two systems would both try to recover the job"

UNPROVED: tuple[Unproved, ...] = (
    # ------------------------------------------------------------------------------- optimizer, gradients, buckets
    Unproved(
        "reuse_fp32_param",
        bool,
        "main parameters share their memory with those of the model and are rebuilt from both in each update, which no"
        " stamp of the update covers",
    ),
    Unproved("swap_optimizer", bool, f"{_STATES}; {_SWAPPED}"),
    Unproved("virtual_optimizer", bool, _STATES),
    Unproved("compress_optimizer", bool, _STATES),
    Unproved(
        "optimizer_selection",
        lambda value: value not in (None, "fused_adamw"),
        "only the states of fused_adamw are those that a dump and a repair know",
        "use --optimizer-selection fused_adamw (MindSpeed's default)",
    ),
    Unproved("quant_states", bool, _STATES),
    Unproved("quant_grads", bool, "scales of quantized gradients are not put back when a step is broken off"),
    Unproved("layerzero", bool, "it shards parameters and gradients in a way of its own, which keeps no replicas"),
    Unproved(
        "reset_bucket_group_order",
        bool,
        "the order of gathers that a rank finds out in its first step is not known to a process in another's place",
    ),
    Unproved("disable_gloo_group", bool, "Megatron's format torch is saved through gloo groups"),
    Unproved("ckpt_acceleration", bool, "it replaces how checkpoints are saved"),
    # ------------------------------------------------------------------------------------------------ schedules
    Unproved("schedules_method", bool, _SCHEDULE),
    Unproved("moe_fb_overlap", bool, _SCHEDULE),
    Unproved("optimize_send_recv_comm", bool, f"{_SCHEDULE}; {_GROUPS}"),
    Unproved("use_multiparameter_pipeline_model_parallel", bool, _SCHEDULE),
    Unproved("recompute_in_bubble", bool, _SCHEDULE),
    Unproved("recompute_in_advance", bool, _SCHEDULE),
    Unproved("variable_seq_lengths", bool, "the shapes that stages tell each other are not put back"),
    Unproved("automated_pipeline", bool, "what it measures in the first steps decides how later ones are computed"),
    Unproved("pipeline_model_parallel_layout", bool, "stages of several kinds of layers are not proved exact"),
    Unproved("pipeline_num_transformer_layers", bool, "stages of different sizes are not proved exact with MindSpeed"),
    Unproved("async_log_allreduce", bool, f"{_LOOP}, and leaves operations of the broken step behind"),
    # --------------------------------------------------------------------------------------------------- memory
    Unproved("swap_attention", bool, _SWAPPED),
    Unproved("swap_layer_input", bool, _SWAPPED),
    Unproved("smart_swap", bool, f"{_SWAPPED}; what it has learned of memory in earlier steps is not put back"),
    Unproved("compress_activation", bool, f"{_SWAPPED}, nor those that are compressed"),
    Unproved("compress_dense", _on, _KERNELS),
    # -------------------------------------------------------------------------------------------------- experts
    Unproved("moe_allgather_overlap_comm", bool, _EXPERTS),
    Unproved("moe_alltoall_overlap_comm", bool, _EXPERTS),
    Unproved("moe_alltoall_mc2", bool, _KERNELS),
    Unproved("moe_zero_memory", _on, _EXPERTS),
    Unproved("moe_tp_extend_ep", bool, "experts are divided in a way for which there is no holder map"),
    Unproved("moe_permutation_async_comm", bool, _EXPERTS),
    Unproved("balanced_moe_experts", bool, f"{_EXPERTS}; {_GROUPS}"),
    Unproved("enable_expert_placement", bool, "experts move between ranks, and no holder map follows them"),
    Unproved("print_expert_load", bool, "what it counts of experts is not put back"),
    Unproved("use_fused_moe_token_permute_and_unpermute", bool, _KERNELS),
    Unproved("fix_router", bool, _LAYERS),
    # --------------------------------------------------------------------------------------- layers, parallelism
    Unproved("tp_2d", bool, f"{_LAYERS}; {_GROUPS}"),
    Unproved("unaligned_linear", bool, _LAYERS),
    Unproved("use_ascend_mc2", bool, "its kernels communicate by themselves, and cannot be left when a peer has died"),
    Unproved("use_ascend_coc", bool, "its kernels communicate by themselves, and cannot be left when a peer has died"),
    Unproved("multi_head_latent_attention", bool, _LAYERS),
    Unproved("use_fusion_attn_v2", bool, _KERNELS),
    Unproved("alibi_fusion_attn_type", lambda value: value is not None, _KERNELS),
    Unproved("reset_attention_mask", bool, "MindSpeed keeps lengths of a batch's sequences, which are not put back"),
    Unproved("qat_scheme", bool, "scales of quantized weights are not put back"),
    Unproved("qad_enable", bool, f"{_LOOP}, and keeps a second model, of which there are no replicas"),
    Unproved("dist_train", bool, "jobs of several models have no holder map"),
    # ------------------------------------------------------------------------------------- loop, watching, others
    Unproved(
        "ttp_enabled",
        bool,
        f"{_OTHER_SYSTEM}, and it replaces the optimizer's classes that a dump relies on",
        "leave it out (or ttp_enabled of the arguments of repatch)",
    ),
    Unproved("auto_settings", bool, "it starts jobs of its own to try settings", "find the settings without it"),
    Unproved("op_cal_tflops", bool, "what it counts in a step that is broken off is not put back"),
    Unproved("npu_datadump", bool, "what is written in a step that is computed again would be there twice"),
    Unproved("aiqos", bool, f"{_GROUPS}, with their places in the network's queues"),
    Unproved("jit_compile", bool, _KERNELS),
    Unproved(
        "ai_framework",
        lambda value: value not in (None, "pytorch"),
        "only MindSpeed on torch is covered",
    ),
)


def refused(space: Any) -> Unproved | None:
    """The first option of MindSpeed that is refused; `space`: arguments, whether or not they have MindSpeed's."""
    return first(space, UNPROVED)
