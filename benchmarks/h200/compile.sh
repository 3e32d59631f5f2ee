#!/bin/bash
# benchmarks/h200/compile.sh PART...   DataParallel under torch.compile; parts: test times resnet bert (default: all, in this order). $OUT gets Markdown files.
# Run in the root of the repository; python3 has torch.
set -u
export PYTHONPATH=src:tests:carry/site:. PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor} TORCHINDUCTOR_COMPILE_THREADS=4 OMP_NUM_THREADS=2
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT" "$TORCHINDUCTOR_CACHE_DIR"
PY=${PY:-python3}; DEVICE=${DEVICE:-cuda}; HOSTS=${HOSTS:-4}; RATE=${RATE:-25gbit}; BACKEND=${BACKEND:-nccl}
BENCH=${BENCH:-$PY -m anabranch bench}; MORE=${MORE:-}; TIMES_MORE=${TIMES_MORE:-}
said() { echo "=== $* ($(( $(date +%s) - BEGAN )) s)"; }
BEGAN=$(date +%s)

part_test() {  # about 150 s
  timeout -k 5 240 $PY -m pytest -q -s -p no:cacheprovider -p no:benchmark -m gpu tests/compiled/test_gpu.py 2>&1 | tail -40
}

part_times() {  # about 60 s: four processes side by side, each with empty caches; then the lab finds all of them
  timeout -k 5 ${TIMES_S:-130} $PY benchmarks/compiling.py resnet50 --caches "$TORCHINDUCTOR_CACHE_DIR" $TIMES_MORE \
    > >(tee "$OUT/compiling_resnet50.md") 2> >(tail -n 5)
}

lab() {  # seconds, report, then arguments of bench
  local limit=$1 report=$2; shift 2
  timeout -k 20 "$limit" $PY -m anabranch lab --hosts $HOSTS --rate $RATE --backend $BACKEND -- \
    $BENCH --compile --only nothing --profile-steps 4 --hold-after 130 --num-warmup-batches 3 \
    --report "$OUT/$report.md" --force $MORE "$@" > >(tee "$OUT/$report.log") 2>&1
  echo "exit $?"
  mv "$OUT/$report.log" "$OUT/$report.log.md"
}

part_resnet() {  # 250 s without "times"
  lab ${RESNET_S:-340} compiled_resnet50 --model resnet50:32 --compress int8 --skip 'DataParallel, int8' \
    --num-iters 4 --num-batches-per-iter 8
}

part_oktopk() {  # instead of int8
  lab ${RESNET_S:-340} compiled_resnet50_oktopk --model resnet50:32 --compress oktopk:0.01 --skip 'DataParallel, oktopk:0.01' \
    --skip 'DDP, compiled' --num-iters 4 --num-batches-per-iter 8
}

part_bert() {  # about 180 s
  lab ${BERT_S:-260} compiled_bert --model bert-base --compress int8 --skip 'compute only, compiled' \
    --skip 'DDP, compiled' --num-iters 4 --num-batches-per-iter 5
}

for part in ${@:-test times resnet bert}; do
  said "$part"
  part_$part
  said "$part over"
done
ls -la "$OUT"
