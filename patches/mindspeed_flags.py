"""Names of MindSpeed's own flags, so that a Megatron that does not know one can say whose it is.

Of the versions for core_r0.6.0 (1.0.0), core_r0.12.1 (26.0.0), and of its main branch. A test with checkouts compares.
"""

from __future__ import annotations

MINDSPEED = frozenset(
    """
    --adaptive-cp-dynamic-attn-mask --adaptive-cp-manually-set-mask-list --adaptive-cp-only-reschedule
    --adaptive-cp-without-coarse --adaptive-memory-optimization --adaptive-recompute-device-size
    --adaptive-recompute-device-swap --adaptive-recompute-profiling-step --add-dense-bias --add-qkv-bias
    --additional-config --ai-framework --aiqos --aiqos-enable-roce --aiqos-mode --aiqos-schedule
    --alibi-diagonal-opposite --alibi-fusion-attn-type --ampipe-degree --ampipe-tp-sp-comm-overlap
    --apply-wd-to-qk-layernorm --async-log-allreduce --attention-mask-on-cpu --attention-mask-type --auto-settings
    --auto-settings-log-level --auto-settings-ranks --auto-settings-type --auto-settings-work-dir
    --automated-pipeline --automated-pipeline-perf --balanced-moe-experts --balanced-moe-hot-expert-num
    --coc-fused-kernel --coc-mode --coc-parallel-num --compress-activation --compress-dense --compress-optimizer
    --context-parallel-algo --context-parallel-cache-interval --context-parallel-kv-cache-policy --cp-window-size
    --ddp-bucket-size --disable-gloo-group --dist-train --dualpipev-dw-detach --ema-decay --ema_model
    --enable-backward-overlap-ag-with-matmul --enable-expert-placement --enable-fine-grained-expert-placement
    --enable-hbmfault-repair --enable-high-availability --enable-optimizer-state-local-copy
    --enable-overlap-ag-with-matmul --enable-overlap-matmul-with-rs --enable-recompute-layers-per-pp-rank
    --enable-token-rearrange-opt --enable-worker-reboot --enable-zero3 --experimental-attention-variant
    --expert-interval --expert-placement-freq --fill-neg-inf --fine-grained-expert-placement-thre --fix-router
    --fix-sub-seq-length --for_release --fp8-reuse-quantized-weight --fsdp2-config-path
    --gemm-gradient-accumulation-fusion --hccl-ep-group-buffer-adaptive-factor --hccl-group-buffer
    --hccl-group-buffer-adaptive --hccl-op-mode --hccl-slice-size --input_folder --jit-compile --kl-loss-reduction
    --kl-loss-weight --kl-temperature --kv-lora-rank --layerzero --layerzero-config --local-rank --master-addr
    --master-port --mbs-idx --megatron-cp-in-bnsd --memory-fragmentation --moe-adaptive-recompute-activation
    --moe-adaptive-recompute-activation-scale --moe-allgather-overlap-comm --moe-alltoall-mc2
    --moe-alltoall-overlap-comm --moe-bmm-mc2 --moe-dynamic-padding --moe-fb-overlap --moe-model-type --moe-no-drop
    --moe-permutation-async-comm --moe-tp-extend-ep --moe-train-capacity-factor --moe-unperm2-mem-optim-swap
    --moe-use-sinkhorn --moe-zero-memory --moe-zero-memory-num-layers --multi-head-latent-attention
    --muon-coefficient-type --muon-extra-scale-factor --muon-fp32-matmul-prec --muon-momentum --muon-nesterov
    --muon-no-split-qkv --muon-num-ns-steps --muon-scalar-optimizer --muon-scale-mode --muon-tp-mode
    --n-shared-experts --nd1-dim1-size --nd2-dim1-size --next-tockens --nnodes --no-qad-enable --no-use-gmm-fp8
    --no-use-rts --node-rank --noisy-gate-policy --noop-layers --nproc-per-node --npu-datadump --npu-deterministic
    --num-layer-list --op-cal-tflops --optimization-level --optimize-send-recv-comm --optimize-vpp-send-recv-comm
    --optimized-mbs-list --optimized-mbs-mode --optimizer-selection --output_folder --param-and-grad-buffer-pad
    --patch --pipe-experts-multi-data --pipe-experts-multi-stream --pipeline-model-parallel-layout
    --pipeline-num-transformer-layers --pp-schedule-list --pre-tockens --prefix --print-expert-load --prof-file
    --profile-level --profile-ranks --profile-record-shapes --profile-save-path --profile-with-cpu
    --profile-with-memory --profile-with-stack --q-lora-rank --qad-enable --qad-teacher-load --qat-quant-block-size
    --qat-scheme --qk-nope-head-dim --qk-rope-head-dim --quant-grads --quant-states --recompute-activation-function
    --recompute-activation-function-num-layers --recompute-in-advance --recompute-in-bubble --recompute-module-list
    --recompute-norm --recompute-norm-num-layers --recompute-type --reset-bucket-group-order --reuse-fp32-param
    --reverse --rope-scaling-beta-fast --rope-scaling-beta-slow --rope-scaling-factor --rope-scaling-mscale
    --rope-scaling-mscale-all-dim --rope-scaling-original-max-position-embeddings --rope-scaling-type --rotary-base
    --save-memory-ratio --schedules-method --shape-order --skip-bias-add --smart-swap --sparse-mode
    --square-alibi-mask --swap-attention --swap-layer-input --swap-modules --swap-optimizer --swap-optimizer-times
    --target-nnodes --target_pp --target_tp --te-comparison-with-bf16 --te-comparison-with-cpu --te-gmm-mode
    --tokenizer-name-or-path --tokenizer-not-use-fast --tokenizer-type --tp-2d --tp-x --tp-y
    --trans-hot-expert-group-num --ttp-dump-dir --ttp-dump-timeout-seconds --ttp-enabled --ttp-heartbeat-interval-ms
    --ttp-heartbeat-timeout-ms --ttp-max-dump-ckpt-to-keep --ttp-max-missed-count --ttp-save-optimizer
    --ttp-save-rng --ttp-server-ip --ttp-server-port --ttp-wait-dump-file-timeout --ulysses-degree-in-cp
    --unaligned-linear --use-ascend-coc --use-ascend-mc2 --use-cp-send-recv-overlap --use-dsa-absorb --use-ema
    --use-fused-lightning-indexer --use-fused-lightning-indexer-kl-loss --use-fused-moe-token-permute-and-unpermute
    --use-fused-ring-attention-update --use-fused-rmsnorm --use-fused-rotary-pos-emb
    --use-fused-sparse-flash-attention --use-fused-swiglu --use-fusion-attn-v2
    --use-multiparameter-pipeline-model-parallel --use-nanopipe --use-nanopipe-swap --use-nd-matmul
    --use-pipe-experts --use-ulysses-allgather-kv --v-head-dim --variable-seq-lengths --virtual-optimizer
    --yarn-scaling-factor
    """.split()
)
