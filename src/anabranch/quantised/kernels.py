"""Triton kernels of the quantised exchange: each passes once over memory. ``torch_steps.py`` is their twin.

Sums and products must not be fused, or bits would differ from the twin's: launch with ``enable_fp_fusion=False``.
A program handles ``rows`` blocks of one region. Messages are given twice: as bytes and, for the scales, as int16.
Sizes are not specialised: else Triton would build another kernel, which takes seconds, where one is 1 or a multiple of
16, in the middle of a measurement.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it rounds a float32 to an integer, to the even one if in doubt
NAN_BITS = tl.constexpr(0x7FC0)  # of a bfloat16


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
def _rounded(values, most: tl.constexpr, negligible: tl.constexpr, finite: tl.constexpr):
    """Integers (as float32), scales (as float32) and the bits of scales of blocks, one in each row."""
    magnitudes = tl.abs(values)
    largest = tl.max(tl.where(magnitudes <= finite, magnitudes, float("inf")), axis=1)
    is_finite = largest <= finite
    scales = tl.where(is_finite & (largest >= negligible), largest * (1.0 / most), 0.0)
    bits = scales.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to bfloat16, ties to even
    scales = (bits << 16).to(tl.float32, bitcast=True)
    inverses = tl.where(scales > 0, tl.div_rn(1.0, tl.where(scales > 0, scales, 1.0)), 0.0)
    shown = tl.where(is_finite[:, None], values, 0.0)
    integers = (shown * inverses[:, None] + ROUND) - ROUND
    scales = tl.where(is_finite, scales, float("nan"))
    return integers, scales, tl.where(is_finite, bits, NAN_BITS).to(tl.int16)


@triton.jit
def _store(message, integers, row, inside, bits: tl.constexpr, block: tl.constexpr, rows: tl.constexpr):
    """Write integers of blocks to a message."""
    if bits == 8:
        at = row[:, None] * block + tl.arange(0, block)[None, :]
        tl.store(message + at, integers.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside[:, None])
    else:
        low, high = tl.split(tl.reshape((integers + 8.0).to(tl.int32), (rows, block // 2, 2)))
        at = row[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
        tl.store(message + at, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])


@triton.jit
def _load(message, scales, row, inside, factor, bits: tl.constexpr, block: tl.constexpr, rows: tl.constexpr):
    """Blocks in a message, times ``factor``; ``scales`` are those of the message."""
    scale = (tl.load(scales + row, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True) * factor
    if bits == 8:
        at = row[:, None] * block + tl.arange(0, block)[None, :]
        integers = tl.load(message + at, mask=inside[:, None], other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        at = row[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
        both = tl.load(message + at, mask=inside[:, None], other=0).to(tl.int32)
        integers = tl.reshape(tl.join(both & 15, both >> 4), (rows, block)).to(tl.float32) - 8.0
    return integers * scale[:, None]


@triton.jit(do_not_specialize=["numel", "blocks", "nbytes"])
def quantise(
    values, residual, messages, scales, numel, blocks, nbytes,
    has_residual: tl.constexpr, bits: tl.constexpr, most: tl.constexpr, negligible: tl.constexpr,
    finite: tl.constexpr, stages: tl.constexpr, rotation: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
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
    integers, _, scale = _rounded(_rotated(given, stages, rotation, block, rows), most, negligible, finite)
    _store(messages + rank * nbytes, integers, row, inside, bits, block, rows)
    tl.store(scales + (rank * nbytes + blocks * (block * bits // 8)) // 2 + row, scale, mask=inside)


@triton.jit(do_not_specialize=["ranks", "blocks", "nbytes"])
def reduce(
    received, received_scales, message, scales, rounding_error, inverse_divisor, ranks, blocks, nbytes,
    has_residual: tl.constexpr, bits: tl.constexpr, most: tl.constexpr, negligible: tl.constexpr,
    finite: tl.constexpr, stages: tl.constexpr, rotation: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Add the messages of all ranks, and write the rounded average to this owner's own."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row < blocks
    first_scale = blocks * (block * bits // 8) // 2
    average = tl.zeros((rows, block), tl.float32)
    start = tl.zeros((), tl.int64)
    for _ in range(ranks):
        at_scales = received_scales + start // 2 + first_scale
        average = average + _load(received + start, at_scales, row, inside, inverse_divisor, bits, block, rows)
        start += nbytes
    integers, wide, scale = _rounded(average, most, negligible, finite)
    _store(message, integers, row, inside, bits, block, rows)
    tl.store(scales + first_scale + row, scale, mask=inside)
    if has_residual:
        at = row[:, None] * block + tl.arange(0, block)[None, :]
        error = _rotated(average - integers * wide[:, None], stages, rotation, block, rows)
        tl.store(rounding_error + at, error, mask=inside[:, None])


@triton.jit(do_not_specialize=["owner", "numel", "blocks", "nbytes"])
def finish(
    gathered, gathered_scales, sent, sent_scales, rounding_error, poisoned, buffer, residual, owner, divisor, numel,
    blocks, nbytes, limit: tl.constexpr, has_residual: tl.constexpr, bits: tl.constexpr, stages: tl.constexpr,
    rotation: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Program (i, r): rows of the average in message r, into the buffer; and the residual, where there is one."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    rank = tl.program_id(1)
    start = rank.to(tl.int64) * nbytes
    inside = row < blocks
    first_scale = start // 2 + blocks * (block * bits // 8) // 2
    average = _load(gathered + start, gathered_scales + first_scale, row, inside, 1.0, bits, block, rows)
    average = _rotated(average, stages, rotation, block, rows)
    average = tl.where(average > limit, limit, tl.where(average < -limit, -limit, average))  # NaN stays NaN
    in_region = row[:, None] * block + tl.arange(0, block)[None, :]
    at = rank.to(tl.int64) * blocks * block + in_region
    known = inside[:, None] & (at < numel)
    if has_residual:
        before = tl.load(residual + at, mask=known, other=0.0)
        offered = tl.load(buffer + at, mask=known, other=0.0).to(tl.float32) + before
        own = _load(sent + start, sent_scales + first_scale, row, inside, 1.0, bits, block, rows)
        left = offered - _rotated(own, stages, rotation, block, rows)
        if rank == owner:
            left = left + tl.load(rounding_error + in_region, mask=known, other=0.0) * divisor
        bad = tl.load(poisoned) != 0
        tl.store(residual + at, tl.where(bad, before, left), mask=known)
        average = tl.where(bad, float("nan"), average)
    tl.store(buffer + at, average.to(buffer.dtype.element_ty), mask=known)
