#!/bin/bash
# benchmarks/h200/ladder.sh SECONDS RATE MODEL:BATCH...   every kind of exchange beside DDP and its hooks, 4 NCCL hosts on one GPU
#   benchmarks/h200/ladder.sh 300 10gbit resnet50:32 llama-134m:4 densenet201:32
#   benchmarks/h200/ladder.sh 400 25gbit llama-134m:4 bert-base:8 densenet201:32 gpt2:4
# A model takes 50 to 150 s, most of it searches. The report, $OUT/ladder_RATE.md, is written after every model.
set -u
export PYTHONPATH=src:carry/site:. PYTHONUNBUFFERED=1
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
limit=$1 rate=$2; shift 2
models=(); for model in "$@"; do models+=(--model "$model"); done
kinds=(); for kind in ${KINDS:-int8 int4 auto oktopk:0.01:bf16}; do kinds+=(--compress "$kind"); done
timeout -k 10 "$limit" python3 -m anabranch lab --hosts 4 --rate "$rate" --backend nccl -- python3 -m anabranch bench \
  "${models[@]}" "${kinds[@]}" ${HOOKS---only PowerSGD --only "fp16 hook"} --search-steps 50 --profile-steps 4 \
  --num-iters 3 --num-batches-per-iter 4 --num-warmup-batches 2 --report "$OUT/ladder_$rate.md" --force \
  > "$OUT/ladder_$rate.txt" 2> "$OUT/ladder_$rate.log"
echo "exit $?"
grep -E 'chosen in|round 3|rror' "$OUT/ladder_$rate.log" | cut -c1-300
