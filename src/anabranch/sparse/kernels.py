"""Selection in Triton: what ``select.py`` does in torch operations, a few launches for float32 buckets on a GPU.

    blank                      empty messages: heads 0, pairs −1
    offer                      compare gradient + residual with the threshold, pack what passes by region; changes neither
    add, collect, take         sum what arrived; list each position's sum once; pack the sums that pass
    settle, apply, clear       residual += gradient, gradient = 0; scatter what all apply; take it off the residual
    keep                       put what rounding at the owner left over into its residual
    note                       counts, thresholds and the next tilt

A message is one row: a head of two int32 (a count, negative if poisoned, and a float32), then pairs as in ``wire.py``.
The packing kernels count in the head itself. A float32's bits without the sign sort as its magnitude does, so
magnitudes are compared as integers: zeros, subnormals and infinities need no care. ``fused.py`` launches these kernels.
"""

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(2**31 - 1)  # all bits but the sign
INFINITE = tl.constexpr(0x7F800000)  # magnitudes from here on are not finite
SIGN = tl.constexpr(-(2**31))
HALVES = tl.constexpr(4)  # a head, in int16


@triton.jit
def rounded(bits):
    """A finite float32's bits to bfloat16's precision, ties to even; by integers, so that no compiler rounds otherwise."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def put(pairs, row, slot, bits, place, mask, capacity, first: tl.constexpr, last: tl.constexpr):
    """Store pairs; ``pairs`` is the messages' memory as int64 (whole values) or int16 (rounded)."""
    if first == 0:
        low = bits.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(pairs + row * (capacity + 1) + 1 + slot, (place.to(tl.int64) << 32) | low, mask=mask)
    else:
        at = pairs + row * (HALVES + capacity * (last - first)) + HALVES + slot.to(tl.int64) * (last - first)
        tl.store(at, (bits >> 16).to(tl.int16), mask=mask)
        tl.store(at + 1, place.to(tl.int16), mask=mask)
        if last == 4:
            tl.store(at + 2, (place >> 16).to(tl.int16), mask=mask)


@triton.jit
def get(pairs, row, slot, capacity, first: tl.constexpr, last: tl.constexpr):
    """Bits and places (−1: none) of a row's slots, also of slots beyond the capacity."""
    inside = slot < capacity
    if first == 0:
        word = tl.load(pairs + row * (capacity + 1) + 1 + slot, mask=inside, other=-1)
        bits = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        place = (word >> 32).to(tl.int32)
    else:
        at = pairs + row * (HALVES + capacity * (last - first)) + HALVES + slot.to(tl.int64) * (last - first)
        bits = tl.load(at, mask=inside, other=0).to(tl.int32) << 16
        low = tl.load(at + 1, mask=inside, other=-1).to(tl.int32) & 0xFFFF
        if last == 4:
            place = (tl.load(at + 2, mask=inside, other=-1).to(tl.int32) << 16) | low
        else:
            place = tl.where(low == 0xFFFF, -1, low)
    return bits, place


@triton.jit
def claim(counter, chosen):
    """A slot for each chosen lane, in lane order: one atomic operation for all of them."""
    ones = chosen.to(tl.int32)
    before = tl.atomic_add(counter, tl.sum(ones)) & MAGNITUDE  # without the sign of a poisoned head
    return before + tl.cumsum(ones, 0) - 1


@triton.jit
def any_negative(heads, ranks, row_words, rows: tl.constexpr):
    """Whether any message is poisoned."""
    row = tl.arange(0, rows)
    return tl.min(tl.load(heads + row.to(tl.int64) * row_words, mask=row < ranks, other=0)) < 0


