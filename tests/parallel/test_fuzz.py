"""A differential fuzzer: random models and arguments train under DDP and DataParallel to the same weights or errors.

More cases: ANABRANCH_FUZZ_CASES=300 ANABRANCH_FUZZ_SEED=1000 pytest tests/parallel/test_fuzz.py
"""

import os
import warnings
from typing import Any

import pytest

from parallel.fuzz import LOSSES, PARTS, STEP_S, compared, drawn, two_groups
from ranks import on_ranks
from tuning.given_times import give_times

CASES = int(os.environ.get("ANABRANCH_FUZZ_CASES", "24"))
FIRST = int(os.environ.get("ANABRANCH_FUZZ_SEED", "0"))
TOGETHER = 12  # cases per test


def some_cases(rank: int, first: int, last: int) -> list[Any]:
    """The first case that was not run, and what differed in those before it."""
    warnings.simplefilter("ignore")  # torch has many about these arguments
    give_times(lambda plan: STEP_S[plan is not None])
    groups = two_groups()
    for seed in range(first, last):
        apart, failed = compared(seed, groups)
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
    assert {part for case in cases for part in case.parts} == {*PARTS}
    assert {case.delayed for case in cases} == {case.joins for case in cases} == {case.hooked for case in cases}
    assert {case.checkpointed for case in cases} == {"", "reentrant", "saved tensors"}
    assert {case.loss for case in cases} == {"mean", *LOSSES}
    assert {case.starts for case in cases} == {1, 2} and {case.delayed for case in cases} == {True, False}
    assert any(case.measured and case.joins and case.ends_with_plan for case in cases)
    static = [case for case in cases if dict(case.options).get("static_graph")]
    assert {case.checkpointed for case in static} >= {"reentrant"}


def test_many_cases_run_a_plan_and_find_a_choice() -> None:
    """That they do is judged in each case."""
    cases = [drawn(seed) for seed in range(200)]
    assert sum(case.ends_with_plan for case in cases) >= 80
    assert sum(case.ends_with_plan and case.joins for case in cases) >= 10
    assert sum(case.finds_choice for case in cases) >= 30
    assert sum(case.finds_choice and case.ends_with_plan for case in cases) >= 20
