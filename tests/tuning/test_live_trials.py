"""Verdicts on live trials that noise leaves open."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.tuning.budget import SearchBudget
from anabranch.tuning.live_trials import LiveTrials
from anabranch.tuning.policy import DEFAULT_POLICY

BLOCK = (0.100, 0.101, 0.102)


def verdict(ours: tuple[float, ...], in_doubt: bool) -> str:
    """After as many pairs as there may be, in which steps of the challenger took this long."""
    live = LiveTrials(
        cast(Any, SimpleNamespace(timer=None)), DEFAULT_POLICY, SearchBudget(DEFAULT_POLICY), int, lambda: False
    )
    pairs = [(BLOCK, tuple(step_s * (1.2 if number % 2 else 0.8) for step_s in ours)) for number in range(4)]
    return live._compared([*pairs, (BLOCK, ours)], DEFAULT_POLICY, to_the_end=True, in_doubt=in_doubt).verdict


@pytest.mark.parametrize(("share", "in_doubt"), [(0.95, "faster"), (1.0, "faster"), (1.1, "not faster")])
def test_a_challenger_that_is_to_stay_in_doubt_must_look_slower_to_lose(share: float, in_doubt: str) -> None:
    ours = tuple(share * step_s for step_s in BLOCK)
    assert verdict(ours, in_doubt=False) == "not faster"
    assert verdict(ours, in_doubt=True) == in_doubt
