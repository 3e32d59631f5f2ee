"""Triton kernels of the quantised exchange: each passes once over memory. ``torch_steps.py`` is their twin.

Sums and products must not be fused, or bits would differ from the twin's: launch with ``enable_fp_fusion=False``.
A program handles ``rows`` blocks of one region. Messages are given twice: as bytes, for their integers, ``integers``
bytes a block, and as int16, for the numbers behind them (``values/kinds/formats.py``). If ``bits`` is 16, all values
are numbers.
Sizes and seeds are not specialised: else Triton would build another kernel, which takes seconds, where one is 1 or a
multiple of 16, in the middle of a measurement.
"""

import triton
import triton.language as tl

from anabranch.exchange.quantised.torch_steps import MULTIPLIERS
from anabranch.values.kinds import formats

ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it rounds a float32 to an integer, to the even one if in doubt
NAN_BITS = tl.constexpr(formats.NAN_BITS)
FIRST_MULTIPLIER, SECOND_MULTIPLIER = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])


@triton.jit
def _random_bits(position, seed):
    """Random int32 numbers by position, as in ``torch_steps.py``."""
    bits = position.to(tl.int32) ^ seed
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * FIRST_MULTIPLIER
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * SECOND_MULTIPLIER
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def _rotated(values, stages: tl.constexpr, scale: tl.constexpr, block: tl.constexpr, rows: tl.constexpr):
    """The Walsh-Hadamard transform of each row; no stages leave it as it is."""
    if stages > 0:
        values = values * scale
        for _ in tl.static_range(stages):
            left, right = tl.split(tl.reshape(values, (rows, block // 2, 2)))
            values = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 2, 1)), (rows, block))
    return values


