"""Rows of pairs in Triton: how kernels load and store them, and count them in the row's own head."""

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(2**31 - 1)  # all bits but the sign
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
    "chunks",
    "groups",
    "group_bits",
]  # arguments that kernels are not specialised for: one compilation serves all sizes


@triton.jit
def store_pairs(pairs, row, slot, bits, position, mask, capacity):
    """Store pairs; ``pairs`` is the rows' memory as int64."""
    low = bits.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(pairs + row * (capacity + 1) + 1 + slot, (position.to(tl.int64) << 32) | low, mask=mask)


@triton.jit
def load_pairs(pairs, row, slot, capacity):
    """Bits and positions (−1: unused) of a row's slots; slots beyond the capacity read as unused."""
    word = tl.load(pairs + row * (capacity + 1) + 1 + slot, mask=slot < capacity, other=-1)
    return (word & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), (word >> 32).to(tl.int32)


@triton.jit
def reserve_slots(counter, counts):
    """Reserve ``counts`` slots for each lane, in one atomic operation: for each lane the slot after its last."""
    before = tl.atomic_add(counter, tl.sum(counts), sem="relaxed") & MAGNITUDE  # without the sign of a poisoned head
    return before + tl.cumsum(counts, 0)


@triton.jit
def least_count(heads, ranks, row_words, rows: tl.constexpr):
    """The smallest of the rows' counts: negative if any is poisoned."""
    row = tl.arange(0, rows)
    return tl.min(tl.load(heads + row.to(tl.int64) * row_words, mask=row < ranks, other=0))


@triton.jit
def valid_pairs(heads, position, ranks, row_words, rows: tl.constexpr):
    """Which slots hold a valid pair: those in use, and none if any row is poisoned."""
    return tl.where(least_count(heads, ranks, row_words, rows) < 0, -1, position) >= 0


@triton.jit(do_not_specialize=SIZES)
def reset(words, counter, row_words, block: tl.constexpr):
    """Empty rows: heads 0 and pairs −1; ``counter`` ← 0."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1)
    tl.store(words + row.to(tl.int64) * row_words + at, tl.where(at < 2, 0, -1), mask=at < row_words)
    if (row == 0) & (tl.program_id(0) == 0):
        tl.store(counter, 0)
