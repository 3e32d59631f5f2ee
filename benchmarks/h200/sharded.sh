#!/bin/bash
# benchmarks/h200/sharded.sh   FSDP2 and HSDP, from the root of the repository. Each part is bounded; the whole takes about 400 s.
export PYTHONPATH=src:tests:carry/site:.
export ANABRANCH_CACHE=off
OUT=${OUT:-/tmp/gpu_sharded_out}; mkdir -p "$OUT"
began=$SECONDS
part() {  # name, seconds, command...
  local name=$1 limit=$2; shift 2
  local left=$((${LIMIT:-420} - (SECONDS - began)))
  [ "$left" -lt 20 ] && { echo "== $name: left out, $left s left"; return; }
  [ "$limit" -gt "$left" ] && limit=$left
  echo "== $name (at most $limit s) at $((SECONDS - began)) s"
  timeout -k 5 "$limit" "$@" 2>&1 | grep --line-buffered -v "hostname of the client socket" | tee "$OUT/$name.txt"
  echo "== $name: exit ${PIPESTATUS[0]} at $((SECONDS - began)) s"
}
lab="python3 -m anabranch lab --backend nccl"
part tests 90 python3 -m pytest -q -s -m gpu -p no:cacheprovider -p no:benchmark tests/fsdp/test_gpu.py tests/tools/lab/test_gpu.py
nodes() {  # memory or loopback
  echo $lab --hosts 2 --ranks-per-host 2 --rate 10gbit --inside $1 --timeout 105 -- python3 -m benchmarks.sharded --rounds 5 --steps 3 --limit-s 30
}
for name in "FSDP2, a shard on every rank" "replicate, bf16"; do out+=(--leave-out "$name"); done
part nodes_memory 90 $(nodes memory) --predict "${out[@]}"
part nodes_memory_kept 70 $(nodes memory) --keep "${out[@]}"
part gpt2 75 $lab --hosts 4 --rate 10gbit --timeout 70 -- \
  python3 -m benchmarks.sharding --model gpt2 --trial-rounds 1 --rounds 5 --steps 2 --limit-s 22
part resnet50 45 $lab --hosts 4 --rate 25gbit --timeout 42 -- \
  python3 -m benchmarks.sharding --model resnet50 --trial-rounds 2 --rounds 5 --steps 3 --limit-s 8
part nodes_loopback 80 $(nodes loopback) --predict "${out[@]}"
