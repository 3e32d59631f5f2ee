"""What searching may cost: a first search, later a share of training."""

from dataclasses import replace

import pytest

from anabranch.tuning.budget import MIN_FIRST_SEARCH_S, SearchBudget
from anabranch.tuning.policy import DEFAULT_POLICY


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
