"""Thresholds: counts stay within 20 % of k from the first step on, whatever the gradients do."""

import math
from collections.abc import Callable

import pytest
import torch
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.sparse.fixed_exchange import fixed_exchange
from anabranch.exchange.sparse.thresholds import (
    kth_magnitude,
    next_threshold_bias,
    sample_positions,
    sampled_magnitude,
)
from exchange.sparse.worlds import gradients, states, step

NUMEL, DENSITY, RANKS = 100_000, 0.01, 2
COURSES: dict[str, Callable[[int], float]] = {
    "steady": lambda t: 1.0,
    "falling": lambda t: 0.97**t,
    "a jump down": lambda t: 1.0 if t < 15 else 0.01,
    "a jump up": lambda t: 1.0 if t < 15 else 100.0,
    "wild": lambda t: math.exp(math.sin(7.0 * t)),
}


@pytest.mark.parametrize("course", COURSES)
def test_counts_stay_near_k(course: str) -> None:
    held, world = states(RANKS, NUMEL), VirtualWorld(RANKS)
    k = round(DENSITY * NUMEL)
    for number in range(36):
        made = gradients(RANKS, NUMEL, number, scale=COURSES[course](number))
        step(fixed_exchange, made, held, world, DENSITY)
        assert all(abs(int(state.offered) - k) <= 0.2 * k for state in held), number
        assert abs(int(held[0].applied) - k) <= 0.2 * k, number
        assert int((made[0] != 0).sum()) >= 0.75 * k, "slots suffice"


def test_kth_magnitude() -> None:
    values = torch.tensor([3.0, -5.0, 1.0, 0.0])
    assert [float(kth_magnitude(values, k)) for k in (1, 2, 3, 4, 5)] == [5, 3, 1, 0, 0]


def test_a_sample_is_spread_and_in_range() -> None:
    assert sample_positions(1000, 900, 0, torch.device("cpu")) is not None
    assert sample_positions(1000, 10, 0, torch.device("cpu")) is None
    positions = sample_positions(10**9 + 7, 10**7, 5, torch.device("cpu"))
    assert positions is not None
    assert 0 <= int(positions.min()) <= int(positions.max()) < 10**9 + 7
    assert len(positions.unique()) == len(positions)
    spread = torch.histc(positions.double(), bins=100, min=0, max=1e9)
    assert float(spread.max() / spread.mean()) < 1.05


def test_a_sampled_threshold_counts_right() -> None:
    chance = torch.Generator().manual_seed(3)
    values = torch.randn(2_000_000, generator=chance) ** 3
    for number in range(3):
        threshold = sampled_magnitude((values, torch.zeros(1).expand(2_000_000)), 20_000, number)
        assert int((values.abs() >= threshold).sum()) == pytest.approx(20_000, rel=0.15)
    assert float(sampled_magnitude((values,), 2_000_000, 0)) == 0.0


def test_the_bias_moves_owners_towards_one_threshold() -> None:
    found, no = torch.tensor([1.0, math.e**2]), torch.tensor(False)
    zero = torch.zeros(())
    assert float(next_threshold_bias(zero, found, 0, no)) == pytest.approx(0.1)
    assert float(next_threshold_bias(zero, found, 1, no)) == pytest.approx(-0.1)
    assert float(next_threshold_bias(zero, found, 1, torch.tensor(True))) == 0.0
    poor = torch.tensor([0.0, 5.0])
    assert float(next_threshold_bias(zero, poor, 0, no)) == float(next_threshold_bias(zero, poor, 1, no)) == 0.0
