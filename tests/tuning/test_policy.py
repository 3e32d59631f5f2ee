"""The policy of tuning is a frozen value: a model keeps the one it was given."""

from dataclasses import FrozenInstanceError, asdict, replace

import pytest

import anabranch as ab
from anabranch.tuning.policy import DEFAULT_POLICY


def test_a_policy_cannot_change_under_a_running_model() -> None:
    with pytest.raises(FrozenInstanceError):
        DEFAULT_POLICY.min_gain = 0.5  # type: ignore[misc]
    assert ab.TuningPolicy() == DEFAULT_POLICY
    assert replace(DEFAULT_POLICY, min_gain=0.5) != DEFAULT_POLICY


def test_every_constant_is_explained() -> None:
    assert ab.TuningPolicy.__doc__ is not None
    assert all(f"    {name} " in ab.TuningPolicy.__doc__ for name in asdict(DEFAULT_POLICY))
