#!/usr/bin/env bash
# A small GPT on 4 CPU processes, no GPU needed:
#   examples/pretrain_gpt_cpu.sh                                                    stock Megatron
#   PROGRAM=pretrain_gpt.py examples/pretrain_gpt_cpu.sh --enable-high-availability \
#     --save runs/ckpt --save-interval 1000 --train-iters 2000                      then kill -9 a rank from another shell
# Arguments are appended, so they win: e.g. --train-iters 50 --bf16 --tensor-model-parallel-size 2
set -euo pipefail
examples="$(cd "$(dirname "$0")" && pwd)"
PATH="$examples/../.venv/bin:$PATH"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the ranks share the cores

MODEL=(--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
  --seq-length 64 --max-position-embeddings 64)
TRAINING=(--micro-batch-size 2 --train-iters 10 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2
  --weight-decay 0.01 --clip-grad 1.0 --seed 1234 --use-distributed-optimizer --log-interval 1
  --eval-interval 1000 --eval-iters 0)
DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 98,1,1 --num-workers 0)
# Everything that needs a GPU's kernels is off.
ON_CPU=(--distributed-backend gloo --transformer-impl local --use-cpu-initialization
  --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
  --no-persist-layer-norm --no-rope-fusion)

exec torchrun --standalone --nproc-per-node "${RANKS:-4}" "$examples/${PROGRAM:-pretrain_gpt_plain.py}" \
  "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${ON_CPU[@]}" "$@"
