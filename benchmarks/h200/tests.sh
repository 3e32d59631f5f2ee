#!/bin/bash
# benchmarks/h200/tests.sh   all tests that need a GPU: about four minutes on an H200 with 16 cores
# In one process each where ranks of a lab share the GPU; pytest-benchmark, if it is there, refuses to run in parallel.
set -u
export PYTHONPATH=src:tests:carry/site:.
pytest="timeout -k 10 150 python3 -m pytest -p no:cacheprovider -p no:benchmark -q"
$pytest -n 6 -m gpu tests/exchange/sparse tests/parallel/test_gpu.py tests/lean/activations tests/lean/test_gpu.py
$pytest -n 8 tests/exchange/quantised/test_kernels.py
for file in tests/frameworks/test_gpu.py tests/fsdp/test_gpu.py tests/ddp/compiled/test_gpu.py tests/lean/test_gpu_ranks.py \
  tests/tools/lab/test_gpu.py; do
  $pytest -m gpu "$file"
done
