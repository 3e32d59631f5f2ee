"""The quantised exchange: the same bits everywhere, errors as small as the format promises, nothing lost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.exchange.quantised.stochastic import Seeds, random_bits
from anabranch.values.kinds.formats import FORMATS, NEGLIGIBLE, BlockFormat
from exchange.quantised.oracle import hashed, rotation, rounded
from exchange.quantised.worlds import Gradients, gradients, step

EACH = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.kind)
INT8_FORMAT = FORMATS["int8"]
ROUNDING = pytest.mark.parametrize("chance", [None, 3], ids=["nearest", "stochastic"])


@EACH
@ROUNDING
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("numel", [1, 2, 255, 1283, 5000])
def test_is_the_rounded_average_of_rounded_values(
    form: BlockFormat, ranks: int, numel: int, chance: int | None
) -> None:
    offered = gradients(ranks, numel, seed=numel + ranks)
    result = [values.clone() for values in offered]
    step(result, None, form, chance=chance)
    for other in result[1:]:
        assert torch.equal(other.view(torch.int32), result[0].view(torch.int32)), "ranks must end with the same bits"
    seeds = [None if chance is None else Seeds.of(rank, chance, ("bucket",)).sender for rank in range(ranks)]
    sent = [rounded(values, ranks, form, seed) for values, seed in zip(offered, seeds, strict=True)]
    average = torch.stack(sent).sum(dim=0) / ranks
    size = torch.stack(offered).double().abs().sum(dim=0)
    check_rounded_once(result[0].double(), average, size, form, 0.5 if chance is None else 1.0)


def check_rounded_once(
    found: torch.Tensor, average: torch.Tensor, size: torch.Tensor, form: BlockFormat, units: float
) -> None:
    """``found`` is the average but for its owner's rounding, of so many units, and sums in float32 of this size."""
    if not form.scaled:
        allowed = units * 2.0**-7 * average.abs() + 2.0**-22 * size + NEGLIGIBLE
        assert bool(((found - average).abs() <= allowed).all())
        return
    turn = rotation(form)  # integers are those of the rotated block
    for error, exact, sizes in zip(*(one.split(form.block) for one in (found - average, average, size)), strict=True):
        unit = (turn[:, : len(exact)] @ exact).abs().max() / form.most * (1 + 2.0**-7)  # scales are bfloat16
        allowed = units * unit + 2.0**-20 * sizes.norm() + NEGLIGIBLE
        if form.rotates and len(error) < form.block:  # what the padding became is not known, only that it had a share
            assert error.norm() <= form.block**0.5 * allowed
        else:
            assert (turn[:, : len(error)] @ error).abs().max() <= allowed


