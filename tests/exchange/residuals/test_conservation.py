"""Nothing is lost: summed over the ranks, accumulated = applied + residual, at every element."""

import pytest
import torch
from benchmarks.virtual import VirtualWorld
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.exchange.dense import SUMMABLE_BELOW
from exchange.sparse.worlds import (
    EXCHANGES,
    OK_TOPK,
    WHOLE,
    Gradients,
    check_step,
    check_steps,
    gradients,
    states,
    step,
)

ALL = sorted(EXCHANGES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("name", ALL)
def test_over_steps_on_realistic_gradients(name: str, ranks: int) -> None:
    check_steps(EXCHANGES[name], ranks, 1500, 0.02, 5, lambda number: gradients(ranks, 1500, number))


@pytest.mark.parametrize("name", ["exact", "exact int8", "fixed", "fixed bf16", "fixed int8", "gtopk", "dsa"])
def test_on_64_ranks(name: str) -> None:
    check_steps(EXCHANGES[name], 64, 6000, 0.02, 3, lambda number: gradients(64, 6000, number))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact int8", "fixed bf16", "fixed int8"])
def test_packed_on_256_ranks(name: str) -> None:
    check_steps(EXCHANGES[name], 256, 5121, 0.1, 2, lambda number: gradients(256, 5121, number))


def odd_gradients(ranks: int, numel: int, seed: int) -> Gradients:
    """Blocks of zeros, of equal values, of subnormal and of huge numbers, beside others of very different size."""
    chance = torch.Generator().manual_seed(seed)
    scale = (40 * torch.rand(numel, generator=chance) - 30).exp2()
    made = [torch.randn(numel, generator=chance) * scale for _ in range(ranks)]
    for block in range(0, numel, 7):
        kind = int(torch.randint(0, 6, (), generator=chance))
        for gradient in made:
            part = gradient[block : block + 7]
            if kind < 4:
                part.mul_((0.0, 2.0**-140, 2.0**80, 1.0)[kind])
            elif kind == 4:
                part.fill_(0.37)
    return made


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["exact bf16", "exact int8", "fixed bf16", "fixed int8"])
def test_packed_over_a_hundred_random_steps(name: str, ranks: int) -> None:
    """Two thousand steps in all; and one that is not finite, after which nothing is poisoned."""
    numel, world = 211, VirtualWorld(ranks)
    held = states(ranks, numel)
    for number in range(100):
        made = odd_gradients(ranks, numel, 1000 * ranks + number)
        if number != 50:
            check_step(EXCHANGES[name], made, held, world, 0.1)
            continue
        before = [state.residual.clone() for state in held]
        made[-1][number] = float("nan")
        step(EXCHANGES[name], made, held, world, 0.1)
        assert all(bool(gradient.isnan().all()) for gradient in made)
        assert all(torch.equal(state.residual, old) for state, old in zip(held, before, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(ALL),
    ranks=st.integers(1, 6),
    numel=st.integers(1, 60),
    density=st.floats(0.01, 1.0),
    seed=st.integers(0, 10**6),
    zeros=st.floats(0.0, 1.0),
)
def test_of_any_size_and_density(name: str, ranks: int, numel: int, density: float, seed: int, zeros: float) -> None:
    def some(number: int) -> Gradients:
        chance = torch.Generator().manual_seed(seed + number)
        scale = torch.randint(-12, 12, (numel,), generator=chance).float().exp2()
        keep = torch.rand(numel, generator=chance) >= zeros
        return [torch.randn(numel, generator=chance) * scale * keep for _ in range(ranks)]

    check_steps(EXCHANGES[name], ranks, numel, density, 4, some)


def in_one_region(number: int) -> Gradients:
    """All large values at the end of the bucket."""
    made = gradients(4, 2000, number, scale=1e-3)
    for gradient in made:
        gradient[1980:] *= 1e6
    return made


def disjoint(number: int) -> Gradients:
    """No two ranks have anything in common."""
    made = gradients(4, 2000, number)
    for rank, gradient in enumerate(made):
        gradient[torch.arange(2000) % 4 != rank] = 0
    return made


def moving(number: int) -> Gradients:
    """Regions that were balanced are not any more."""
    return [gradient.roll(500 * number) for gradient in in_one_region(number)]


@pytest.mark.parametrize("make", [in_one_region, disjoint, moving], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ALL)
def test_on_adversarial_gradients(name: str, make: "object") -> None:
    assert callable(make)
    check_steps(EXCHANGES[name], 4, 2000, 0.01, 6, make)


@pytest.mark.parametrize("name", OK_TOPK)
def test_all_large_values_at_the_end_of_many_ranks(name: str) -> None:
    """More ranks than ``sizes.WIDEST_FACTOR``: the first regions would be wider than what owners have room for."""

    def at_the_end(number: int) -> Gradients:
        made = gradients(16, 3200, number, scale=1e-3)
        for gradient in made:
            gradient[3168:] *= 1e6
        return made

    check_steps(EXCHANGES[name], 16, 3200, 0.01, 4, at_the_end)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("name", ALL)
def test_fewer_values_than_ranks(name: str, ranks: int) -> None:
    check_steps(EXCHANGES[name], ranks, 5, 0.1, 4, lambda number: gradients(ranks, 5, number))


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros(name: str) -> None:
    held = check_steps(EXCHANGES[name], 3, 100, 0.05, 3, lambda number: [torch.zeros(100) for _ in range(3)])
    assert all(not state.residual.any() for state in held)


@pytest.mark.parametrize("name", WHOLE)
def test_only_what_was_offered_and_applied_leaves_the_residual(name: str) -> None:
    """Invariant 3, by the effect: after a step each residual is either what accumulated, or zero where u is not."""
    held, world = states(4, 3000), VirtualWorld(4)
    for number in range(4):
        made = gradients(4, 3000, number)
        accumulated = [gradient + state.residual for gradient, state in zip(made, held, strict=True)]
        step(EXCHANGES[name], made, held, world, 0.02)
        applied = made[0] != 0
        for before, state in zip(accumulated, held, strict=True):
            cleared = state.residual != before
            assert bool((state.residual[cleared] == 0).all())
            assert bool(applied[cleared].all())
        contributions = sum((b - s.residual).double() for b, s in zip(accumulated, held, strict=True))
        assert isinstance(contributions, torch.Tensor)
        assert torch.equal(contributions != 0, applied)


@pytest.mark.parametrize("name", OK_TOPK)
def test_density_one_is_dense(name: str) -> None:
    made = gradients(5, 700, 1)
    held, world = states(5, 700), VirtualWorld(5)
    average = sum(g.double() for g in made) / 5
    check_step(EXCHANGES[name], made, held, world, 1.0)
    assert isinstance(average, torch.Tensor)
    size = sum(g.double().abs() for g in gradients(5, 700, 1)) / 5
    if "int8" in name:  # a value may be off by half of its scale, which is a 127th of the largest value near it
        assert float((made[0] - average).norm() / average.norm()) < 0.03
        return
    rounding = 2.0**-8 if "bf16" in name else 2.0**-22
    assert bool(((made[0] - average).abs() <= rounding * 2 * size).all())
    if name in WHOLE:
        assert all(not state.residual.any() for state in held)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_finite_reaches_all_and_leaves_no_trace(name: str, bad: float, rank: int) -> None:
    held, world = states(3, 600), VirtualWorld(3)
    step(EXCHANGES[name], gradients(3, 600, 0), held, world, 0.02)
    before = [state.residual.clone() for state in held]
    made = gradients(3, 600, 1)
    made[rank][77] = bad
    step(EXCHANGES[name], made, held, world, 0.02)
    for gradient, state, residual in zip(made, held, before, strict=True):
        assert bool(gradient.isnan().all())
        assert torch.equal(state.residual.view(torch.int32), residual.view(torch.int32))
    for number in range(2, 5):
        check_step(EXCHANGES[name], gradients(3, 600, number), held, world, 0.02)
        assert held[0].step == number + 1


@pytest.mark.parametrize("name", OK_TOPK)
def test_gradients_too_large_to_be_summed_do_not_stay_in_residuals(name: str) -> None:
    """More huge values than can be sent, first on one rank, then on another: each alone is finite, and no sum is."""
    held, world = states(2, 200), VirtualWorld(2)
    check_step(EXCHANGES[name], gradients(2, 200, 0), held, world, 0.05)
    before = [state.residual.clone() for state in held]
    for rank in (0, 1, 0):
        made = gradients(2, 200, 1)
        made[rank][:100] = 3e38
        step(EXCHANGES[name], made, held, world, 0.05)
        assert all(bool(gradient.isnan().all()) for gradient in made), "every rank learns that nothing was applied"
        assert all(torch.equal(state.residual, old) for state, old in zip(held, before, strict=True))
    for number in range(2, 6):
        check_step(EXCHANGES[name], gradients(2, 200, number), held, world, 0.05)


@pytest.mark.parametrize("name", OK_TOPK)
def test_gradients_just_below_the_limit_are_sent(name: str) -> None:
    def huge(number: int) -> Gradients:
        made = gradients(4, 200, number)
        for gradient in made:
            gradient[:100] = 0.9 * SUMMABLE_BELOW
        return made

    check_steps(EXCHANGES[name], 4, 200, 0.05, 6, huge)


@pytest.mark.parametrize("name", ["exact", "fixed"])
def test_a_first_step_that_is_not_finite(name: str) -> None:
    held, world = states(3, 600), VirtualWorld(3)
    made = gradients(3, 600, 1)
    made[1].fill_(float("inf"))
    step(EXCHANGES[name], made, held, world, 0.02)
    assert all(bool(g.isnan().all()) for g in made)
    for number in range(3):
        check_step(EXCHANGES[name], gradients(3, 600, number), held, world, 0.02)
    assert abs(int(held[0].applied) - 12) <= 4


@pytest.mark.parametrize("name", ALL)
def test_a_sum_that_overflows_is_not_applied(name: str) -> None:
    """Finite everywhere, and the sum is not: nobody may clear what nobody can apply."""
    if name == "dense":
        pytest.skip("dense scales before it adds")
    held, world = states(2, 50), VirtualWorld(2)
    made = gradients(2, 50, 0)
    for gradient in made:
        gradient[7] = 3e38
    step(EXCHANGES[name], made, held, world, 0.1)
    if name in OK_TOPK:
        assert all(bool(g.isnan().all()) for g in made)
        assert all(not state.residual.any() for state in held)
    else:
        assert all(not bool(g.isfinite().all()) for g in made)
