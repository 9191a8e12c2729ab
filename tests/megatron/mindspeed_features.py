"""Every option of MindSpeed, judged: in a drill, apart from what a recovery puts back, or refused.

Data only: `test_mindspeed.py` runs the drills and walks over the options of real checkouts, `scripts/mindspeed_page.py`
prints this as `docs/mindspeed.md`. What is refused stands in `mindspeed_tft.patches.mindspeed_unproved` (and, of
Megatron's own options, in `megatron_unproved`).
"""

from __future__ import annotations

from typing import NamedTuple

RELEASES = ("master (2026-07)", "v26.0.0_core_r0.12.1")
MEGATRON = "core_v0.12.1"


class Drill(NamedTuple):
    """A training with MindSpeed and these flags that has to end exact though it is broken."""

    name: str
    features: str
    flags: str = ""
    fault: str = "kill@1:7:backward"
    preset: str = "recover"
    layout: str = "dp4"
    dtype: str = "bf16"
    order: str = "mindspeed ours"  # of the imports; "repatched": MindSpeed takes its patches back and applies them anew
    seen: str = ""  # a pattern of the broken job's log
    passed: tuple[str, ...] = ()  # with which of `RELEASES`; none: it has not been run yet

    def arguments(self) -> list[str]:
        """For `tftctl drill`, but for the checkout of Megatron."""
        words = ["--preset", self.preset, "--layout", self.layout, "--dtype", self.dtype, "--fault", self.fault]
        before, after = IMPORTS[self.order]
        words += [word for module in before for word in ("--import", module)]
        words += [word for module in after for word in ("--import-after", module)]
        return [*words, "--", *self.flags.split()]


_ADAPTOR, _AGAIN = "mindspeed.megatron_adaptor", "mindspeed_repatched"
IMPORTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mindspeed ours": ((_ADAPTOR,), ()),
    "ours mindspeed": ((), (_ADAPTOR,)),
    "mindspeed ours repatched": ((_ADAPTOR,), (_AGAIN,)),
    "ours mindspeed repatched": ((), (_ADAPTOR, _AGAIN)),
}

DRILLS: tuple[Drill, ...] = (
    Drill("level-0", "what MindSpeed always patches", "--optimization-level 0", dtype="fp32", passed=RELEASES),
    Drill(
        "level-0-dump",
        "the same in a dump",
        "--optimization-level 0",
        fault="kill@1:7:update",
        preset="dump",
        order="ours mindspeed",
        passed=RELEASES,
    ),
    Drill("level-1", "affinity", "--optimization-level 1", order="ours mindspeed repatched", passed=RELEASES),
    Drill(
        "level-2",
        "all that is on by default, with its fused kernels and recomputation",
        "--optimization-level 2 --use-flash-attn --normalization RMSNorm --use-fused-rmsnorm --swiglu"
        " --use-fused-swiglu --position-embedding-type rope --use-fused-rotary-pos-emb --recompute-activation-function"
        " --recompute-norm --npu-deterministic",
        order="mindspeed ours repatched",
        passed=RELEASES,
    ),
    Drill(
        "level-2-dump",
        "the same in a dump, with padded buffers",
        "--optimization-level 2 --use-flash-attn --param-and-grad-buffer-pad 512 --overlap-grad-reduce"
        " --overlap-param-gather",
        fault="kill@2:7:update",
        preset="dump",
        passed=RELEASES,
    ),
    Drill(
        "pipeline",
        "stages that send one by one, layers that do nothing",
        "--optimization-level 2 --num-layers 4 --noop-layers 3",
        layout="pp2dp2",
        passed=RELEASES,
    ),
    Drill(
        "tensor",
        "tensor parallelism",
        "--optimization-level 2",
        layout="tp2dp2",
        fault="uce@1:7:backward",
        preset="retry",
        passed=RELEASES,
    ),
)

# Options that drills have, by the name of one.
DRILLED: dict[str, str] = {
    "--optimization-level": "level-0",
    "--use-fused-rmsnorm": "level-2",
    "--use-fused-swiglu": "level-2",
    "--use-fused-rotary-pos-emb": "level-2",
    "--recompute-activation-function": "level-2",
    "--recompute-norm": "level-2",
    "--npu-deterministic": "level-2",
    "--param-and-grad-buffer-pad": "level-2-dump",
    "--noop-layers": "pipeline",
}


class Apart(NamedTuple):
    """Options that nothing of a recovery depends on."""

    flags: str
    why: str


APART: tuple[Apart, ...] = (
    Apart(
        "--pre-tockens --next-tockens --sparse-mode --square-alibi-mask --fill-neg-inf --alibi-diagonal-opposite",
        "numbers that an attention kernel is called with; it keeps nothing from one micro-batch to the next",
    ),
    Apart("--tokenizer-name-or-path --tokenizer-not-use-fast", "read once, when the tokenizer is built"),
    Apart(
        "--hccl-group-buffer --hccl-group-buffer-adaptive --hccl-op-mode",
        "sizes of buffers of groups of hccl, which keep nothing; no device has shown what a repair makes of them",
    ),
    Apart("--n-shared-experts", "another way to say --moe-shared-expert-intermediate-size"),
    Apart(
        "--recompute-activation-function-num-layers --recompute-norm-num-layers --enable-recompute-layers-per-pp-rank",
        "how many layers are computed again in a backward pass; which has no state of its own",
    ),
)

