"""What only a GPU can show of compiled models: Triton's kernels, NCCL, and gradients timed by events on streams.

Run where there is one: pytest -m gpu tests/ddp/compiled/test_gpu.py
"""

from pathlib import Path

import pytest

from ddp.compiled.residual import RANKS, REDUCE_OVERHEAD, check, check_reduce_overhead, check_sparse, sparse, trained
from gpu import ON_GPU
from ranks import on_ranks

pytestmark = ON_GPU


@pytest.mark.parametrize("compress", [None, "int8"])
def test_compiled_training_on_nccl(tmp_path: Path, compress: str | None) -> None:
    answers = on_ranks(trained, RANKS, str(tmp_path), "cuda", "inductor", compress, timeout_s=100)
    check(answers, 0.05 if compress else 0.02)


def test_cuda_graphs(tmp_path: Path) -> None:
    answers = on_ranks(trained, RANKS, str(tmp_path), "cuda", REDUCE_OVERHEAD, None, timeout_s=100)
    check_reduce_overhead(answers, 0.02)


def test_sparse_messages(tmp_path: Path) -> None:
    answers = on_ranks(sparse, RANKS, str(tmp_path), "cuda", "inductor", timeout_s=100)
    check_sparse(answers, 0.05)  # a gradient at the threshold may be sent in one and not in the other
