"""Packing of rows of pairs into messages of fewer bytes, and back, in Triton: the kernels of ``encoding.py``.

    count     how many pairs of a row are in each chunk, which of them each pair is, and the largest magnitude by group
    tables    heads and tables of the messages; the counts become where each chunk begins
    entries   entries of the messages; the rows get the values as they will be decoded
    unpack    rows of pairs from messages

The order of entries within a chunk is that in which atomic operations happen to count them. No value depends on it,
because scales belong to positions. Sums and products must not be fused: launch with ``enable_fp_fusion=False``.
"""

import triton
import triton.language as tl

from anabranch.exchange.sparse.kernels import MAGNITUDE, SIZES, load_pairs, store_pairs
from anabranch.values.kinds import formats
from anabranch.values.kinds.names import INT8

CHUNK_BITS = tl.constexpr(formats.CHUNK_BITS)
HEAD_WORDS = tl.constexpr(formats.HEAD_NBYTES // formats.WORD_NBYTES)
INT8_NBYTES = tl.constexpr(formats.ENTRY_NBYTES["int8"])
INVERSE_MOST = tl.constexpr(1.0 / formats.FORMATS[INT8].most)
NEGLIGIBLE = tl.constexpr(formats.NEGLIGIBLE)
ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it rounds a float32 to an integer, to the even one if in doubt


@triton.jit
def round_bits(bits):
    """A finite float32's bits rounded to bfloat16, ties to even. In integers, so every compiler gives the same bits."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def scale_bits(largest):
    """The bits of a group's scale, a bfloat16 number, from those of its largest magnitude."""
    value = largest.to(tl.float32, bitcast=True)
    scale = tl.where(value >= NEGLIGIBLE, value * INVERSE_MOST, 0.0)
    return round_bits(scale.to(tl.int32, bitcast=True))


@triton.jit
def begin_of_entries(chunks, groups):
    """Where the entries of a message begin, in bytes."""
    return 4 * (HEAD_WORDS + chunks - 1) + 2 * groups


@triton.jit(do_not_specialize=SIZES)
def count(
    pairs, orders, counts, largest, capacity, chunks, groups, group_bits, scaled: tl.constexpr, block: tl.constexpr
):
    """``counts`` and ``largest`` (bits) begin as zeros; ``orders``: how many of its chunk each pair came after."""
    slot = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1).to(tl.int64)
    bits, position = load_pairs(pairs, row, slot, capacity)
    used = position >= 0
    one = tl.full([block], 1, tl.int32)
    order = tl.atomic_add(counts + row * chunks + (position >> CHUNK_BITS), one, mask=used, sem="relaxed")
    tl.store(orders + row * capacity + slot, order, mask=used)
    if scaled:
        tl.atomic_max(largest + row * groups + (position >> group_bits), bits & MAGNITUDE, mask=used, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def tables(
    heads, counts, largest, words, halves, capacity, chunks, groups, row_words,
    scaled: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program a row. ``words`` and ``halves``: the messages' memory as int32 and as int16."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)
    head = tl.load(heads + row * 2 * (capacity + 1) + lane, mask=lane < HEAD_WORDS)
    tl.store(words + row * row_words + lane, head, mask=lane < HEAD_WORDS)
    table = words + row * row_words + HEAD_WORDS
    before = tl.full((), 0, tl.int32)
    for start in range(0, chunks, block):
        at = start + lane
        inside = at < chunks
        here = tl.load(counts + row * chunks + at, mask=inside, other=0)
        begins = before + tl.cumsum(here, 0) - here
        tl.store(counts + row * chunks + at, begins, mask=inside)
        tl.store(table + at - 1, begins, mask=inside & (at > 0))
        before += tl.sum(here)
    if scaled:
        scales = halves + row * 2 * row_words + 2 * (HEAD_WORDS + chunks - 1)
        for start in range(0, groups, block):
            at = start + lane
            bits = scale_bits(tl.load(largest + row * groups + at, mask=at < groups, other=0))
            tl.store(scales + at, (bits >> 16).to(tl.int16), mask=at < groups)


@triton.jit(do_not_specialize=SIZES)
def entries(
    pairs, orders, begins, largest, words, raw, rounding_error, capacity, chunks, groups, group_bits, row_words,
    scaled: tl.constexpr, keeps_error: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """``words`` and ``raw``: the messages' memory, as int32 and as uint8.

    ``rounding_error``, if it is kept, is that of one row; 0 where 0 is sent.
    """
    slot = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1).to(tl.int64)
    bits, position = load_pairs(pairs, row, slot, capacity)
    used = position >= 0
    bits = tl.where(used, bits, 0)
    at = tl.load(begins + row * chunks + (position >> CHUNK_BITS), mask=used, other=0)
    at += tl.load(orders + row * capacity + slot, mask=used, other=0)
    value = bits.to(tl.float32, bitcast=True)
    if scaled:
        group = largest + row * groups + (position >> group_bits)
        scale = scale_bits(tl.load(group, mask=used, other=0)).to(tl.float32, bitcast=True)
        inverse = tl.where(
            scale > 0, tl.div_rn(tl.full([block], 1.0, tl.float32), tl.where(scale > 0, scale, 1.0)), 0.0
        )
        units = value * inverse
        integer = ((tl.where(units == units, units, 0.0) + ROUND) - ROUND).to(tl.int8)  # 0 for NaN, in a poisoned row
        new = (integer.to(tl.float32) * scale).to(tl.int32, bitcast=True)
        entry = raw + row * 4 * row_words + begin_of_entries(chunks, groups) + at.to(tl.int64) * INT8_NBYTES
        tl.store(entry, position.to(tl.uint8), mask=used)
        tl.store(entry + 1, (position >> 8).to(tl.uint8), mask=used)
        tl.store(entry + 2, integer.to(tl.uint8, bitcast=True), mask=used)
    else:
        new = round_bits(bits)
        entry = words + row * row_words + HEAD_WORDS + chunks - 1 + at
        tl.store(entry, new | (position & 0xFFFF), mask=used)
    store_pairs(pairs, row, slot, new, position, used, capacity)
    if keeps_error:
        lost = tl.where((new & MAGNITUDE) == 0, 0.0, value - new.to(tl.float32, bitcast=True))
        tl.store(rounding_error + slot, lost, mask=used)


@triton.jit(do_not_specialize=[*SIZES, "depth"])
def unpack(
    words, halves, raw, heads, pairs, capacity, chunks, groups, group_bits, row_words, depth,
    scaled: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """``depth``: steps of the bisection for the chunk of an entry. A poisoned message has a head and no pairs."""
    slot = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) == 0:
        lane = tl.arange(0, HEAD_WORDS)
        tl.store(heads + row * 2 * (capacity + 1) + lane, tl.load(words + row * row_words + lane))
    used = slot < tl.minimum(tl.load(words + row * row_words), capacity)
    table = words + row * row_words + HEAD_WORDS
    chunk = tl.zeros([block], tl.int32)  # how many of the other chunks begin at this slot or before
    end = chunk + (chunks - 1)
    for _ in range(depth):
        searching = used & (chunk < end)
        middle = (chunk + end) // 2
        begun = tl.load(table + middle, mask=searching, other=0) <= slot
        chunk = tl.where(searching & begun, middle + 1, chunk)
        end = tl.where(searching & ~begun, middle, end)
    if scaled:
        entry = raw + row * 4 * row_words + begin_of_entries(chunks, groups) + slot.to(tl.int64) * INT8_NBYTES
        low, high = tl.load(entry, mask=used, other=0).to(tl.int32), tl.load(entry + 1, mask=used, other=0).to(tl.int32)
        position = (chunk << CHUNK_BITS) | (high << 8) | low
        scales = halves + row * 2 * row_words + 2 * (HEAD_WORDS + chunks - 1)
        scale = tl.load(scales + (position >> group_bits), mask=used, other=0).to(tl.int32) << 16
        integer = tl.load(entry + 2, mask=used, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        bits = (integer * scale.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    else:
        word = tl.load(words + row * row_words + HEAD_WORDS + chunks - 1 + slot, mask=used, other=0)
        position = (chunk << CHUNK_BITS) | (word & 0xFFFF)
        bits = word & -65536
    position = tl.where(used, position, -1)
    store_pairs(pairs, row, slot, tl.where(used, bits, 0), position, slot < capacity, capacity)
