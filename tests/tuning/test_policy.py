"""The policy of tuning is a frozen value; the budget is an account of what searching has cost and may cost."""

import re
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest
from torch import nn

import anabranch as ab
from anabranch.tuning.options import DEFAULT_POLICY
from anabranch.tuning.search import MIN_FIRST_SEARCH_S, SearchBudget
from ranks import on_ranks


def test_a_policy_cannot_change_under_a_running_model() -> None:
    with pytest.raises(FrozenInstanceError):
        DEFAULT_POLICY.min_gain = 0.5  # type: ignore[misc]
    assert ab.TuningPolicy() == DEFAULT_POLICY
    assert replace(DEFAULT_POLICY, min_gain=0.5) != DEFAULT_POLICY


def test_every_constant_is_explained() -> None:
    assert ab.TuningPolicy.__doc__ is not None
    assert all(f"    {name} " in ab.TuningPolicy.__doc__ for name in asdict(DEFAULT_POLICY))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"drift_check_steps": 0}, "drift_check_steps is 0: expected a whole number, at least 1"),
        ({"trial_steps": 2.5}, "trial_steps is 2.5"),
        ({"min_gain": float("nan")}, "min_gain is nan: expected a share"),
        ({"max_drift": "10 %"}, "max_drift is '10 %'"),
        ({"confidence": -1.0}, "confidence is -1.0: expected a number from 0 on"),
    ],
)
def test_a_policy_that_could_not_run_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        ab.TuningPolicy(**wrong)


def wrapped_with(rank: int) -> list[str]:
    """What is said of a policy that another rank does not have, and of something else."""
    found = []
    policies: list[Any] = [replace(DEFAULT_POLICY, settle_steps=4) if rank else DEFAULT_POLICY, {}]
    for policy in policies:
        with pytest.raises((ValueError, ab.DisagreementError)) as caught:
            ab.DataParallel(nn.Linear(2, 2), policy=policy)
        found.append(f"{caught.type.__name__}: {caught.value}")
    return found


def test_ranks_with_different_policies_are_told() -> None:
    for apart, wrong in on_ranks(wrapped_with, 2):
        assert apart.startswith("DisagreementError") and "settle_steps=4" in apart
        assert "policy is a dict: expected a TuningPolicy" in wrong


def test_the_first_search_may_cost_some_steps_and_at_least_a_moment() -> None:
    assert SearchBudget(DEFAULT_POLICY, step_s=0.4).left_s == pytest.approx(12.0)
    assert SearchBudget(DEFAULT_POLICY, step_s=1e-4).left_s == pytest.approx(MIN_FIRST_SEARCH_S)


def test_later_it_is_a_share_of_training() -> None:
    budget = SearchBudget(DEFAULT_POLICY, step_s=0.1)
    budget.charge(3.0)
    assert budget.left_s == pytest.approx(0.0)
    budget.trained_s = 1000.0
    assert budget.left_s == pytest.approx(7.0)
    assert budget.summary() == "Searching has cost 3.00 s, 0.3% of training so far; allowed are 10.00 s."
    generous = replace(DEFAULT_POLICY, search_share=0.05)
    assert SearchBudget(generous, trained_s=1000.0, step_s=0.1).left_s == pytest.approx(50.0)


def test_a_fast_trial_does_not_pay_for_a_slow_one() -> None:
    budget = SearchBudget(DEFAULT_POLICY)
    budget.charge(-5.0)
    budget.charge(1.0)
    assert budget.spent_s == 1.0


def test_building_kernels_is_told_and_not_held_against_the_search() -> None:
    budget = SearchBudget(DEFAULT_POLICY, step_s=0.1)
    budget.charge(8.0)
    budget.set_up_s = 7.5
    assert budget.left_s == pytest.approx(2.5)
    assert "has cost 8.00 s" in budget.summary()
