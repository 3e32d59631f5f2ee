"""The quantised exchange: the same bits everywhere, errors as small as the format promises, nothing lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.quantised.block_format import FORMATS, INT4, INT8, NEGLIGIBLE, BlockFormat
from quantised.worlds import Gradients, gradients, step

EACH = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.kind)


def rounded(values: torch.Tensor, ranks: int, form: BlockFormat) -> torch.Tensor:
    """What the format makes of values, block by block, written without any of the exchange's code."""
    turn = torch.ones(1, 1, dtype=torch.float64)
    while form.rotates and len(turn) < form.block:
        turn = torch.kron(turn, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)) / 2**0.5
    if not form.rotates:
        turn = torch.eye(form.block, dtype=torch.float64)
    region = form.region_numel(len(values), ranks)
    out = torch.zeros(ranks * region, dtype=torch.float64)
    padded = torch.zeros(ranks * region, dtype=torch.float32)
    padded[: len(values)] = values
    for start in range(0, len(padded), form.block):
        block = turn @ padded[start : start + form.block].double()
        largest = float(block.abs().max())
        if largest >= NEGLIGIBLE:
            scale = torch.tensor(largest / form.most).bfloat16().double()
            out[start : start + form.block] = turn @ ((block / scale).round() * scale)
    return out[: len(values)]