@EACH
@ROUNDING
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_added_in_float32(
    form: BlockFormat, dtype: torch.dtype, chance: int | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    offered = [torch.randn(3000, generator=generator).to(dtype) for _ in range(4)]
    result, wide = [values.clone() for values in offered], [values.float() for values in offered]
    step(result, None, form, chance=chance)
    step(wide, None, form, chance=chance)
    assert result[0].dtype == dtype
    assert torch.equal(result[0], wide[0].to(dtype))


@EACH
@ROUNDING
@pytest.mark.parametrize("values", ["normal", "heavy-tailed"])
def test_relative_errors_are_those_of_the_ladder(form: BlockFormat, chance: int | None, values: str) -> None:
    """Of four ranks; docs and the planner quote these."""
    generator = torch.Generator().manual_seed(2)
    offered = [torch.randn(200_000, generator=generator) for _ in range(4)]
    if values == "heavy-tailed":  # Student's t distribution with 3 degrees of freedom
        offered = [one / torch.randn(len(one), 3, generator=generator).square().mean(1).sqrt() for one in offered]
    exact = torch.stack(offered).double().mean(dim=0)
    step(offered, None, form, chance=chance)
    error = float((offered[0].double() - exact).norm() / exact.norm())
    expected = {
        "normal": {"bf16": (0.0024, 0.0033), "int8": (0.0092, 0.0130), "int4": (0.152, 0.217)},
        "heavy-tailed": {"bf16": (0.0024, 0.0033), "int8": (0.018, 0.026), "int4": (0.144, 0.205)},
    }[values][form.kind]
    assert error == pytest.approx(expected[chance is not None], rel=0.1)


@EACH
def test_the_mean_of_many_stochastic_roundings_is_the_value(form: BlockFormat) -> None:
    """By Hoeffding's inequality it may fail in one of 10⁹ choices of the seeds."""
    ranks, numel, trials = 3, 256, 800
    generator = torch.Generator().manual_seed(5)
    offered = [torch.randn(numel, generator=generator) for _ in range(ranks)]
    exact = torch.stack(offered).double().mean(dim=0)
    found = torch.zeros(numel).double()
    for trial in range(trials):
        result = [values.clone() for values in offered]
        step(result, None, form, chance=trial)
        found += result[0].double() / trials
    # A unit: between what a value can become. Each rank's counts 1 / ranks of it, the owner's at most 1.1.
    if form.scaled:
        largest = max(float(values.abs().max()) for values in offered) * (2.0 if form.rotates else 1.0)
        unit = torch.full((numel,), largest / form.most * (1 + 2.0**-7)).double()
    else:
        unit = torch.stack(offered).abs().amax(dim=0).double() * 2.0**-7
    bound = unit * ((1 / ranks + 1.1**2) * np.log(2 * numel / 1e-9) / (2 * trials)) ** 0.5
    assert bool(((found - exact).abs() <= bound).all())
    nearest = [values.clone() for values in offered]
    step(nearest, None, form)
    assert float((found - exact).norm()) < 0.2 * float((nearest[0].double() - exact).norm()), "no rounding does better"


@EACH
def test_stochastic_rounding_stays_in_the_range(form: BlockFormat) -> None:
    """Blocks of equal magnitudes: all values are at the border of the range, whatever the scale was rounded to."""
    generator = torch.Generator().manual_seed(6)
    for trial in range(200):
        largest = torch.rand(10, generator=generator).add(0.5).repeat_interleave(form.block) * 2.0 ** (trial - 90)
        signs = torch.randint(0, 2, (len(largest),), generator=generator) * 2.0 - 1.0
        offered = [largest * signs, largest * signs]
        step(offered, None, form, chance=trial)
        largest_of_blocks = offered[0].view(10, -1).double().norm(dim=1) / form.block**0.5
        expected = largest.view(10, -1)[:, 0].double()
        # An integer beyond the range would be read with the other sign, or as zero.
        unit = 2.0**-7 if not form.scaled else 2.0**-6 if form.bits == 8 else 0.2
        assert bool(((largest_of_blocks - expected).abs() <= 2 * unit * expected).all())
        if not form.rotates:
            assert bool((offered[0] * signs > 0.9 * largest).all())


def test_the_largest_value_is_rounded_without_bias_and_never_overflows() -> None:
    """int8, one rank. By Hoeffding's inequality it may fail in one of 10⁹ choices of the seeds."""
    magnitudes, trials = torch.linspace(1.0, 2.0, 100), 30
    offered = magnitudes.repeat_interleave(INT8_FORMAT.block)
    found = torch.zeros(len(magnitudes)).double()
    for trial in range(trials):
        result = [offered.clone()]
        step(result, None, INT8_FORMAT, chance=trial)
        found += result[0].view(len(magnitudes), -1).double().mean(dim=1) / trials
    unit = magnitudes * (1 + 2.0**-7) / INT8_FORMAT.most
    bound = unit * (2 * np.log(2 * len(magnitudes) / 1e-9) / (2 * trials * INT8_FORMAT.block)) ** 0.5  # two roundings
    assert bool(((found - magnitudes).abs() <= bound).all())
    # In float32, 127 · 167 · (1 / 167) is more than 127: by chance about 16 of these would become 128.
    many = [torch.full((1 << 21,), 127.0 * 167.0)]
    step(many, None, INT8_FORMAT, chance=1)
    assert torch.equal(many[0], torch.full((1 << 21,), 127.0 * 167.0))


def test_seeds_differ_by_rank_step_bucket_and_rounding() -> None:
    every = [
        seed
        for rank in range(5)
        for step_number in range(20)
        for names in (("a",), ("b",), ("a", "b"))
        for seed in Seeds.of(rank, step_number, names)
    ]
    assert len(set(every)) == len(every) == 5 * 20 * 3 * 2
    assert all(-(2**31) <= seed < 2**31 for seed in every), "int32"
    assert Seeds.of(3, 14, ("a",)) == Seeds.of(3, 14, ("a",)) == (-875846171, -845323364)


def test_random_bits_are_uniform() -> None:
    bits = hashed(1 << 16, seed=-12345)
    assert np.array_equal(random_bits(torch.zeros(256, 256), -12345).flatten().numpy().view(np.uint32), bits)
    counts = np.bincount(bits >> 24, minlength=256)
    expected = (1 << 16) / 256
    assert np.abs(counts - expected).max() < 6 * expected**0.5
    lag = np.corrcoef(bits[1:].astype(float), bits[:-1].astype(float))[0, 1]
    assert abs(lag) < 6 / 2**8, "neighbours do not depend on each other"


@ROUNDING
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_without_residuals_only_the_block_is_lost(kind: str, chance: int | None) -> None:
    form = FORMATS[kind]
    offered = [values.clamp(-1, 1) for values in gradients(3, 2000, seed=4)]
    offered[1][700] = float("inf")
    step(offered, None, form, chance=chance)
    start = 700 // form.block * form.block
    for gradient in offered:
        lost = gradient.isnan()
        assert bool(lost[start : start + form.block].all()) and int(lost.sum()) == form.block


@ROUNDING
def test_in_bf16_each_value_that_is_not_finite_arrives_as_in_a_dense_sum(chance: int | None) -> None:
    inf, nan = float("inf"), float("nan")
    offered = [values.clamp(-1, 1) for values in gradients(3, 2000, seed=4)]
    for at, (one, other) in enumerate([(inf, 1.0), (-inf, -inf), (inf, -inf), (nan, 1.0), (nan, inf), (-nan, -nan)]):
        offered[0][700 + at], offered[2][700 + at] = one, other
    exact = torch.stack(offered).sum(dim=0)
    step(offered, None, FORMATS["bf16"], chance=chance)
    for gradient in offered:
        assert gradient[700:702].tolist() == [inf, -inf] and bool(gradient[702:706].isnan().all())
        assert torch.equal(gradient.isfinite(), exact.isfinite()), "and no other value is lost"
        assert torch.equal(gradient.view(torch.int32), offered[0].view(torch.int32))


@ROUNDING
def test_large_averages_in_bf16_are_finite_though_their_sums_are_not(chance: int | None) -> None:
    offered = [torch.full((100,), 3.0e38) for _ in range(4)]
    step(offered, None, FORMATS["bf16"], chance=chance)
    assert float((offered[0] / 3.0e38 - 1).abs().max()) < 2.0**-7


@ROUNDING
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_largest_float16_stays_finite(kind: str, chance: int | None) -> None:
    offered = [torch.full((500,), 65504.0, dtype=torch.float16) for _ in range(2)]
    step(offered, None, FORMATS[kind], chance=chance)
    assert bool(offered[0].isfinite().all())


@EACH
@ROUNDING
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_all_ranks_and_changes_no_residual(
    form: BlockFormat, bad: float, chance: int | None
) -> None:
    offered, residuals = gradients(3, 2000, seed=4), gradients(3, 2000, seed=6)
    residuals = [values.clamp(-1, 1) for values in residuals]
    offered = [values.clamp(-1, 1) for values in offered]
    clean = [values.clone() for values in offered]
    offered[1][700] = bad
    before = [values.clone() for values in residuals]
    step(offered, residuals, form, chance=chance)
    for gradient, residual, old in zip(offered, residuals, before, strict=True):
        assert bool(gradient.isnan().all()), "so that nobody applies a part of the bucket"
        assert torch.equal(residual, old)
    again = [values.clone() for values in clean]
    step(again, residuals, form, chance=chance)
    assert bool(again[0].isfinite().all()), "nothing is poisoned later"


def check_conserved(
    given: Gradients, residuals: Gradients, form: BlockFormat, divisor: float, chance: int | None
) -> None:
    """One step with residuals; summed over the ranks, offered = applied + residual, at every element."""
    offered = [gradient.double() + residual.double() for gradient, residual in zip(given, residuals, strict=True)]
    total, size = torch.stack(offered).sum(dim=0), torch.stack(offered).abs().sum(dim=0)
    step(given, residuals, form, divisor, chance)
    kept = torch.stack([residual.double() for residual in residuals])
    lost = (total - given[0].double() * divisor - kept.sum(dim=0)).abs()
    sizes = size + kept.abs().sum(dim=0) + (given[0].double() * divisor).abs()
    largest = torch.cat([part.amax().expand(len(part)) for part in sizes.split(form.block)])
    if form.rotates:  # an element is a sum over its block
        sizes = largest
    elif form.scaled and chance is not None:  # an element may become a unit of its block, which the residual takes back
        sizes = sizes + 2 * largest / form.most
    allowed = 2.0**-22 * (len(given) + 3) * sizes + 1e-44 * len(given)
    assert bool((lost <= allowed).all()), f"lost up to {float((lost / allowed).max()):.2e} of what rounding may do"


@EACH
@pytest.mark.parametrize("stochastic", [False, True])
def test_residuals_do_not_grow(form: BlockFormat, stochastic: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    residuals = [torch.zeros(700) for _ in range(3)]
    for number in range(500):
        given = [torch.randn(700, generator=generator) for _ in range(3)]
        check_conserved(given, residuals, form, 3.0, number if stochastic else None)
    assert max(float(residual.abs().max()) for residual in residuals) < 8.0


@EACH
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_nothing_is_lost_over_a_hundred_steps_of_odd_values(form: BlockFormat, ranks: int, stochastic: bool) -> None:
    """Three thousand steps in all; one in each hundred is not finite, after which nothing is poisoned."""
    numel = 1301 + 2 * ranks
    residuals = [torch.zeros(numel) for _ in range(ranks)]
    for number in range(100):
        given, chance = gradients(ranks, numel, seed=1000 * ranks + number), number if stochastic else None
        if number != 50:
            check_conserved(given, residuals, form, float(ranks), chance)
            continue
        before = [residual.clone() for residual in residuals]
        given[-1][number] = float("nan")
        step(given, residuals, form, chance=chance)
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
    stochastic=st.booleans(),
)
def test_nothing_is_lost_of_any_values(
    form: BlockFormat, ranks: int, numel: int, seed: int, divisor: float | None, stochastic: bool
) -> None:
    residuals = [torch.zeros(numel) for _ in range(ranks)]
    for number in range(3):
        given = [values.clamp(-1e30, 1e30) for values in gradients(ranks, numel, seed + number)]
        check_conserved(given, residuals, form, divisor or float(ranks), seed + number if stochastic else None)


@pytest.mark.campaign_but_first
@pytest.mark.slow
@EACH
def test_256_virtual_ranks(form: BlockFormat) -> None:
    """Some steps, the second one rounded by chance."""
    residuals = [torch.zeros(3001) for _ in range(256)]
    for number, chance in enumerate((None, 3, None)):
        # In float32 an owner cannot keep 256 times the rounding error of 1e37.
        given = [values.clamp(-1e30, 1e30) for values in gradients(256, 3001, seed=8 + number)]
        check_conserved(given, residuals, form, 256.0, chance)
        assert all(torch.equal(other, given[0]) for other in given[1:])


@EACH
def test_an_empty_bucket_sends_nothing(form: BlockFormat) -> None:
    world = step([torch.zeros(0), torch.zeros(0)], None, form)
    assert world.byte_counts.sent().sum() == 0


@EACH
@ROUNDING
def test_each_phase_is_one_message_of_the_planned_size(form: BlockFormat, chance: int | None) -> None:
    world = step(gradients(4, 10_000, seed=1), None, form, chance=chance)
    nbytes = form.message_nbytes(form.region_numel(10_000, 4))
    assert world.byte_counts.sent(["split"]).tolist() == [3 * nbytes] * 4
    assert world.byte_counts.sent(["gather"]).tolist() == [3 * nbytes] * 4
    bits = nbytes * 8 / form.region_numel(10_000, 4)
    assert bits == {"bf16": 16, "int8": 8.125, "int4": 4.25}[form.kind], "bits an element"