@triton.jit
def blank(words, counter, row_words, block: tl.constexpr):
    """Heads 0 and pairs −1 in every row; ``counter`` 0."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1)
    tl.store(words + row.to(tl.int64) * row_words + at, tl.where(at < 2, 0, -1), mask=at < row_words)
    if (row == 0) & (tl.program_id(0) == 0):
        tl.store(counter, 0)


@triton.jit
def offer(
    gradient, residual, threshold, boundaries, heads, pairs, numel, ranks, capacity, row_words,
    first: tl.constexpr, last: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """See ``select.offer``, but for the accumulation, which is left to ``settle``: eight bytes per element are read."""
    start = tl.program_id(0).to(tl.int64) * block
    lane = tl.arange(0, block)
    if start + block <= numel:  # without a mask loads are 16 bytes wide, whatever numel is
        total = tl.load(residual + start + lane) + tl.load(gradient + start + lane)
    else:
        inside = lane < numel - start
        total = tl.load(residual + start + lane, mask=inside, other=0.0)
        total += tl.load(gradient + start + lane, mask=inside, other=0.0)
    bits = total.to(tl.int32, bitcast=True)
    size = bits & MAGNITUDE
    row = tl.arange(0, rows)
    if tl.max(size) >= INFINITE:
        tl.atomic_or(heads + row.to(tl.int64) * row_words, tl.full([rows], SIGN, tl.int32), mask=row < ranks)
    least = tl.maximum(tl.load(threshold).to(tl.int32, bitcast=True), 1)  # zeros never pass
    ends = tl.load(boundaries + 1 + row, mask=row < ranks, other=numel)
    lowest = tl.sum((ends <= start).to(tl.int32))
    highest = tl.sum((ends < tl.minimum(start + block, numel)).to(tl.int32))
    for region in range(lowest, highest + 1):  # one, but for blocks across a boundary
        begin = tl.load(boundaries + region) - start
        end = tl.load(boundaries + region + 1) - start
        chosen = (size >= least) & (lane >= begin) & (lane < end)
        slot = claim(heads + tl.cast(region, tl.int64) * row_words, chosen)
        value = bits if first == 0 else rounded(bits)
        place = (lane - begin).to(tl.int32)
        put(pairs, tl.cast(region, tl.int64), slot, value, place, chosen & (slot < capacity), capacity, first, last)


@triton.jit
def add(pairs, buffer, capacity, first: tl.constexpr, last: tl.constexpr, block: tl.constexpr):
    """buffer[position] += value, in any order. Subnormal sums become 0, are not applied, and so stay with their ranks."""
    slot = tl.program_id(0) * block + tl.arange(0, block)
    bits, place = get(pairs, tl.program_id(1).to(tl.int64), slot, capacity, first, last)
    tl.atomic_add(buffer + place, bits.to(tl.float32, bitcast=True), mask=place >= 0, sem="relaxed")


@triton.jit
def collect(
    pairs, buffer, counter, sums, places, capacity, first: tl.constexpr, last: tl.constexpr, block: tl.constexpr
):
    """List each position's sum once, as bits and place: the first to come takes it, and leaves a clean buffer."""
    slot = tl.program_id(0) * block + tl.arange(0, block)
    _, place = get(pairs, tl.program_id(1).to(tl.int64), slot, capacity, first, last)
    there = place >= 0
    bits = tl.atomic_xchg(buffer + place, tl.zeros([block], tl.int32), mask=there, sem="relaxed")
    there = there & ((bits & MAGNITUDE) != 0)
    at = claim(counter, there)
    tl.store(sums + at, bits, mask=there)
    tl.store(places + at, place, mask=there)


