"""Every option that no test has proved exact, with a command line that has it.

Data only: `test_refusals.py` starts each, `scripts/compatibility.py` prints them. What is said to the user stands in
`mindspeed_tft.patches.megatron_unproved`.
"""

from __future__ import annotations

from typing import NamedTuple


class Refused(NamedTuple):
    """A feature that is refused at start-up. What is said stands in `megatron_unproved.UNPROVED`."""

    features: str
    flags: dict[str, str]  # attribute of that table: command line with it; "" where Megatron cannot parse one here


REFUSED: tuple[Refused, ...] = (
    Refused(
        "context parallelism",
        {
            "context_parallel_size": "--context-parallel-size 2",
            "hybrid_context_parallel": "--hybrid-context-parallel",
        },
    ),
    Refused(
        "weights sharded over data-parallel ranks",
        {
            "tensor_parallel_num_weight_shards": "--tensor-parallel-num-weight-shards 2",
            "expert_tensor_parallel_num_weight_shards": "--expert-tensor-parallel-num-weight-shards 2",
        },
    ),
    Refused(
        "FSDP",
        {"use_torch_fsdp2": "--use-torch-fsdp2", "use_megatron_fsdp": "--use-megatron-fsdp", "use_custom_fsdp": ""},
    ),
    Refused(
        "process groups of another kind",
        {
            "create_all_gather_group": "--create-all-gather-group",
            "pipeline_model_parallel_comm_backend": "--pipeline-model-parallel-comm-backend ucc",
            "fake_process_group": "--fake-process-group",
            "distributed_timeout_seconds_after_init": "--distributed-timeout-seconds-after-init 60",
        },
    ),
    Refused("precision-aware optimizer", {"use_precision_aware_optimizer": "--use-precision-aware-optimizer"}),
    Refused("optimizer offloaded to the CPU", {"optimizer_cpu_offload": "--optimizer-cpu-offload"}),
    Refused("optimizers other than Adam: SGD, Muon, Lion, SOAP", {"optimizer": "--optimizer muon"}),
    Refused(
        "parameter gather inside the update",
        {"overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step"},
    ),
    Refused(
        "CUDA graphs",
        {
            "enable_cuda_graph": "--enable-cuda-graph",
            "external_cuda_graph": "--external-cuda-graph",
            "cuda_graph_impl": "--cuda-graph-impl local",
            "optimizer_cuda_graph": "--optimizer-cuda-graph",
        },
    ),
    Refused(
        "fp8 and fp4",
        {
            "fp8": "--fp8-format hybrid",
            "fp4": "--fp4-format e2m1",
            "fp8_param_gather": "--fp8-param-gather",
            "fp4_param_gather": "--fp4-param-gather",
        },
    ),
    Refused(
        "TransformerEngine",
        {
            "transformer_impl": "--transformer-impl transformer_engine",
            "te_precision_config_file": "--te-precision-config-file F",
            "te_rng_tracker": "--te-rng-tracker",
            "inference_rng_tracker": "--inference-rng-tracker",
            "use_kitchen_attention": "--use-kitchen-attention",
        },
    ),
    Refused("fused gradient accumulation", {"gradient_accumulation_fusion": "!--no-gradient-accumulation-fusion"}),
    Refused(
        "weight gradients that are computed later",
        {
            "delay_wgrad_compute": "--delay-wgrad-compute",
            "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute",
        },
    ),
    Refused(
        "communication inside layers and of gradients of other types",
        {
            "tp_comm_overlap": "--tp-comm-overlap",
            "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
            "use_ring_exchange_p2p": "--use-ring-exchange-p2p",
            "nccl_ub": "--use-nccl-ub",
            "symmetric_ar_type": "--symmetric-ar-type two_shot",
            "ddp_reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
            "ddp_param_name_patterns_for_fp32_local_accumulation": (
                "--ddp-param-name-patterns-for-fp32-local-accumulation W"
            ),
        },
    ),
    Refused(
        "activations offloaded to the CPU",
        {
            "cpu_offloading_num_layers": "--cpu-offloading-num-layers 1",
            "fine_grained_activation_offloading": "--fine-grained-activation-offloading",
        },
    ),
    Refused("multi-token prediction", {"mtp_num_layers": "--mtp-num-layers 1"}),
    Refused(
        "linear and sparse attention, Mamba",
        {
            "experimental_attention_variant": "--experimental-attention-variant dsa",
            "hybrid_layer_pattern": "--hybrid-layer-pattern MM",
            "hybrid_override_pattern": "--hybrid-override-pattern MM",
            "is_hybrid_model": "--is-hybrid-model",
        },
    ),
    Refused(
        "weights clipped by their attention logits",
        {"qk_clip": "--qk-clip", "log_max_attention_logit": "--log-max-attention-logit"},
    ),
    Refused("no parameter trained", {"freeze_all_layers": "--freeze-all-layers"}),
    Refused(
        "checkpoints without all states, or elsewhere",
        {"no_save_optim": "--no-save-optim", "no_save_rng": "--no-save-rng", "enable_msc": ""},
    ),
    Refused(
        "plans and places of checkpoints that a newcomer cannot know",
        {
            "ckpt_assume_constant_structure": "--ckpt-assume-constant-structure",
            "non_persistent_save_interval": "--non-persistent-save-interval 5",
        },
    ),
    Refused(
        "some ways to train experts",
        {
            "moe_use_upcycling": "--moe-use-upcycling",
            "moe_grouped_gemm": "--moe-grouped-gemm",
            "moe_token_dispatcher_type": "--moe-token-dispatcher-type flex",
            "moe_enable_deepep": "--moe-enable-deepep",
            "moe_shared_expert_overlap": "--moe-shared-expert-overlap",
            "moe_paged_stash": "--moe-paged-stash",
            "moe_enable_routing_replay": "--moe-enable-routing-replay",
            "moe_router_force_biased": "--moe-router-force-biased -0.5",
            "moe_router_load_balancing_type": "--moe-router-load-balancing-type quantile_balancing",
        },
    ),
    Refused("batch ramp-up by the older flag", {"rampup_batch_size": "--rampup-batch-size 8 8 64"}),
    Refused(
        "steps that are skipped",
        {
            "iterations_to_skip": "--iterations-to-skip 5",
            "result_rejected_tracker_filename": "--result-rejected-tracker-filename rejected.txt",
        },
    ),
    Refused(
        "data that cannot be sought to a step",
        {
            "dataloader_type": "--dataloader-type external",
            "phase_transition_iterations": "--phase-transition-iterations 3",
            "fim_data": "--fim-data",
            "logits_load_dir": "--logits-load-dir D",
        },
    ),
    Refused(
        "packed sequences", {"sft": "--sft", "dataloader_inter_document_masking": "--dataloader-inter-document-masking"}
    ),
    Refused(
        "validation over whole or several sets",
        {"full_validation": "--full-validation", "multiple_validation_sets": "--multiple-validation-sets"},
    ),
    Refused(
        "trainings with a state of their own",
        {"perform_rl_step": "--perform-rl-step", "vision_pretraining": "--vision-pretraining"},
    ),
    Refused(
        "statistics that judge a result",
        {
            "check_for_spiky_loss": "--check-for-spiky-loss",
            "check_for_large_grads": "--check-for-large-grads",
            "rerun_mode": "--rerun-mode report_stats",
        },
    ),
    Refused(
        "faults injected by Megatron",
        {
            "error_injection_rate": "--error-injection-rate 10",
            "fault_injector_ranks": "--fault-injector-ranks 1",
            "fault_injector_num_ranks": "--fault-injector-num-ranks 1",
        },
    ),
    Refused(
        "other systems that restart a job",
        {
            "inprocess_restart": "--inprocess-restart",
            "enable_ft_package": "--enable-ft-package",
            "adlr_autoresume": "--adlr-autoresume",
        },
    ),
    Refused("straggler detector", {"log_straggler": "--log-straggler"}),
    Refused(
        "measurements that begin with the training loop",
        {
            "profile": "--profile",
            "log_energy": "--log-energy",
            "gpu_sniff_test_interval": "--gpu-sniff-test-interval 10",
            "run_workload_inspector_server": "--run-workload-inspector-server",
        },
    ),
    Refused(
        "files written in a step",
        {
            "save_params_interval": "--save-params-interval 5",
            "save_wgrads_interval": "--save-wgrads-interval 5",
            "save_dgrads_interval": "--save-dgrads-interval 5",
            "save_activations_interval": "--save-activations-interval 5",
            "save_tokens_per_expert_interval": "--save-tokens-per-expert-interval 5",
            "moe_routing_trace_path": "--moe-routing-trace-path D",
            "logits_save_dir": "--logits-save-dir D",
        },
    ),
    Refused("a file instead of flags", {"yaml_cfg": ""}),
)
