#!/bin/bash
# benchmarks/h200/queues.sh   what hardware queues change: DDP, its fp16 hook and DataParallel with 2 and with 8 a rank, in turns
# A lab for each, one after the other, twice, since the number is fixed when a process starts: about 150 s in all; TURNS=1 halves it.
set -u
export PYTHONPATH=src:carry/site:. PYTHONUNBUFFERED=1
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
for turn in $(seq ${TURNS:-2}); do
  for queues in 2 8; do
    CUDA_DEVICE_MAX_CONNECTIONS=$queues timeout -k 10 60 python3 -m anabranch lab --hosts 4 --rate ${RATE:-25gbit} --backend ${BACKEND:-nccl} -- \
      python3 -m anabranch bench ${WORKLOAD:---model resnet50:32} --only 'fp16 hook' --search-steps 23 --profile-steps 4 \
      --num-iters 3 --num-batches-per-iter 4 --num-warmup-batches 2 --report "$OUT/queues_${queues}_$turn.md" --force > /dev/null 2> "$OUT/queues_${queues}_$turn.log"
    echo "$queues queues, turn $turn: exit $?"; grep '^| [cD*]' "$OUT/queues_${queues}_$turn.md"
  done
done
