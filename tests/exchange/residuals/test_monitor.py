"""The residual monitor: size and age of residuals are sampled, and only growth without bound is reported."""

import math
from collections.abc import Callable

import pytest
import torch
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.residuals.monitor import MAX_SAMPLES, ResidualMonitor, ResidualSample, residual_grows
from anabranch.exchange.residuals.state import BucketStates
from anabranch.exchange.sparse.oktopk import exchange
from anabranch.values.kinds.options import OkTopk
from exchange.sparse.worlds import gradients

DENSITY = 0.05


def history(
    norm: Callable[[int], float], age: Callable[[int], float], steps: int, every: int = 64
) -> list[ResidualSample]:
    return [ResidualSample(step, norm(step), age(step)) for step in range(0, steps, every)]


@pytest.mark.parametrize("steps", [1500, 100_000])
def test_growth_without_bound_is_seen(steps: int) -> None:
    every = max(64, steps // 30)
    assert residual_grows(history(lambda t: 1.0 * t, lambda t: 0.5 * t, steps, every), 0.01), "nothing is ever sent"
    assert residual_grows(history(lambda t: math.exp(t / 300), lambda t: math.exp(t / 300), 1500), 0.01)


@pytest.mark.parametrize(
    ("norm", "age"),
    [
        (lambda t: 5.0, lambda t: 7.0),
        (lambda t: 1 - math.exp(-t / 200), lambda t: 7 - 7 * math.exp(-t / 200)),  # filling
        (lambda t: math.sqrt(t), lambda t: math.sqrt(t)),  # noise that cancels in the residual, until it is sent
        (lambda t: math.exp(-t / 500), lambda t: 10 + t / 100),  # gradients that shrink
        (lambda t: math.exp(t / 500), lambda t: 10.0),  # gradients that grow
    ],
)
def test_what_has_a_bound_is_left_alone(norm: Callable[[int], float], age: Callable[[int], float]) -> None:
    for steps in (1, 300, 700, 1500, 3000):
        assert not residual_grows(history(norm, age, steps), 0.01)
    assert not residual_grows([], 0.01)


def test_early_steps_are_no_growth() -> None:
    assert not residual_grows(history(lambda t: 1.0 * t, lambda t: 1.0 * t, 1500), 0.001), "a sweep takes 1000 steps"
    assert not residual_grows(history(lambda t: 1.0 * t, lambda t: 1.0 * t, 700), 0.01)


def test_samples_thin_out_and_reach_back_to_the_first() -> None:
    monitor = ResidualMonitor(period=4)
    for step in range(3, 3000):
        monitor.record(step, torch.full((4,), 2.0), torch.full((4,), float(step)))
    samples = monitor.samples()
    assert samples[0].step == 4 and samples[-1].step > 2500 and MAX_SAMPLES // 2 <= len(samples) <= MAX_SAMPLES
    assert all(sample.norm == 2 * sample.step and sample.age_steps == sample.step / 2 for sample in samples)


def test_a_gradient_that_comes_in_parts_is_sampled_as_one() -> None:
    """Each part is added to the residual before the next one comes."""
    whole, pieces = ResidualMonitor(period=2), ResidualMonitor(period=2)
    residual = torch.zeros(6)
    for step in range(7):
        gradient = torch.arange(6.0) - step
        whole.record(step, gradient, residual.clone())
        for part in (slice(0, 4), slice(4, 6)):
            pieces.record(step, gradient[part], residual)
            residual[part] += gradient[part]
        pieces.record(step, torch.zeros(6), residual)  # as before the exchange, of zeros
    assert pieces.samples() == whole.samples() and len(whole.samples()) == 4 and whole.samples()[-1].age_steps > 1


def test_steps_that_are_not_finite_are_left_out() -> None:
    monitor = ResidualMonitor(period=1)
    for step, gradient in enumerate((1.0, float("inf"), float("nan"), 0.0)):
        monitor.record(step, torch.full((2,), gradient), torch.ones(2))
    assert [sample.step for sample in monitor.samples()] == [0, 3] and monitor.samples()[-1].age_steps == 0.0


@pytest.mark.parametrize("decay", [1.0, 0.99])
def test_training_as_it_should_be_gives_no_warning(decay: float) -> None:
    """Real exchanges on heavy-tailed gradients, steady and shrinking: the age is a few steps, and has a bound."""
    world, held = VirtualWorld(2), [BucketStates(rank, 2, sample_period=8) for rank in range(2)]
    options = OkTopk(density=DENSITY, warmup_steps=0)
    for step in range(240):
        buckets = [state.bucket(("w",), (2000,)) for state in held]
        made = gradients(2, 2000, step, scale=decay**step)
        world.run(
            [exchange(g, b, c, 2.0, DENSITY, options) for g, b, c in zip(made, buckets, world.comms, strict=True)]
        )
        if step % 60 == 59:
            monitor = buckets[0].residual_monitor
            assert monitor is not None and not residual_grows(monitor.samples(), DENSITY)
    assert monitor is not None and 0.5 < monitor.samples()[-1].age_steps < 20
