#!/usr/bin/env bash
# Llama 2 70B with Megatron and MindSpeed on 8 nodes of 16 Ascend NPUs: tensor parallel 8, pipeline parallel 4, data
# parallel 4.
#
# WHAT IS NOT PROVED YET: no NPU was at hand (docs/npu.md says what is proved without one). PROTECT=0 leaves the
# plugin's flags out and trains unprotected. The flags are checked by scripts/check_examples.py.
#
# On each node, with NODE_RANK 0 to 7:
#   NODE_RANK=0 MASTER_ADDR=node0 DATA=/data/llama SAVE=/shared/llama2-70b examples/llama2_70b_npu.sh
# A lost node is replaced by the same command with its NODE_RANK, there or on a machine that takes its address.
# DOCTOR=1 does not train: it looks at all nodes, and at every way between them. Arguments are appended, so they
# win.
set -euo pipefail
: "${NODE_RANK:?number of this node, 0 to 7}" "${MASTER_ADDR:?name or address of node 0}"
: "${DATA:?prefix of the tokenized data, and tokenizer.model beside it}" "${SAVE:?directory that all nodes mount}"
PROGRAM="${PROGRAM:-pretrain_gpt.py}"  # Megatron's, with mindspeed.megatron_adaptor and mindspeed_tft.adaptor
# Where the authority is, which should be no training host: tftctl certs init; tftctl certs node node0 ... node7.
# Then each host gets its own directory, or all of them are copied here, if every host may see the keys of the
# others.
TLS="${TLS:-$SAVE/tls}"

# --- Ascend. The interface that gloo and hccl meet on, and a wait for a slow node that is longer than ours for a
# fault.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}" CUDA_DEVICE_MAX_CONNECTIONS=1
export GLOO_SOCKET_IFNAME="${IFNAME:-eth0}" HCCL_SOCKET_IFNAME="${IFNAME:-eth0}"
# Repair of device memory asks torch's caching allocator what a damaged address belongs to: it must not be off.
unset PYTORCH_NO_NPU_MEMORY_CACHING

# --- The plugin. The preset has reboot, repair and two replicas; what is set here is what only this cluster knows.
PROTECTION=(
  --tft-config large-cluster
  # One certificate a host: without them several nodes are refused, because anybody could command the job.
  --tft-tls-dir "$TLS" --tft-controller-port 29654
  # TP 8 on nodes of 16: each node has two of the four data-parallel ranks of a stage. Shard i is on ranks i and i
  # + 2, so on two nodes, and the loss of one node loses no shard. --tft-require-separate-hosts, in the preset,
  # refuses to start otherwise.
  --optimizer-replica-num 2
  # A dump takes 69 billion parameters * 14 bytes = 966 GB: at 10 GB/s some 100 s, and a second attempt has to fit
  # in.
  --tft-deadline 600
)
[[ "${PROTECT:-1}" == 1 ]] || PROTECTION=()

PARALLEL=(
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel
  # The optimizer is sharded, so that there are shards to keep replicas of.
  --use-distributed-optimizer --overlap-grad-reduce --distributed-backend nccl  # hccl, by transfer_to_npu's names
)
MODEL=(
  --use-mcore-models  # core_r0.6.0 has others beside them; newer releases only know these
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
  --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096
  --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --position-embedding-type rope --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
  --make-vocab-size-divisible-by 1 --transformer-impl local
)
TRAINING=(
  --bf16 --micro-batch-size 1 --global-batch-size 512 --train-iters 50000 --seed 1234
  --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
  --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.01
  --initial-loss-scale 65536 --recompute-activations
  # MindSpeed's own: fused kernels of the NPU.
  --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-flash-attn
  --no-gradient-accumulation-fusion --no-masked-softmax-fusion
)
DATA_FLAGS=(
  --data-path "$DATA" --split 949,50,1 --tokenizer-type Llama2Tokenizer
  --tokenizer-model "$(dirname "$DATA")/tokenizer.model"
)
# Periodic checkpoints stay: they are what is left when all holders of a shard are lost at once. They may be rarer.
OUTPUT=(--save "$SAVE" --load "$SAVE" --save-interval 1000 --log-interval 1 --eval-interval 1000 --eval-iters 10)
FLAGS=("${PARALLEL[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${DATA_FLAGS[@]}" "${OUTPUT[@]}" "${PROTECTION[@]}" "$@")

if [[ "${DOCTOR:-0}" == 1 ]]; then
  exec tftctl doctor --rendezvous "$MASTER_ADDR" --nodes 8 --node-rank "$NODE_RANK" -- "${FLAGS[@]}"
fi
# tftrun takes torchrun's arguments; a plain torchrun ends all workers of the job when one dies.
exec tftrun --nnodes 8 --node-rank "$NODE_RANK" --nproc-per-node 16 \
  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" "$PROGRAM" "${FLAGS[@]}"
