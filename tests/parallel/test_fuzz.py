"""A differential fuzzer: random models and arguments train under DDP and DataParallel to the same weights or errors.

More cases: ANABRANCH_FUZZ_CASES=300 ANABRANCH_FUZZ_SEED=1000 pytest tests/parallel/test_fuzz.py
"""

import os
import warnings

import pytest

from parallel.fuzz import compared, drawn
from ranks import on_ranks

CASES = int(os.environ.get("ANABRANCH_FUZZ_CASES", "24"))
FIRST = int(os.environ.get("ANABRANCH_FUZZ_SEED", "0"))
TOGETHER = 12  # cases that one set of ranks trains, one after the other


def batch_of_cases(rank: int, first: int, last: int) -> list[str]:
    warnings.simplefilter("ignore")  # torch has many about these arguments
    return [what for seed in range(first, last) for what in compared(seed)]


@pytest.mark.parametrize("first", range(FIRST, FIRST + CASES, TOGETHER))
def test_trains_as_ddp_does(first: int) -> None:
    last = min(first + TOGETHER, FIRST + CASES)
    assert on_ranks(batch_of_cases, 2, first, last, timeout_s=60) == [[], []]


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
    assert {case.delayed for case in cases} == {True, False}
    assert {dict(case.options).get("static_graph") for case in cases} >= {True}
