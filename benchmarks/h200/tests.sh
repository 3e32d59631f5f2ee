#!/bin/bash
# benchmarks/h200/tests.sh   all tests that need a GPU: about seven minutes on an H200 with 16 cores
# In one process each where ranks of a lab share the GPU; pytest-benchmark, if it is there, refuses to run in parallel.
# Compiled models take the longest, about three minutes where nothing has been compiled before. Fails if any file does.
set -u
export PYTHONPATH=src:tests:carry/site:.
failed=0
check() { timeout -k 10 "$1" python3 -m pytest -p no:cacheprovider -p no:benchmark -q "${@:2}" || { echo "exit $? of ${*:2}"; failed=1; }; }
check 150 -n 6 -m gpu tests/exchange/sparse tests/parallel/test_gpu.py tests/lean/activations tests/lean/test_gpu.py
check 150 -n 8 tests/exchange/quantised/test_kernels.py
for file in tests/frameworks/test_gpu.py tests/fsdp/test_gpu.py tests/lean/test_gpu_ranks.py tests/parallel/test_gpu_ranks.py \
  tests/tools/lab/test_gpu.py; do
  check 150 -m gpu "$file"
done
check 270 -m gpu tests/ddp/compiled/test_gpu.py
exit $failed
