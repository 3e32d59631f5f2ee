"""The quantised exchange: the same bits everywhere, errors as small as the format promises, nothing lost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.exchange.quantised.torch_steps import random_bits
from anabranch.values.kinds.formats import FORMATS, NEGLIGIBLE, BlockFormat
from exchange.quantised.oracle import hashed, rotation, rounded
from exchange.quantised.worlds import Gradients, gradients, step

EACH = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.kind)


@EACH
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("numel", [1, 2, 255, 1283, 5000])
def test_is_the_rounded_average_of_rounded_values(form: BlockFormat, ranks: int, numel: int) -> None:
    offered = gradients(ranks, numel, seed=numel + ranks)
    result = [values.clone() for values in offered]
    step(result, None, form)
    for other in result[1:]:
        assert torch.equal(other.view(torch.int32), result[0].view(torch.int32)), "ranks must end with the same bits"
    sent = [rounded(values, ranks, form) for values in offered]
    average = torch.stack(sent).sum(dim=0) / ranks
    size = torch.stack(offered).double().abs().sum(dim=0)
    check_rounded_once(result[0].double(), average, size, form)


def check_rounded_once(found: torch.Tensor, average: torch.Tensor, size: torch.Tensor, form: BlockFormat) -> None:
    """``found`` is the average but for its owner's rounding, of half a unit, and sums in float32 of this size."""
    if not form.scaled:
        allowed = 2.0**-8 * average.abs() + 2.0**-22 * size + NEGLIGIBLE
        assert bool(((found - average).abs() <= allowed).all())
        return
    turn = rotation(form)  # integers are those of the rotated block
    for error, exact, sizes in zip(*(one.split(form.block) for one in (found - average, average, size)), strict=True):
        unit = (turn[:, : len(exact)] @ exact).abs().max() / form.most * (1 + 2.0**-7)  # scales are bfloat16
        allowed = 0.5 * unit + 2.0**-20 * sizes.norm() + NEGLIGIBLE
        if form.rotates and len(error) < form.block:  # what the padding became is not known, only that it had a share
            assert error.norm() <= form.block**0.5 * allowed
        else:
            assert (turn[:, : len(error)] @ error).abs().max() <= allowed


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_added_in_float32(form: BlockFormat, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    offered = [torch.randn(3000, generator=generator).to(dtype) for _ in range(4)]
    result, wide = [values.clone() for values in offered], [values.float() for values in offered]
    step(result, None, form)
    step(wide, None, form)
    assert result[0].dtype == dtype
    assert torch.equal(result[0], wide[0].to(dtype))


@EACH
@pytest.mark.parametrize("values", ["normal", "heavy-tailed"])
def test_relative_errors_are_those_of_the_ladder(form: BlockFormat, values: str) -> None:
    """Of four ranks; docs and the planner quote these."""
    generator = torch.Generator().manual_seed(2)
    offered = [torch.randn(200_000, generator=generator) for _ in range(4)]
    if values == "heavy-tailed":  # Student's t distribution with 3 degrees of freedom
        offered = [one / torch.randn(len(one), 3, generator=generator).square().mean(1).sqrt() for one in offered]
    exact = torch.stack(offered).double().mean(dim=0)
    step(offered, None, form)
    error = float((offered[0].double() - exact).norm() / exact.norm())
    expected = {
        "normal": {"bf16": 0.0024, "int8": 0.0092, "int4": 0.152},
        "heavy-tailed": {"bf16": 0.0024, "int8": 0.018, "int4": 0.144},
    }[values][form.kind]
    assert error == pytest.approx(expected, rel=0.1)


def test_random_bits_are_uniform() -> None:
    bits = hashed(1 << 16, seed=-12345)
    assert np.array_equal(random_bits(torch.zeros(256, 256), -12345).flatten().numpy().view(np.uint32), bits)
    counts = np.bincount(bits >> 24, minlength=256)
    expected = (1 << 16) / 256
    assert np.abs(counts - expected).max() < 6 * expected**0.5
    lag = np.corrcoef(bits[1:].astype(float), bits[:-1].astype(float))[0, 1]
    assert abs(lag) < 6 / 2**8, "neighbours do not depend on each other"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_without_residuals_only_the_block_is_lost(kind: str) -> None:
    form = FORMATS[kind]
    offered = [values.clamp(-1, 1) for values in gradients(3, 2000, seed=4)]
    offered[1][700] = float("inf")
    step(offered, None, form)
    start = 700 // form.block * form.block
    for gradient in offered:
        lost = gradient.isnan()
        assert bool(lost[start : start + form.block].all()) and int(lost.sum()) == form.block


def test_in_bf16_each_value_that_is_not_finite_arrives_as_in_a_dense_sum() -> None:
    inf, nan = float("inf"), float("nan")
    offered = [values.clamp(-1, 1) for values in gradients(3, 2000, seed=4)]
    for at, (one, other) in enumerate([(inf, 1.0), (-inf, -inf), (inf, -inf), (nan, 1.0), (nan, inf), (-nan, -nan)]):
        offered[0][700 + at], offered[2][700 + at] = one, other
    exact = torch.stack(offered).sum(dim=0)
    step(offered, None, FORMATS["bf16"])
    for gradient in offered:
        assert gradient[700:702].tolist() == [inf, -inf] and bool(gradient[702:706].isnan().all())
        assert torch.equal(gradient.isfinite(), exact.isfinite()), "and no other value is lost"
        assert torch.equal(gradient.view(torch.int32), offered[0].view(torch.int32))


def test_large_averages_in_bf16_are_finite_though_their_sums_are_not() -> None:
    offered = [torch.full((100,), 3.0e38) for _ in range(4)]
    step(offered, None, FORMATS["bf16"])
    assert float((offered[0] / 3.0e38 - 1).abs().max()) < 2.0**-7


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_largest_float16_stays_finite(kind: str) -> None:
    offered = [torch.full((500,), 65504.0, dtype=torch.float16) for _ in range(2)]
    step(offered, None, FORMATS[kind])
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
    largest = torch.cat([part.amax().expand(len(part)) for part in sizes.split(form.block)])
    if form.rotates:  # an element is a sum over its block
        sizes = largest
    allowed = 2.0**-22 * (len(given) + 3) * sizes + 1e-44 * len(given)
    assert bool((lost <= allowed).all()), f"lost up to {float((lost / allowed).max()):.2e} of what rounding may do"


@EACH
def test_residuals_do_not_grow(form: BlockFormat) -> None:
    generator = torch.Generator().manual_seed(7)
    residuals = [torch.zeros(700) for _ in range(3)]
    for _ in range(500):
        given = [torch.randn(700, generator=generator) for _ in range(3)]
        check_conserved(given, residuals, form, 3.0)
    assert max(float(residual.abs().max()) for residual in residuals) < 8.0


@EACH
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_nothing_is_lost_over_a_hundred_steps_of_odd_values(form: BlockFormat, ranks: int) -> None:
    """One in each hundred is not finite, after which nothing is poisoned."""
    numel = 1301 + 2 * ranks
    residuals = [torch.zeros(numel) for _ in range(ranks)]
    for number in range(100):
        given = gradients(ranks, numel, seed=1000 * ranks + number)
        if number != 50:
            check_conserved(given, residuals, form, float(ranks))
            continue
        before = [residual.clone() for residual in residuals]
        given[-1][number] = float("nan")
        step(given, residuals, form)
        assert all(bool(gradient.isnan().all()) for gradient in given)
        assert all(torch.equal(residual, old) for residual, old in zip(residuals, before, strict=True))
    assert all(bool(residual.any()) for residual in residuals)


@settings(max_examples=80, deadline=None)
@given(
    form=st.sampled_from(list(FORMATS.values())),
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


@pytest.mark.campaign_but_first
@pytest.mark.slow
@EACH
def test_256_virtual_ranks(form: BlockFormat) -> None:
    residuals = [torch.zeros(3001) for _ in range(256)]
    for number in range(3):
        # In float32 an owner cannot keep 256 times the rounding error of 1e37.
        given = [values.clamp(-1e30, 1e30) for values in gradients(256, 3001, seed=8 + number)]
        check_conserved(given, residuals, form, 256.0)
        assert all(torch.equal(other, given[0]) for other in given[1:])


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
    bits = nbytes * 8 / form.region_numel(10_000, 4)
    assert bits == {"bf16": 16, "int8": 8.125, "int4": 4.25}[form.kind], "bits an element"
