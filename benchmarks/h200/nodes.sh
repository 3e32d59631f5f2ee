#!/bin/bash
# benchmarks/h200/nodes.sh [MODEL:BATCH...]   ranks that share a network card: 2 NCCL hosts of 4 ranks on one GPU, 10 Gbit/s, memory inside
# DDP, its fp16 hook, DataParallel and its int8, both also flat. About 90 s for resnet50, 280 s for llama-134m, most of it searches; no model
# begins after TOTAL_S (480), and each ends after LIMIT_S (320). $OUT gets a report for each: nodes_MODEL.md.
# NCCL takes every rank of the lab for a host of its own. NCCL_ALGO=allreduce:tree, or ring, before the command runs all-reduces so, as nodes would.
set -u
export PYTHONPATH=src:carry/site:. PYTHONUNBUFFERED=1
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
PY=${PY:-python3}; HOSTS=${HOSTS:-2}; RANKS=${RANKS:-4}; RATE=${RATE:-10gbit}; LAB=${LAB---backend nccl --inside memory}
kinds=(); for kind in ${KINDS:-int8}; do kinds+=(--compress "$kind"); done
[ $# -eq 0 ] && set -- resnet50:32 llama-134m:4
for model in "$@"; do
  left=$((${TOTAL_S:-480} - SECONDS)); limit=$((${LIMIT_S:-320} < left ? ${LIMIT_S:-320} : left))
  (( limit < 30 )) && { echo "no time for $model"; break; }
  algorithm=${NCCL_ALGO:-}; report="$OUT/nodes_${model%%:*}${algorithm:+_${algorithm//[^A-Za-z0-9]/_}}"; begun=$SECONDS
  timeout -k 10 $limit $PY -m anabranch lab --hosts $HOSTS --ranks-per-host $RANKS --rate $RATE $LAB -- $PY -m anabranch bench \
    ${WORKLOAD:---model $model} "${kinds[@]}" ${FLAT---flat} --only 'fp16 hook' --search-steps ${SEARCH:-50} --profile-steps 4 \
    --num-iters 4 --num-batches-per-iter 4 --num-warmup-batches 2 --report "$report.md" --force > "$report.txt" 2> "$report.log"
  echo "$model: exit $?, $((SECONDS - begun)) s"
  grep '^| ' "$report.md" || grep -E 'chosen in|round|rror' "$report.log" | cut -c1-300
done
