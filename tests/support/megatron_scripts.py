"""Launch scripts written for the tests, with the flags and the bash habits of public ones."""

from __future__ import annotations

LLAMA3_8B = r"""#!/bin/bash
# one machine of eight
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
OUT=${1:-"checkpoints/run one"}
TOKENIZER=${2:-"MOCK"}
GPUS=8; NODES=${NODES:-2}
WORLD=$(($GPUS*${NODES}))
TP=2
DTYPE="fp8"
mkdir -p "$(dirname "$OUT")"

LAUNCH=( --nproc_per_node $GPUS --nnodes $NODES --node_rank ${RANK:-0} )
MODEL=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096   # a comment
    --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --normalization RMSNorm
    --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAIN=(
    --micro-batch-size 1
    --global-batch-size $((WORLD * 8))
    --train-samples 1280000 --lr-decay-samples 1280000 --lr-warmup-samples 12800
    --lr 3e-4 --min-lr 3.0e-5 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
)
EXTRA=()
if [[ "$DTYPE" == "fp8" ]]; then
    EXTRA+=("--fp8-format hybrid" "--fp8-amax-history-len 1024" "--fp8-amax-compute-algo max" "--fp8-param-gather")
else
    EXTRA+=(--never)
fi
if [[ "$TOKENIZER" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    EXTRA+=("--mock-data" "--vocab-size 128256" "--tokenizer-type NullTokenizer" "--split '99,1,0'")
else
    EXTRA+=("--tokenizer-model $TOKENIZER")
fi
[ -n "$WANDB_API_KEY" ] && EXTRA+=(--wandb-project nothing)
TRAIN+=("${EXTRA[@]}")
if [ ! -f pretrain_gpt.py ]; then
    echo "no script" && exit 1
fi
torchrun ${LAUNCH[@]} \
    pretrain_gpt.py \
    ${MODEL[@]} ${TRAIN[@]} \
    --tensor-model-parallel-size $TP --sequence-parallel \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --save "$OUT" --load "$OUT" --save-interval 1000 --eval-interval 100 --eval-iters 32 --log-interval 1
"""

MIXTRAL_8X7B = r"""#!/bin/bash
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
DATA_PATH=$1
options=" --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --init-method-std 0.02 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm \
  --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights \
  --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding \
  --rotary-base 1000000 --vocab-size 32000 "
MOE="--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 2e-2 \
  --moe-router-dtype fp32 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
options="$options ${MOE}"
options+=" --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
  --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
  --adam-beta2 0.95 --data-path $DATA_PATH --split 99990,8,2
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2
  --expert-model-parallel-size 8 --use-distributed-optimizer"
run_cmd="python -u /opt/megatron/pretrain_gpt.py ${options}"
srun -l --output=%x.log sh -c "${run_cmd}"
"""

# The flags of Megatron-LM's examples/llama/train_llama3_8b_h100_fp8.sh with mock data.
LLAMA3_8B_FP8 = r"""#!/bin/bash
# Llama-3 8B in fp8 on eight H100, with mock data
CHECKPOINTS=${1:-checkpoints/llama3_8b_fp8}
DTYPE="fp8"
NODES=1
LAUNCH="--nproc_per_node 8 --nnodes $NODES --node_rank 0 --master_addr localhost --master_port 6000"
MODEL=(
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAIN=(
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
    --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
    --empty-unused-memory-level 1 --exit-duration-in-mins 235
)
if [[ "$DTYPE" == "fp8" ]]; then
    PRECISION=(--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather)
fi
LAYOUT=(--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel)
DDP=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --tiktoken-pattern v2 --split '99,1,0'
      --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1)
OUTPUT=(--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
        --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60
        --save "$CHECKPOINTS" --load "$CHECKPOINTS" --tensorboard-dir "$CHECKPOINTS/tensorboard")
torchrun $LAUNCH pretrain_gpt.py "${MODEL[@]}" "${TRAIN[@]}" "${PRECISION[@]}" "${LAYOUT[@]}" "${DDP[@]}" "${DATA[@]}" \
    "${OUTPUT[@]}"
"""