@triton.jit
def take(
    sums, places, counter, received, tilt, head, pairs, leftover, ranks, capacity, row_words,
    first: tl.constexpr, last: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """See ``select.take``; the threshold found is in the second word of the head, and is tilted here."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < tl.load(counter)
    bits = tl.load(sums + at, mask=inside, other=0)
    place = tl.load(places + at, mask=inside, other=-1)
    poisoned = tl.max(bits & MAGNITUDE) >= INFINITE
    if tl.program_id(0) == 0:
        poisoned = poisoned | any_negative(received, ranks, row_words, rows)
    if poisoned:
        tl.atomic_or(head, SIGN)
    found = tl.load(head + 1).to(tl.float32, bitcast=True) * tl.exp(tl.load(tilt))
    value = bits if first == 0 else rounded(bits)
    chosen = ((bits & MAGNITUDE) >= found.to(tl.int32, bitcast=True)) & ((value & MAGNITUDE) != 0)
    slot = claim(head, chosen)
    stored = chosen & (slot < capacity)
    put(pairs, 0, slot, value, place, stored, capacity, first, last)
    if first > 0:
        lost = bits.to(tl.float32, bitcast=True) - value.to(tl.float32, bitcast=True)
        tl.store(leftover + slot, lost, mask=stored)


@triton.jit
def settle(heads, gradient, residual, numel, ranks, row_words, rows: tl.constexpr, block: tl.constexpr):
    """residual += gradient and gradient = 0; if poisoned the residual stays and the gradient becomes NaN."""
    poisoned = any_negative(heads, ranks, row_words, rows)
    start = tl.program_id(0).to(tl.int64) * block
    lane = tl.arange(0, block)
    new = tl.where(poisoned, float("nan"), tl.zeros([block], tl.float32))
    if start + block <= numel:
        if not poisoned:
            total = tl.load(residual + start + lane) + tl.load(gradient + start + lane)
            tl.store(residual + start + lane, total)
        tl.store(gradient + start + lane, new)
    else:
        inside = lane < numel - start
        if not poisoned:
            total = tl.load(residual + start + lane, mask=inside) + tl.load(gradient + start + lane, mask=inside)
            tl.store(residual + start + lane, total, mask=inside)
        tl.store(gradient + start + lane, new, mask=inside)


@triton.jit
def apply(
    heads, pairs, boundaries, gradient, divisor, ranks, capacity, row_words,
    first: tl.constexpr, last: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """gradient (as int32) ← gathered values / divisor; −0 where nothing is left of one, so that ``clear`` sees it."""
    row = tl.program_id(1).to(tl.int64)
    bits, place = get(pairs, row, tl.program_id(0) * block + tl.arange(0, block), capacity, first, last)
    applied = (place >= 0) & (any_negative(heads, ranks, row_words, rows) == 0)
    value = bits.to(tl.float32, bitcast=True)
    new = tl.div_rn(value, tl.zeros_like(value) + divisor).to(tl.int32, bitcast=True)
    new = tl.where((new & MAGNITUDE) == 0, SIGN, new)
    tl.store(gradient + tl.load(boundaries + row) + place, new, mask=applied)


@triton.jit
def clear(
    heads, pairs, boundaries, gradient, residual, ranks, capacity, row_words,
    first: tl.constexpr, last: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """residual ← residual − what this rank offered, where the gradient (as int32) shows that it was applied."""
    row = tl.program_id(1).to(tl.int64)
    bits, place = get(pairs, row, tl.program_id(0) * block + tl.arange(0, block), capacity, first, last)
    offered = (place >= 0) & (any_negative(heads, ranks, row_words, rows) == 0)
    at = tl.load(boundaries + row) + place
    offered = offered & (tl.load(gradient + at, mask=offered, other=0) != 0)
    left = tl.load(residual + at, mask=offered, other=0.0) - bits.to(tl.float32, bitcast=True)
    tl.store(residual + at, left, mask=offered)


@triton.jit
def keep(
    heads, pairs, leftover, start, residual, ranks, capacity, row_words,
    first: tl.constexpr, last: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """See ``select.keep_leftover``."""
    slot = tl.program_id(0) * block + tl.arange(0, block)
    _, place = get(pairs, 0, slot, capacity, first, last)
    kept = (place >= 0) & (any_negative(heads, ranks, row_words, rows) == 0)
    at = tl.load(start) + place
    new = tl.load(residual + at, mask=kept, other=0.0) + tl.load(leftover + slot, mask=kept, other=0.0)
    tl.store(residual + at, new, mask=kept)


@triton.jit
def note(
    heads, sent, tilt, threshold, offered, applied, rank, memory, ranks, row_words, rows: tl.constexpr
):
    """See ``fixed.note``."""
    row = tl.arange(0, rows)
    inside = row < ranks
    at = row.to(tl.int64) * row_words
    counts = tl.load(heads + at, mask=inside, other=0)
    found = tl.load(heads + at + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
    votes = found > 0
    logs = tl.log(tl.where(votes, found, 1.0))
    mean = tl.sum(logs) / tl.maximum(tl.sum(votes.to(tl.int32)), 1)
    own = tl.sum(tl.where(row == rank, logs, 0.0))
    moves = (tl.sum((votes & (row == rank)).to(tl.int32)) > 0) & (tl.min(counts) >= 0)
    old = tl.load(tilt)
    tl.store(tilt, tl.where(moves, memory * old + (1 - memory) * (mean - own), old))
    tl.store(threshold, tl.exp(tl.sum(logs) / ranks))
    tl.store(applied, tl.sum(tl.maximum(counts, 0)))
    tl.store(offered, tl.sum(tl.load(sent + at, mask=inside, other=0) & MAGNITUDE))
