#!/bin/bash
# benchmarks/h200/fidelity.sh   what compress="auto" chooses for the task `code` at 10 and 25 Gbit/s, what its steps take, and what it learns
# About 80 s for the choices, then all trainings at once on the GPU, for at most TRAIN_S seconds. $OUT gets times, plans and curves.
set -u
export PYTHONPATH=src:${SITE-carry/site}:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"; plans=${PLANS:-/tmp/plans}
PY=${PY:-python3}; BACKEND=${BACKEND:-nccl}; DEVICE=${DEVICE:-cuda}; HOSTS=${HOSTS:-4}; TASK=${TASK:-code}; MORE=${MORE:-}
for rate in ${RATES:-10gbit 25gbit}; do
  contestants=(); for contestant in ${TIMED:-dense int8 int4 auto}; do contestants+=(--contestant "$contestant"); done
  timeout -k 10 ${CHOOSE_S:-60} $PY -m anabranch lab --hosts $HOSTS --rate "$rate" --backend $BACKEND -- \
    $PY -m benchmarks.fidelity_times --task $TASK "${contestants[@]}" --device $DEVICE --output "$OUT/times.jsonl" --plans "$plans" \
    > "$OUT/choices_$rate.txt" 2> "$OUT/choices_$rate.log"
  echo "$rate: exit $?"; grep '"step_ms"' "$OUT/choices_$rate.txt"
done
for plan in "$plans"/*.json; do
  echo "$plan: $(grep -o '"collective": *"[^"]*"' "$plan" | sort | uniq -c | tr '\n' ';')"; cp "$plan" "$OUT"
done
if [ $DEVICE = cuda ]; then  # processes that share a GPU take turns without it
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps_pipe CUDA_MPS_LOG_DIRECTORY=/tmp/mps_log; mkdir -p /tmp/mps_pipe /tmp/mps_log
  nvidia-cuda-mps-control -d
fi
trained() { timeout -k 5 ${TRAIN_S:-200} $PY -m benchmarks.fidelity --task $TASK --device $DEVICE --output "$OUT/curves.jsonl" $MORE "$@" & }
for seed in ${SEEDS:-0 1}; do
  for plan in "$plans"/*.json; do trained --contestant "plan:$plan" --seed $seed; done
done
for contestant in ${ALSO:-oktopk:0.01,momentum=0.9,start=0.25}; do trained --contestant "$contestant" --seed 0; done
wait
[ $DEVICE = cuda ] && echo quit | nvidia-cuda-mps-control
tail -n 4 "$OUT/curves.jsonl"