@EACH
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [1, 2, 255, 1283, 5000])
def test_is_the_rounded_average_of_rounded_values(form: BlockFormat, ranks: int, numel: int) -> None:
    offered = gradients(ranks, numel, seed=numel + ranks)
    result = [values.clone() for values in offered]
    step(result, None, form)
    for other in result[1:]:
        assert torch.equal(other.view(torch.int32), result[0].view(torch.int32)), "ranks must end with the same bits"
    average = sum((rounded(values, ranks, form) for values in offered), torch.zeros(numel).double()) / ranks
    size = sum((values.double().abs() for values in offered), torch.zeros(numel).double())
    for start in range(0, numel, form.block):
        at = slice(start, start + form.block)
        # One rounding of the average, and a unit where a value lies on the border between two integers.
        spread = form.block if form.rotates else 1
        allowed = average[at].norm() * spread**0.5 / form.most + 2**-18 * size[at].max() + NEGLIGIBLE
        assert bool(((result[0][at].double() - average[at]).abs() <= allowed).all())


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_added_in_float32(form: BlockFormat, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(1)
    offered = [torch.randn(3000, generator=chance).to(dtype) for _ in range(4)]
    result, wide = [values.clone() for values in offered], [values.float() for values in offered]
    step(result, None, form)
    step(wide, None, form)
    assert result[0].dtype == dtype
    assert torch.equal(result[0], wide[0].to(dtype))


@EACH
def test_relative_errors_are_those_of_the_ladder(form: BlockFormat) -> None:
    """On normal values of four ranks; docs and the planner quote these."""
    chance = torch.Generator().manual_seed(2)
    offered = [torch.randn(200_000, generator=chance) for _ in range(4)]
    exact = torch.stack(offered).double().mean(dim=0)
    step(offered, None, form)
    error = float((offered[0].double() - exact).norm() / exact.norm())
    assert error == pytest.approx({"int8": 0.0091, "int4": 0.151}[form.kind], rel=0.1)


@EACH
def test_without_residuals_only_the_block_is_lost(form: BlockFormat) -> None:
    offered = [values.clamp(-1, 1) for values in gradients(3, 2000, seed=4)]
    offered[1][700] = float("inf")
    step(offered, None, form)
    start = 700 // form.block * form.block
    for gradient in offered:
        lost = gradient.isnan()
        assert bool(lost[start : start + form.block].all()) and int(lost.sum()) == form.block


@EACH
def test_the_largest_float16_stays_finite(form: BlockFormat) -> None:
    offered = [torch.full((500,), 65504.0, dtype=torch.float16) for _ in range(2)]
    step(offered, None, form)
    assert bool(offered[0].isfinite().all())


@EACH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_all_ranks_and_changes_no_residual(form: BlockFormat, bad: float) -> None:
    offered, residuals = gradients(3, 2000, seed=4), gradients(3, 2000, seed=6)
    residuals = [values.clamp(-1, 1) for values in residuals]
    offered = [values.clamp(-1, 1) for values in offered]
    clean = [values.clone() for values in offered]
    offered[1][700] = bad
    before = [values.clone() for values in residuals]
    step(offered, residuals, form)
    for gradient, residual, old in zip(offered, residuals, before, strict=True):
        assert bool(gradient.isnan().all()), "so that nobody applies a part of the bucket"
        assert torch.equal(residual, old)
    again = [values.clone() for values in clean]
    step(again, residuals, form)
    assert bool(again[0].isfinite().all()), "nothing is poisoned later"


def check_conserved(given: Gradients, residuals: Gradients, form: BlockFormat, divisor: float) -> None:
    """One step with residuals; summed over the ranks, offered = applied + residual, at every element."""
    offered = [gradient.double() + residual.double() for gradient, residual in zip(given, residuals, strict=True)]
    total, size = torch.stack(offered).sum(dim=0), torch.stack(offered).abs().sum(dim=0)
    step(given, residuals, form, divisor)
    kept = torch.stack([residual.double() for residual in residuals])
    lost = (total - given[0].double() * divisor - kept.sum(dim=0)).abs()
    sizes = size + kept.abs().sum(dim=0) + (given[0].double() * divisor).abs()
    if form.rotates:  # an element is a sum over its block
        sizes = torch.cat([part.amax().expand(len(part)) for part in sizes.split(form.block)])
    allowed = 2.0**-22 * (len(given) + 3) * sizes + 1e-44 * len(given)
    assert bool((lost <= allowed).all()), f"lost up to {float((lost / allowed).max()):.2e} of what rounding may do"


@EACH
def test_nothing_is_lost_over_a_thousand_steps(form: BlockFormat) -> None:
    chance = torch.Generator().manual_seed(7)
    residuals = [torch.zeros(700) for _ in range(3)]
    for _ in range(1000):
        check_conserved([torch.randn(700, generator=chance) for _ in range(3)], residuals, form, 3.0)
    largest = max(float(residual.abs().max()) for residual in residuals)
    assert largest < 8.0, "and residuals do not grow"


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from([INT8, INT4]),
    ranks=st.integers(1, 5),
    numel=st.integers(1, 1300),
    seed=st.integers(0, 10**6),
    divisor=st.sampled_from([None, 1.0, 1.5, 7.0]),
)
def test_nothing_is_lost_of_any_values(
    form: BlockFormat, ranks: int, numel: int, seed: int, divisor: float | None
) -> None:
    residuals = [torch.zeros(numel) for _ in range(ranks)]
    for number in range(3):
        given = [values.clamp(-1e30, 1e30) for values in gradients(ranks, numel, seed + number)]
        check_conserved(given, residuals, form, divisor or float(ranks))


@EACH
def test_256_virtual_ranks(form: BlockFormat) -> None:
    offered, residuals = gradients(256, 3000, seed=8), [torch.zeros(3000) for _ in range(256)]
    check_conserved([values.clamp(-1e30, 1e30) for values in offered], residuals, form, 256.0)


@EACH
def test_an_empty_bucket_sends_nothing(form: BlockFormat) -> None:
    world = step([torch.zeros(0), torch.zeros(0)], None, form)
    assert world.byte_counts.sent().sum() == 0


@EACH
def test_each_phase_is_one_message_of_the_planned_size(form: BlockFormat) -> None:
    world = step(gradients(4, 10_000, seed=1), None, form)
    nbytes = form.message_nbytes(form.region_numel(10_000, 4))
    assert world.byte_counts.sent(["split"]).tolist() == [3 * nbytes] * 4
    assert world.byte_counts.sent(["gather"]).tolist() == [3 * nbytes] * 4
    assert nbytes * 8 / form.region_numel(10_000, 4) == {"int8": 8.125, "int4": 4.25}[form.kind], "bits an element"