# A command line with each option that is refused, where its name alone is none.
WORDS: dict[str, str] = {
    "virtual_optimizer": "--virtual-optimizer all",
    "optimizer_selection": "--optimizer-selection fused_ema_adamw",
    "quant_states": "--quant-states fp8",
    "schedules_method": "--schedules-method dualpipev",
    "compress_activation": "--compress-activation 0:1",
    "compress_dense": "--compress-dense level0",
    "moe_zero_memory": "--moe-zero-memory level0",
    "qat_scheme": "--qat-scheme w4a16-mxfp4",
    "ai_framework": "--ai-framework mindspore",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout Et|tL",
    "pipeline_num_transformer_layers": "--pipeline-num-transformer-layers [[1],[1]]",
    "alibi_fusion_attn_type": "--alibi-fusion-attn-type 0",
    "reset_attention_mask": "--reset-attention-mask",
}

# Options that are read only beside another one, which is refused; or not refused, and then has no state either.
COMPANIONS: dict[str, str] = {
    "--swap-optimizer": "--swap-optimizer-times",
    "--optimizer-selection": "--ema-decay",
    "--layerzero": "--layerzero-config",
    "--disable-gloo-group": "--hccl-slice-size",
    "--schedules-method": "--dualpipev-dw-detach",
    "--moe-fb-overlap": "--moe-unperm2-mem-optim-swap",
    "--swap-attention": "--swap-modules",
    "--moe-zero-memory": "--moe-zero-memory-num-layers",
    "--balanced-moe-experts": "--balanced-moe-hot-expert-num --trans-hot-expert-group-num",
    "--enable-expert-placement": "--expert-placement-freq --enable-fine-grained-expert-placement"
    " --fine-grained-expert-placement-thre",
    "--tp-2d": "--tp-x --tp-y --enable-overlap-ag-with-matmul --enable-overlap-matmul-with-rs"
    " --enable-backward-overlap-ag-with-matmul",
    "--use-ascend-coc": "--coc-mode --coc-parallel-num --coc-fused-kernel",
    "--multi-head-latent-attention": "--qk-rope-head-dim --qk-nope-head-dim",
    "--reset-attention-mask": "--fix-sub-seq-length",
    "--qat-scheme": "--qat-quant-block-size",
    "--qad-enable": "--no-qad-enable --qad-teacher-load --kl-temperature --kl-loss-weight --kl-loss-reduction",
    "--ttp-enabled": "--ttp-server-ip --ttp-server-port --ttp-dump-dir --ttp-max-dump-ckpt-to-keep --ttp-save-optimizer"
    " --ttp-save-rng --ttp-dump-timeout-seconds --ttp-wait-dump-file-timeout --ttp-heartbeat-interval-ms"
    " --ttp-heartbeat-timeout-ms --ttp-max-missed-count",
    "--auto-settings": "--auto-settings-work-dir --auto-settings-ranks --auto-settings-log-level --target-nnodes"
    " --nnodes --nproc-per-node --node-rank --auto-settings-type --prof-file --master-addr --master-port",
    "--automated-pipeline": "--automated-pipeline-perf --recompute-module-list",
    "--aiqos": "--aiqos-mode --aiqos-schedule --aiqos-enable-roce",
    "--hccl-group-buffer-adaptive": "--hccl-ep-group-buffer-adaptive-factor",
    # Of Megatron's own options.
    "--profile": "--profile-level --profile-with-cpu --profile-with-stack --profile-with-memory --profile-record-shapes"
    " --profile-save-path",
    "--context-parallel-size": "--context-parallel-algo --cp-window-size --attention-mask-type"
    " --use-cp-send-recv-overlap --use-fused-ring-attention-update --megatron-cp-in-bnsd --attention-mask-on-cpu"
    " --adaptive-cp-without-coarse --adaptive-cp-dynamic-attn-mask --adaptive-cp-only-reschedule"
    " --adaptive-cp-manually-set-mask-list --context-parallel-kv-cache-policy --context-parallel-cache-interval"
    " --use-ulysses-allgather-kv --ulysses-degree-in-cp",
    "--use-torch-fsdp2": "--fsdp2-config-path",
    "--moe-grouped-gemm": "--gemm-gradient-accumulation-fusion",
    "--transformer-impl": "--no-use-gmm-fp8 --te-comparison-with-cpu --te-comparison-with-bf16 --te-gmm-mode"
    " --fp8-reuse-quantized-weight",
    "--experimental-attention-variant": "--use-dsa-absorb --use-fused-lightning-indexer"
    " --use-fused-sparse-flash-attention --use-fused-lightning-indexer-kl-loss",
    "--optimizer": "--muon-momentum --muon-no-split-qkv --muon-nesterov --muon-scale-mode --muon-fp32-matmul-prec"
    " --muon-coefficient-type --muon-num-ns-steps --muon-tp-mode --muon-extra-scale-factor --muon-scalar-optimizer"
    " --apply-wd-to-qk-layernorm",
}
