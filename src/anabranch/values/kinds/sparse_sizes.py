"""Sizes and encodings of a sparse exchange's messages. Imports no torch, so planners and simulators can use it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from anabranch.values.kinds.oktopk import OkTopk

Precision = Literal["fp32", "bf16", "int8"]
ENTRY_NBYTES: Mapping[Precision, int] = {"fp32": 8, "bf16": 4, "int8": 3}  # a value and its position or offset
CHUNK_BITS = 16  # a chunk has 65,536 elements, so that an offset in it has 16 bits
GROUP_ENTRIES = 128  # about as many entries share a scale
HEAD_NBYTES = 8  # two int32 at the beginning of a message
CHUNK_NUMEL = 2**20  # elements per chunk of a pass that needs temporaries of 17 bytes per element
WORD_NBYTES = 4  # messages of fixed size are whole words
WIDEST_FACTOR = 4  # a region may be this many times wider than the mean: an owner's buffer has a fixed size
MAX_REGION_NUMEL = 2**31 - 1  # positions within a region are int32
MAX_SELECTED_FACTOR = 2  # an exact exchange offers, and applies, at most this many times k values


class Encoding(NamedTuple):
    """How pairs are encoded: ``encoding.py`` says what a message looks like.

    chunks       of 65,536 elements each, in the widest region
    groups       of elements that share a scale, in the widest region; 0 where values have none
    group_bits   a group has 2 to the power of this many elements
    """

    precision: Precision
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


def encoding_for(precision: Precision, widest_region_numel: int, density: float) -> Encoding:
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
    def of(cls, numel: int, ranks: int, density: float, options: "OkTopk") -> "Sizes":
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
