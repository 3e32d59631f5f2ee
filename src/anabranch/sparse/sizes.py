"""Sizes and encodings of a sparse exchange's messages. Imports no torch, so planners and simulators can use it."""

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from anabranch.sparse.options import OkTopk

Precision = Literal["fp32", "bf16"]
NARROW_NUMEL = 2**16 - 1  # in 16 bits the position 65,535 marks an unused slot
HEAD_NBYTES = 8  # two int32 before the pairs of a message
WIDEST_FACTOR = 4  # a region may be this many times wider than the mean: an owner's buffer has a fixed size
MAX_REGION_NUMEL = 2**31 - 1  # positions within a region are sent as int32
MAX_SELECTED_FACTOR = 2  # an exact exchange offers, and applies, at most this many times k values


class Encoding(NamedTuple):
    """How a pair is encoded: of its four 16-bit parts, those from ``first`` up to (not including) ``last`` are sent."""

    first: int
    last: int

    @property
    def rounds(self) -> bool:
        """Whether values are rounded to bfloat16."""
        return self.first > 0

    @property
    def pair_nbytes(self) -> int:
        """Bytes of one pair in a message."""
        return 2 * (self.last - self.first)


FP32 = Encoding(0, 4)


def encoding_for(precision: Precision, widest_region_numel: int) -> Encoding:
    """The encoding of fewest bytes for values of this precision and regions of at most this width."""
    if precision == "fp32":
        return FP32
    return Encoding(1, 3 if widest_region_numel <= NARROW_NUMEL else 4)


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
    encoding      how a pair is encoded
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
        encoding = encoding_for(options.wire, widest)
        slots += slots * encoding.pair_nbytes % 4 // 2  # whole words, because kernels count in the messages' heads
        return cls(k, slots, encoding, k == numel)

    @property
    def message_nbytes(self) -> int:
        """Bytes of one message of fixed size: to each other rank, once in the all-to-all, once in the all-gather."""
        return HEAD_NBYTES + self.capacity * self.encoding.pair_nbytes

    @property
    def max_selected(self) -> int:
        """The most values an exact exchange offers, or applies, when a sampled threshold lets too many pass."""
        return MAX_SELECTED_FACTOR * self.k
