"""A sampled threshold in two launches, in Triton: gather magnitudes, then find the k-th largest of them."""

import triton
import triton.language as tl

from anabranch.exchange.sparse import thresholds
from anabranch.exchange.sparse.kernels.message import MAGNITUDE, SIZES

GOLDEN = tl.constexpr(thresholds.GOLDEN)
LOW_BITS = tl.constexpr(thresholds.LOW_BITS)
LANE_COUNTS = tl.constexpr(1024)  # each of a lane's three counters has ten bits


@triton.jit
def sample_position(at, shift, numel, every: tl.constexpr):
    """The position in a bucket of sample ``at``, as in ``thresholds.sample_positions``."""
    if every:
        return at
    else:  # noqa: RET505 (Triton compiles one of the two, and would go on after the first)
        turn = (at * GOLDEN + shift) & MAGNITUDE
        return ((turn * (numel >> 16)) >> 15) + ((turn * (numel & 0xFFFF)) >> 31)


@triton.jit(do_not_specialize=SIZES)
def sample(gradient, residual, seen, shift, numel, wanted, every: tl.constexpr, block: tl.constexpr):
    """Magnitudes (bits) of gradient + residual at ``wanted`` positions, then zeros up to the end of ``seen``."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    position = sample_position(at, shift, numel, every)
    inside = at < wanted
    total = tl.load(residual + position, mask=inside, other=0.0) + tl.load(gradient + position, mask=inside, other=0.0)
    tl.store(seen + at, total.to(tl.int32, bitcast=True) & MAGNITUDE)


@triton.jit(do_not_specialize=SIZES)
def sample_sums(sums, counter, seen, shift, numel, wanted, every: tl.constexpr, block: tl.constexpr):
    """Magnitudes (bits) of a list of sums (bits), of whose ``numel`` slots ``counter`` are used."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    position = sample_position(at, shift, numel, every)
    inside = at < wanted
    bits = tl.load(sums + position, mask=inside & (position < tl.load(counter)), other=0)
    tl.store(seen + at, bits & MAGNITUDE)


@triton.jit(do_not_specialize=SIZES)
def kth_magnitude(seen, found, wanted, rank, chunk: tl.constexpr):
    """The ``rank``-th largest of ``wanted`` magnitudes, rounded down: the largest t that ``rank`` of them reach.

    t is found two bits at a time, down to the lowest bit that thresholds have. ``wanted`` is a multiple of ``chunk``,
    so that loads need no mask and are wide. One program does it all: another launch would cost more than the other
    multiprocessors could save.
    """
    lane = tl.arange(0, chunk)
    result = tl.full((), 0, tl.uint32)
    unit = tl.full((), 1 << 30, tl.uint32)
    for _ in range((32 - LOW_BITS) // 2):
        counts = tl.zeros([chunk], tl.int32)
        for start in range(0, wanted, chunk):
            size = tl.load(seen + start + lane).to(tl.uint32, bitcast=True)
            counts += (size >= result + unit).to(tl.int32)
            counts += (size >= result + unit + unit).to(tl.int32) * LANE_COUNTS
            counts += (size >= result + unit + unit + unit).to(tl.int32) * (LANE_COUNTS * LANE_COUNTS)
        one = tl.sum(counts % LANE_COUNTS) >= rank
        two = tl.sum(counts // LANE_COUNTS % LANE_COUNTS) >= rank
        three = tl.sum(counts // (LANE_COUNTS * LANE_COUNTS)) >= rank
        result += tl.where(three, unit + unit + unit, tl.where(two, unit + unit, tl.where(one, unit, unit - unit)))
        unit = unit >> 2
    tl.store(found, result.to(tl.float32, bitcast=True))
