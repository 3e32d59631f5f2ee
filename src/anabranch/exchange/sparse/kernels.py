"""Selection in Triton kernels: what ``select.py`` does in torch operations, in a few launches for buckets on a GPU.

    reset                               empty rows: heads 0, pairs −1
    sample, sample_sums, kth_magnitude  a sample's magnitudes, and the k-th largest of them
    offer                               pack what of gradient + residual passes the threshold, by region
    add, collect, select_sums           add what arrived; list each position's sum once; pack the sums that pass
    accumulate, apply                   residual += gradient, gradient = 0; scatter what is applied into the gradient
    subtract_applied                    subtract what this rank offered and is applied from its residual
    keep_rounding_error                 add the rounding error of an owner's sums to its residual
    record_step                         counts, thresholds and the next bias

Where values are rounded, ``packing.py`` makes messages of fewer bytes from rows, and rows from these.

A row is a head of two int32 (a count, negative if poisoned, and a float32), then pairs: what a message in float32 is.
Kernels that select count in the head itself. A float32's bits without the sign sort as its magnitude
does, so magnitudes are compared as integers: zeros, subnormals and infinities need no special case.
``triton_exchange.py`` launches these kernels.
"""

import triton
import triton.language as tl

from anabranch.exchange.sparse import thresholds

MAGNITUDE = tl.constexpr(2**31 - 1)  # all bits but the sign
SUMMABLE_BELOW = tl.constexpr(0x757FFFFF)  # the bits of dense.SUMMABLE_BELOW
SIGN = tl.constexpr(-(2**31))
GOLDEN = tl.constexpr(thresholds.GOLDEN)
LOW_BITS = tl.constexpr(thresholds.LOW_BITS)
LANE_COUNTS = tl.constexpr(1024)  # each of a lane's three counters has ten bits
GROUP = tl.constexpr(16)  # elements whose results are the bits of one word
# Arguments that kernels are not specialised for: one compilation serves all sizes.
SIZES = ["numel", "ranks", "rank", "capacity", "row_words", "wanted", "shift", "chunks", "groups", "group_bits"]


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


