#!/bin/bash
# benchmarks/h200/compile.sh PART...   DataParallel under torch.compile; $OUT gets Markdown files. Run in the root of the repository; python3 has torch.
# Parts: test times resnet bert (default: all, in this order), oktopk. Seconds are of an H200, 16 cores, four ranks.
# "times" compiles what "resnet" needs, on all cores at once, and leaves it in torch's caches.
set -u
export PYTHONPATH=src:tests:carry/site:. PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor} TORCHINDUCTOR_COMPILE_THREADS=4 OMP_NUM_THREADS=2
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT" "$TORCHINDUCTOR_CACHE_DIR"
PY=${PY:-python3}; HOSTS=${HOSTS:-4}; RATE=${RATE:-25gbit}; BACKEND=${BACKEND:-nccl}
BENCH=${BENCH:-$PY -m anabranch bench}; MORE=${MORE:-}; TIMES_MORE=${TIMES_MORE:-}
BATCH=32  # the same everywhere: caches are by shape
SEARCH=${SEARCH:-163}  # steps after which a search tries no more plans; about as many as it takes anyway. Then graphs are cut for the best one
said() { echo "=== $* ($(( $(date +%s) - BEGAN )) s)"; }
BEGAN=$(date +%s)

part_test() {  # about 150 s
  timeout -k 5 240 $PY -m pytest -q -s -p no:cacheprovider -p no:benchmark -m gpu tests/ddp/compiled/test_gpu.py 2>&1 | tail -40
}

times() {  # report, then arguments of compiling.py: four processes side by side, each with empty caches
  local report=$1; shift
  timeout -k 5 ${TIMES_S:-130} $PY benchmarks/compiling.py resnet50 --batch $BATCH --caches "$TORCHINDUCTOR_CACHE_DIR" $TIMES_MORE "$@" \
    > >(tee "$OUT/$report.md") 2> >(tail -n 5)
  echo "exit $?"
}

part_times() {  # about 70 s
  times compiling_resnet50
}

lab() {  # seconds, report, then arguments of bench
  local limit=$1 report=$2; shift 2
  timeout -k 20 "$limit" $PY -m anabranch lab --hosts $HOSTS --rate $RATE --backend $BACKEND -- \
    $BENCH --compile --only nothing --profile-steps 4 --search-steps $SEARCH --num-warmup-batches 3 \
    --report "$OUT/$report.md" --force $MORE "$@" > >(tee "$OUT/$report.log") 2>&1
  echo "exit $?"
  mv "$OUT/$report.log" "$OUT/$report.log.md"
}

part_resnet() {  # about 150 s after "times", 260 s without
  lab ${RESNET_S:-300} compiled_resnet50 --model resnet50:$BATCH --compress int8 \
    --num-iters 4 --num-batches-per-iter 8
}

part_oktopk() {  # instead of int8
  lab ${RESNET_S:-300} compiled_resnet50_oktopk --model resnet50:$BATCH --compress oktopk:0.01 \
    --num-iters 4 --num-batches-per-iter 8
}

part_bert() {  # about 190 s; eager and compiled, dense and int8. Dense steps take 0.2 s, so searches are shorter
  SEARCH=${BERT_SEARCH:-93} lab ${BERT_S:-200} compiled_bert --model bert-base --compress int8 \
    --num-iters 3 --num-batches-per-iter 5
}

for part in ${@:-test times resnet bert}; do
  said "$part"
  part_$part
  said "$part over"
done
ls -la "$OUT"