@triton.jit
def _scales(
    values, most: tl.constexpr, negligible: tl.constexpr, finite: tl.constexpr, by_chance: tl.constexpr,
    binary: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """The scale of each row, as float32, and whether all its values are finite."""
    magnitudes = tl.abs(values)
    largest = tl.max(tl.where(magnitudes <= finite, magnitudes, float("inf")), axis=1)
    is_finite = largest <= finite
    scaled = is_finite & (largest >= negligible)
    if binary:
        exponent = ((largest.to(tl.int32, bitcast=True) + ((1 << (25 - bits)) - 1)) >> 23) - (bits - 2)
        scales = tl.where(scaled, (exponent << 23).to(tl.float32, bitcast=True), 0.0)
    else:
        exact = tl.where(scaled, largest * (1.0 / most), 0.0).to(tl.int32, bitcast=True)
        more = 0xFFFF if by_chance else 0x7FFF + ((exact >> 16) & 1)  # up, or to the nearest, ties to even
        scales = (((exact + more) >> 16) << 16).to(tl.float32, bitcast=True)
    return scales, is_finite


@triton.jit
def _integers(values, scales, is_finite, position, seed, by_chance: tl.constexpr, most: tl.constexpr):
    """Integers of blocks, as float32."""
    inverses = tl.where(scales > 0, tl.div_rn(1.0, tl.where(scales > 0, scales, 1.0)), 0.0)
    scaled = tl.where(is_finite[:, None], values, 0.0) * inverses[:, None]
    if by_chance:
        low = tl.floor(scaled)
        uniform = ((_random_bits(position, seed) >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08  # 2⁻²⁴
        integers = low + (uniform < scaled - low).to(tl.float32)
        integers = tl.minimum(tl.maximum(integers, -most), most)
    else:
        integers = (scaled + ROUND) - ROUND
    return integers


@triton.jit
def _write(
    values, message, numbers, position, row, inside, seed, by_chance: tl.constexpr, bits: tl.constexpr,
    most: tl.constexpr, negligible: tl.constexpr, finite: tl.constexpr, binary: tl.constexpr, block: tl.constexpr,
    rows: tl.constexpr,
):  # fmt: skip
    """Round blocks, one in each row, into a message whose numbers are at ``numbers``. Returns what it then holds."""
    at = row[:, None] * block + tl.arange(0, block)[None, :]
    if bits == 16:
        given = values.to(tl.int32, bitcast=True)
        more = (_random_bits(position, seed) & 0xFFFF) if by_chance else 0x7FFF + ((given >> 16) & 1)
        word = tl.where(values == values, (given + more) >> 16, NAN_BITS)
        tl.store(numbers + at, word.to(tl.int16), mask=inside[:, None])
        written = (word << 16).to(tl.float32, bitcast=True)
    else:
        scales, is_finite = _scales(values, most, negligible, finite, by_chance, binary, bits)
        integers = _integers(values, scales, is_finite, position, seed, by_chance, most)
        scale_bits = tl.where(is_finite, scales.to(tl.int32, bitcast=True) >> 16, NAN_BITS)
        tl.store(numbers + row, scale_bits.to(tl.int16), mask=inside)
        if bits == 8:
            tl.store(message + at, integers.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside[:, None])
        else:
            low, high = tl.split(tl.reshape((integers + 8.0).to(tl.int32), (rows, block // 2, 2)))
            halves = row[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
            tl.store(message + halves, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
        written = integers * tl.where(is_finite, scales, float("nan"))[:, None]
    return written


@triton.jit
def _read(message, numbers, row, inside, factor, bits: tl.constexpr, block: tl.constexpr, rows: tl.constexpr):
    """Blocks in a message whose numbers are at ``numbers``, times ``factor``."""
    at = row[:, None] * block + tl.arange(0, block)[None, :]
    if bits == 16:
        word = tl.load(numbers + at, mask=inside[:, None], other=0).to(tl.int32)
        values = (word << 16).to(tl.float32, bitcast=True) * factor
    else:
        scale = (tl.load(numbers + row, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True) * factor
        if bits == 8:
            integers = tl.load(message + at, mask=inside[:, None], other=0).to(tl.int8, bitcast=True).to(tl.float32)
        else:
            halves = row[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
            both = tl.load(message + halves, mask=inside[:, None], other=0).to(tl.int32)
            integers = tl.reshape(tl.join(both & 15, both >> 4), (rows, block)).to(tl.float32) - 8.0
        values = integers * scale[:, None]
    return values


@triton.jit(do_not_specialize=["seed", "numel", "blocks", "nbytes"])
def quantise(
    values, residual, messages, numbers, seed, numel, blocks, nbytes,
    has_residual: tl.constexpr, by_chance: tl.constexpr, bits: tl.constexpr, integers: tl.constexpr,
    most: tl.constexpr, negligible: tl.constexpr, finite: tl.constexpr, binary: tl.constexpr, stages: tl.constexpr,
    rotation: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Program (i, r): rows of the region that rank r owns, into message r."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    rank = tl.program_id(1).to(tl.int64)
    inside = row < blocks
    at = (rank * blocks + row[:, None]) * block + tl.arange(0, block)[None, :]
    known = inside[:, None] & (at < numel)
    given = tl.load(values + at, mask=known, other=0.0).to(tl.float32)
    if has_residual:
        given = given + tl.load(residual + at, mask=known, other=0.0)
    given = _rotated(given, stages, rotation, block, rows)
    message, numbers_at = messages + rank * nbytes, numbers + (rank * nbytes + blocks * integers) // 2
    _write(
        given, message, numbers_at, at, row, inside, seed, by_chance, bits, most, negligible, finite, binary, block,
        rows,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "ranks", "blocks", "nbytes"])
def reduce(
    received, received_numbers, message, numbers, rounding_error, inverse_divisor, seed, ranks, blocks, nbytes,
    has_residual: tl.constexpr, by_chance: tl.constexpr, bits: tl.constexpr, integers: tl.constexpr,
    most: tl.constexpr, negligible: tl.constexpr, finite: tl.constexpr, binary: tl.constexpr, stages: tl.constexpr,
    rotation: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Add the messages of all ranks, and write the rounded average to this owner's own."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row < blocks
    at = row[:, None] * block + tl.arange(0, block)[None, :]
    first_number = blocks * integers // 2
    average = tl.zeros((rows, block), tl.float32)
    start = tl.zeros((), tl.int64)
    for _ in range(ranks):
        numbers_at = received_numbers + start // 2 + first_number
        average = average + _read(received + start, numbers_at, row, inside, inverse_divisor, bits, block, rows)
        start += nbytes
    written = _write(
        average, message, numbers + first_number, at, row, inside, seed, by_chance, bits, most, negligible, finite,
        binary, block, rows,
    )  # fmt: skip
    if has_residual:
        error = _rotated(average - written, stages, rotation, block, rows)
        tl.store(rounding_error + at, error, mask=inside[:, None])


@triton.jit(do_not_specialize=["owner", "numel", "blocks", "nbytes"])
def finish(
    gathered, gathered_numbers, sent, sent_numbers, rounding_error, poisoned, buffer, residual, owner, divisor, numel,
    blocks, nbytes, limit: tl.constexpr, has_residual: tl.constexpr, bits: tl.constexpr, integers: tl.constexpr,
    stages: tl.constexpr, rotation: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Program (i, r): rows of the average in message r, into the buffer; and the residual, where there is one."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    rank = tl.program_id(1)
    start = rank.to(tl.int64) * nbytes
    inside = row < blocks
    first_number = (start + blocks * integers) // 2
    average = _read(gathered + start, gathered_numbers + first_number, row, inside, 1.0, bits, block, rows)
    average = _rotated(average, stages, rotation, block, rows)
    if bits < 16:
        average = tl.where(average > limit, limit, tl.where(average < -limit, -limit, average))  # NaN stays NaN
    in_region = row[:, None] * block + tl.arange(0, block)[None, :]
    at = rank.to(tl.int64) * blocks * block + in_region
    known = inside[:, None] & (at < numel)
    if has_residual:
        before = tl.load(residual + at, mask=known, other=0.0)
        offered = tl.load(buffer + at, mask=known, other=0.0).to(tl.float32) + before
        own = _read(sent + start, sent_numbers + first_number, row, inside, 1.0, bits, block, rows)
        left = offered - _rotated(own, stages, rotation, block, rows)
        if rank == owner:
            left = left + tl.load(rounding_error + in_region, mask=known, other=0.0) * divisor
        bad = tl.load(poisoned) != 0
        tl.store(residual + at, tl.where(bad, before, left), mask=known)
        average = tl.where(bad, float("nan"), average)
    tl.store(buffer + at, average.to(buffer.dtype.element_ty), mask=known)