@triton.jit
def passing(gradient, residual, least, left, block: tl.constexpr):
    """Which of a block's elements pass, as a word of bits per group: that takes few instructions per element."""
    lane = tl.arange(0, GROUP)[None, :]
    at = tl.arange(0, block // GROUP)[:, None] * GROUP + lane
    if left >= block:  # without a mask, loads are 16 bytes wide whatever the bucket's size
        total = tl.load(residual + at) + tl.load(gradient + at)
    else:
        total = tl.load(residual + at, mask=at < left, other=0.0) + tl.load(gradient + at, mask=at < left, other=0.0)
    size = total.to(tl.int32, bitcast=True) & MAGNITUDE
    return tl.sum(tl.where(size >= least, 1 << lane, 0), axis=1)


@triton.jit
def bit_count(word):
    """How many of the low 16 bits are set."""
    word = word - ((word >> 1) & 0x5555)
    word = (word & 0x3333) + ((word >> 2) & 0x3333)
    word = (word + (word >> 4)) & 0x0F0F
    return (word + (word >> 8)) & 31


@triton.jit(do_not_specialize=SIZES)
def offer(
    gradient, residual, threshold, boundaries, heads, pairs, numel, ranks, capacity, row_words,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Pack what passes, as ``select.offer`` does, without accumulating: eight bytes per element are read.

    First every element is compared, then the few that passed are read again and packed, one of each group at a time.
    """
    start = tl.program_id(0).to(tl.int64) * block
    gradient += start
    residual += start
    # Zeros never pass. What poisons the step always does: half of SUMMABLE_BELOW, since a residual may reduce it.
    least = tl.minimum(tl.maximum(tl.load(threshold).to(tl.int32, bitcast=True), 1), SUMMABLE_BELOW - (1 << 23))
    words = passing(gradient, residual, least, numel - start, block)
    row = tl.arange(0, rows)
    ends = tl.load(boundaries + 1 + row, mask=row < ranks, other=numel)
    lowest = tl.sum((ends <= start).to(tl.int32))
    highest = tl.sum((ends < tl.minimum(start + block, numel)).to(tl.int32))
    group = tl.arange(0, block // GROUP) * GROUP
    worst = tl.zeros([block // GROUP], tl.int32)
    for region in range(lowest, highest + 1):  # one region, except for blocks across a boundary
        begin = tl.load(boundaries + region) - start
        end = tl.minimum(tl.load(boundaries + region + 1) - start, block).to(tl.int32)
        before = (1 << tl.minimum(tl.maximum(tl.maximum(begin, 0).to(tl.int32) - group, 0), GROUP)) - 1
        word = words & ~before & ((1 << tl.minimum(tl.maximum(end - group, 0), GROUP)) - 1)
        counts = bit_count(word)
        message = tl.cast(region, tl.int64)
        slot = reserve_slots(heads + message * row_words, counts) - counts
        for _ in range(tl.max(counts)):
            there = word != 0
            at = group + bit_count((word & -word) - 1)
            new = tl.load(gradient + at, mask=there, other=0.0)
            worst = tl.maximum(worst, new.to(tl.int32, bitcast=True) & MAGNITUDE)
            bits = (tl.load(residual + at, mask=there, other=0.0) + new).to(tl.int32, bitcast=True)
            stored = there & (slot < capacity)
            store_pairs(pairs, message, slot, bits, at - begin.to(tl.int32), stored, capacity)
            slot += 1
            word = word & (word - 1)
    if tl.max(worst) >= SUMMABLE_BELOW:
        tl.atomic_or(heads + row.to(tl.int64) * row_words, tl.full([rows], SIGN, tl.int32), mask=row < ranks)


@triton.jit(do_not_specialize=SIZES)
def add(pairs, buffer, capacity, block: tl.constexpr):
    """buffer[position] += value, in any order. Subnormal sums become 0, so they are not applied and stay residuals."""
    slot = tl.program_id(0) * block + tl.arange(0, block)
    bits, position = load_pairs(pairs, tl.program_id(1).to(tl.int64), slot, capacity)
    tl.atomic_add(buffer + position, bits.to(tl.float32, bitcast=True), mask=position >= 0, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def collect(pairs, buffer, counter, sums, positions, capacity, block: tl.constexpr):
    """List each position's sum once, as bits and position: the first lane to read a sum leaves 0 in the buffer."""
    slot = tl.program_id(0) * block + tl.arange(0, block)
    _, position = load_pairs(pairs, tl.program_id(1).to(tl.int64), slot, capacity)
    there = position >= 0
    bits = tl.atomic_xchg(buffer + position, tl.zeros([block], tl.int32), mask=there, sem="relaxed")
    there = there & ((bits & MAGNITUDE) != 0)
    at = reserve_slots(counter, there.to(tl.int32)) - 1
    tl.store(sums + at, bits, mask=there)
    tl.store(positions + at, position, mask=there)


@triton.jit(do_not_specialize=[*SIZES, "limit"])
def select_sums(
    sums, positions, counter, received, threshold_bias, head, pairs, limit, ranks, capacity, row_words,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Pack the sums that pass, as ``select.select_sums`` does.

    The second word of the head is the threshold without this owner's bias, which is applied here.
    """
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < tl.load(counter)
    bits = tl.load(sums + at, mask=inside, other=0)
    position = tl.load(positions + at, mask=inside, other=-1)
    largest = tl.max(bits & MAGNITUDE).to(tl.float32, bitcast=True)
    poisoned = (largest < limit) == 0  # also if it is NaN
    if tl.program_id(0) == 0:
        poisoned = poisoned | (least_count(received, ranks, row_words, rows) < 0)
    if poisoned:
        tl.atomic_or(head, SIGN)
    found = tl.load(head + 1).to(tl.float32, bitcast=True) * tl.exp(tl.load(threshold_bias))
    size = bits & MAGNITUDE
    chosen = (size >= found.to(tl.int32, bitcast=True)) & (size != 0)
    slot = reserve_slots(head, chosen.to(tl.int32)) - 1
    store_pairs(pairs, 0, slot, bits, position, chosen & (slot < capacity), capacity)


@triton.jit(do_not_specialize=SIZES)
def accumulate(heads, gradient, residual, numel, ranks, row_words, rows: tl.constexpr, block: tl.constexpr):
    """residual += gradient and gradient = 0; if poisoned the residual stays and the gradient becomes NaN."""
    poisoned = least_count(heads, ranks, row_words, rows) < 0
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


@triton.jit(do_not_specialize=SIZES)
def apply(
    heads, pairs, boundaries, gradient, divisor, ranks, capacity, row_words,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """gradient (as int32) ← gathered values / divisor; −0 where that underflows, so ``subtract_applied`` sees it.

    A value that rounding has made 0 is not applied.
    """
    row = tl.program_id(1).to(tl.int64)
    bits, position = load_pairs(pairs, row, tl.program_id(0) * block + tl.arange(0, block), capacity)
    applied = valid_pairs(heads, position, ranks, row_words, rows) & ((bits & MAGNITUDE) != 0)
    value = bits.to(tl.float32, bitcast=True)
    new = tl.div_rn(value, tl.zeros_like(value) + divisor).to(tl.int32, bitcast=True)
    new = tl.where((new & MAGNITUDE) == 0, SIGN, new)
    tl.store(gradient + tl.load(boundaries + row) + position, new, mask=applied)


@triton.jit(do_not_specialize=SIZES)
def subtract_applied(
    heads, pairs, boundaries, gradient, residual, ranks, capacity, row_words,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """residual ← residual − what this rank offered, where the gradient (as int32) shows that it was applied."""
    row = tl.program_id(1).to(tl.int64)
    bits, position = load_pairs(pairs, row, tl.program_id(0) * block + tl.arange(0, block), capacity)
    offered = valid_pairs(heads, position, ranks, row_words, rows)
    at = tl.load(boundaries + row) + position
    offered = offered & (tl.load(gradient + at, mask=offered, other=0) != 0)
    left = tl.load(residual + at, mask=offered, other=0.0) - bits.to(tl.float32, bitcast=True)
    tl.store(residual + at, left, mask=offered)


@triton.jit(do_not_specialize=SIZES)
def keep_rounding_error(
    heads, pairs, rounding_error, start, residual, ranks, capacity, row_words,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Add the rounding error of an owner's packed sums to its residual."""
    slot = tl.program_id(0) * block + tl.arange(0, block)
    _, position = load_pairs(pairs, 0, slot, capacity)
    kept = valid_pairs(heads, position, ranks, row_words, rows)
    at = tl.load(start) + position
    new = tl.load(residual + at, mask=kept, other=0.0) + tl.load(rounding_error + slot, mask=kept, other=0.0)
    tl.store(residual + at, new, mask=kept)


@triton.jit(do_not_specialize=SIZES)
def record_step(heads, sent, threshold_bias, offered, applied, rank, memory, ranks, row_words, rows: tl.constexpr):
    """Record a finished step, as ``thresholds.record_step`` does."""
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
    old = tl.load(threshold_bias)
    tl.store(threshold_bias, tl.where(moves, memory * old + (1 - memory) * (mean - own), old))
    tl.store(applied, tl.sum(tl.maximum(counts, 0)))
    tl.store(offered, tl.sum(tl.load(sent + at, mask=inside, other=0) & MAGNITUDE))
