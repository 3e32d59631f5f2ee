"""Messages in Triton: how kernels load and store pairs, and count them in the message's own head."""

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(2**31 - 1)  # all bits but the sign
INFINITE = tl.constexpr(0x7F800000)  # magnitudes from here on are not finite
SUMMABLE_BELOW = tl.constexpr(0x757FFFFF)  # the bits of comm.dense.SUMMABLE_BELOW
SIGN = tl.constexpr(-(2**31))
SIZES = [
    "numel",
    "ranks",
    "rank",
    "capacity",
    "row_words",
    "wanted",
    "shift",
]  # arguments that kernels are not specialised for: one compilation serves all sizes
HALVES = tl.constexpr(4)  # a head, in int16


@triton.jit
def round_bits(bits):
    """A finite float32's bits rounded to bfloat16, ties to even. In integers, so every compiler gives the same bits."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def store_pairs(pairs, row, slot, bits, position, mask, capacity, first: tl.constexpr, last: tl.constexpr):
    """Store pairs; ``pairs`` is the messages' memory as int64 (float32 values) or int16 (rounded values)."""
    if first == 0:
        low = bits.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(pairs + row * (capacity + 1) + 1 + slot, (position.to(tl.int64) << 32) | low, mask=mask)
    else:
        at = pairs + row * (HALVES + capacity * (last - first)) + HALVES + slot.to(tl.int64) * (last - first)
        tl.store(at, (bits >> 16).to(tl.int16), mask=mask)
        tl.store(at + 1, position.to(tl.int16), mask=mask)
        if last == 4:
            tl.store(at + 2, (position >> 16).to(tl.int16), mask=mask)


@triton.jit
def load_pairs(pairs, row, slot, capacity, first: tl.constexpr, last: tl.constexpr):
    """Bits and positions (−1: unused) of a row's slots; slots beyond the capacity read as unused."""
    inside = slot < capacity
    if first == 0:
        word = tl.load(pairs + row * (capacity + 1) + 1 + slot, mask=inside, other=-1)
        bits = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        position = (word >> 32).to(tl.int32)
    else:
        at = pairs + row * (HALVES + capacity * (last - first)) + HALVES + slot.to(tl.int64) * (last - first)
        bits = tl.load(at, mask=inside, other=0).to(tl.int32) << 16
        low = tl.load(at + 1, mask=inside, other=-1).to(tl.int32) & 0xFFFF
        if last == 4:
            position = (tl.load(at + 2, mask=inside, other=-1).to(tl.int32) << 16) | low
        else:
            position = tl.where(low == 0xFFFF, -1, low)
    return bits, position


@triton.jit
def reserve_slots(counter, counts):
    """Reserve ``counts`` slots for each lane, in one atomic operation: for each lane the slot after its last."""
    before = tl.atomic_add(counter, tl.sum(counts), sem="relaxed") & MAGNITUDE  # without the sign of a poisoned head
    return before + tl.cumsum(counts, 0)


@triton.jit
def least_count(heads, ranks, row_words, rows: tl.constexpr):
    """The smallest of the messages' counts: negative if any message is poisoned."""
    row = tl.arange(0, rows)
    return tl.min(tl.load(heads + row.to(tl.int64) * row_words, mask=row < ranks, other=0))


@triton.jit
def valid_pairs(heads, position, ranks, row_words, rows: tl.constexpr):
    """Which slots hold a valid pair: those in use, and none if any message is poisoned."""
    return tl.where(least_count(heads, ranks, row_words, rows) < 0, -1, position) >= 0


@triton.jit(do_not_specialize=SIZES)
def reset(words, counter, row_words, block: tl.constexpr):
    """Empty messages: heads 0 and pairs −1 in every row; ``counter`` ← 0."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1)
    tl.store(words + row.to(tl.int64) * row_words + at, tl.where(at < 2, 0, -1), mask=at < row_words)
    if (row == 0) & (tl.program_id(0) == 0):
        tl.store(counter, 0)
