"""A differential fuzzer: random models and arguments train under DDP and DataParallel to the same weights or errors.

More cases: ANABRANCH_FUZZ_CASES=300 ANABRANCH_FUZZ_SEED=1000 pytest tests/parallel/test_fuzz.py
"""

import os
import warnings
from typing import Any

import pytest

from parallel.fuzz import compared, drawn
from ranks import on_ranks

CASES = int(os.environ.get("ANABRANCH_FUZZ_CASES", "24"))
FIRST = int(os.environ.get("ANABRANCH_FUZZ_SEED", "0"))
TOGETHER = 12  # cases per test


def some_cases(rank: int, first: int, last: int) -> list[Any]:
    """The first case that was not run, and what differed in those before it."""
    warnings.simplefilter("ignore")  # torch has many about these arguments
    for seed in range(first, last):
        apart, failed = compared(seed)
        if apart or failed:
            return [seed + 1, apart]
    return [last, []]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FIRST, FIRST + CASES, TOGETHER))
def test_trains_as_ddp_does(first: int) -> None:
    following, last = first, min(first + TOGETHER, FIRST + CASES)
    while following < last:
        one, other = on_ranks(some_cases, 2, following, last, timeout_s=60)
        assert one[1] == other[1] == []
        following = one[0]


def test_cases_have_variety() -> None:
    cases = [drawn(seed) for seed in range(200)]
    assert {part for case in cases for part in case.parts} >= {
        "linear",
        "conv",
        "norm",
        "sparse",
        "frozen",
        "sometimes",
    }
    assert {case.delayed for case in cases} == {case.joins for case in cases} == {case.hooked for case in cases}
    assert {case.checkpointed for case in cases} == {"", "reentrant", "saved tensors"}
    assert {case.starts for case in cases} == {1, 2} and {case.delayed for case in cases} == {True, False}
    assert {dict(case.options).get("static_graph") for case in cases} >= {True}
