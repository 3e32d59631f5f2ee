"""Formats of messages, and the sizes that follow from them: of quantised exchanges, then of sparse ones.

A quantised message holds a region of float values: integers first, then numbers in bfloat16.

int8 and int4: a block of integers shares a scale, which is its number: its largest magnitude over ``most``, the largest
integer of the format. A block that holds a value which is not finite has the scale NaN, and is NaN when it is read. A
block whose largest magnitude is under ``NEGLIGIBLE`` is sent as zeros: its scale would not be a normal number.

bf16: no integers, and every value is a number. Infinities stay infinite, and only the values concerned are NaN.

``binary_scales``: a scale is the least power of two for which no integer is too large. Such values are the same after
they are read and rounded again, so that they can be stored, read and stored any number of times.

``rotates``: a Walsh-Hadamard transform of each block comes first. It spreads a large value over its block, so that
the others are not rounded to 0. Sums of rotated blocks are rotated sums, so owners need not turn them back.

A sparse message holds pairs of values and positions; ``exchange/sparse/encoding.py`` has its layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from anabranch.values.kinds.names import BF16, INT4, INT8, Wire
from anabranch.values.kinds.options import OkTopk

NEGLIGIBLE = 2.0**-100  # about 8e-31
FINITE = (2.0 - 2.0**-23) * 2.0**127  # the largest float32
NUMBER_NBYTES = 2  # a bfloat16
NAN_BITS = 0x7FC0  # NaN in bfloat16

ENTRY_NBYTES: Mapping[Wire, int] = {"fp32": 8, "bf16": 4, "int8": 3}  # a value and its position or offset
CHUNK_BITS = 16  # a chunk has 65,536 elements, so that an offset in it has 16 bits
GROUP_ENTRIES = 128  # about as many entries share a scale
HEAD_NBYTES = 8  # two int32 at the beginning of a message
CHUNK_NUMEL = 2**20  # elements per chunk of a pass that needs temporaries of 17 bytes per element
WORD_NBYTES = 4  # messages of fixed size are whole words
WIDEST_FACTOR = 4  # a region may be this many times wider than the mean: an owner's buffer has a fixed size
MAX_REGION_NUMEL = 2**31 - 1  # positions within a region are int32
MAX_SELECTED_FACTOR = 2  # an exact exchange offers, and applies, at most this many times k values


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Values of ``bits`` bits, in blocks of ``block`` values, a power of 4 if it ``rotates``."""

    kind: str
    bits: int
    block: int
    rotates: bool = False
    binary_scales: bool = False

    @property
    def scaled(self) -> bool:
        """Whether values are integers with a scale per block; else they are bfloat16 numbers."""
        return self.bits < 16

    @property
    def most(self) -> int:
        """The largest integer; the least one is its negative."""
        most: int = 2 ** (self.bits - 1) - 1
        return most

    @property
    def rotation_scale(self) -> float:
        """The factor that keeps the norm of a rotated block."""
        return 1.0 / isqrt(self.block)

    def region_numel(self, numel: int, ranks: int) -> int:
        """Values of a region, of which every rank owns one: whole blocks, the same number for all ranks."""
        return -(-numel // (ranks * self.block)) * self.block

    def region_in(self, message_nbytes: int) -> int:
        """The number of values in a message of this many bytes."""
        return message_nbytes // self.message_nbytes(self.block) * self.block

    def integers_nbytes(self, region: int) -> int:
        """Bytes of a region's integers."""
        return region * self.bits // 8 if self.scaled else 0

    def message_nbytes(self, region: int) -> int:
        """Bytes of a region's integers and numbers."""
        numbers = region // self.block if self.scaled else region
        return self.integers_nbytes(region) + numbers * NUMBER_NBYTES


FORMATS: Mapping[str, BlockFormat] = {
    BF16: BlockFormat(BF16, 16, 8),  # values have no block in common; 8 of them keep messages aligned
    INT8: BlockFormat(INT8, 8, 128),
    INT4: BlockFormat(INT4, 4, 64, rotates=True),
}
STORED: Mapping[str, BlockFormat] = {  # how residuals may be stored
    BF16: FORMATS[BF16],
    INT8: BlockFormat(INT8, 8, 128, binary_scales=True),
}


class Encoding(NamedTuple):
    """How pairs are encoded: ``encoding.py`` says what a message looks like.

    chunks       of 65,536 elements each, in the widest region
    groups       of elements that share a scale, in the widest region; 0 where values have none
    group_bits   a group has 2 to the power of this many elements
    """

    precision: Wire
    chunks: int
    groups: int
    group_bits: int

    @property
    def rounds(self) -> bool:
        """Whether values are rounded."""
        return self.precision != "fp32"

    @property
    def entry_nbytes(self) -> int:
        """Bytes of one pair in a message."""
        return ENTRY_NBYTES[self.precision]

    @property
    def table_nbytes(self) -> int:
        """Bytes of what comes before the entries: where each chunk but the first begins, and a scale per group."""
        return 4 * (self.chunks - 1) + 2 * self.groups if self.rounds else 0

    def body_nbytes(self, entries: int) -> int:
        """Bytes of a message with this many entries, without its head."""
        return self.table_nbytes + entries * self.entry_nbytes


FP32 = Encoding("fp32", 1, 0, 0)


def encoding_for(precision: Wire, widest_region_numel: int, density: float) -> Encoding:
    """The encoding for regions of at most this width, of whose elements a share of ``density`` is sent."""
    if precision == "fp32":
        return FP32
    chunks = -(-widest_region_numel // (1 << CHUNK_BITS))
    if precision == "bf16":
        return Encoding(precision, chunks, 0, 0)
    group_bits = min(CHUNK_BITS, int(GROUP_ENTRIES / density).bit_length() - 1)
    return Encoding(precision, chunks, -(-widest_region_numel // (1 << group_bits)), group_bits)


def widest_numel(numel: int, ranks: int) -> int:
    """The most elements a region of a bucket may have. Refuses buckets whose positions would not fit into int32."""
    widest = min(numel, WIDEST_FACTOR * -(-numel // ranks))
    if widest > MAX_REGION_NUMEL:
        raise ValueError(
            f"a bucket of {numel} elements on {ranks} ranks has regions of up to {widest} elements, and positions in "
            f"a region are int32 (at most {MAX_REGION_NUMEL}): use smaller buckets"
        )
    return widest


class Sizes(NamedTuple):
    """The sizes of one bucket's exchange, known to the host without looking at the data.

    k             values to select per step
    capacity      slots for pairs in a message of fixed size
    encoding      how pairs are encoded
    selects_all   k is the whole bucket
    """

    k: int
    capacity: int
    encoding: Encoding
    selects_all: bool

    @classmethod
    def of(cls, numel: int, ranks: int, density: float, options: OkTopk) -> "Sizes":
        """For a bucket of ``numel`` elements. At density 1 regions are uniform and every element has a slot."""
        widest = widest_numel(numel, ranks)
        k = min(numel, max(1, round(density * numel)))
        slots = -(-numel // ranks) if k == numel else min(widest, -(-round(options.capacity_factor * k) // ranks))
        encoding = encoding_for(options.wire, widest, k / numel)
        while encoding.body_nbytes(slots) % WORD_NBYTES:
            slots += 1
        return cls(k, slots, encoding, k == numel)

    @property
    def message_nbytes(self) -> int:
        """Bytes of one message of fixed size: to each other rank, once in the all-to-all, once in the all-gather."""
        return HEAD_NBYTES + self.encoding.body_nbytes(self.capacity)

    @property
    def max_selected(self) -> int:
        """The most values an exact exchange offers, or applies, when a sampled threshold lets too many pass."""
        return MAX_SELECTED_FACTOR * self.k
