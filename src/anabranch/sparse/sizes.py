"""What a sparse exchange's messages need, from the sizes alone: known to planners and simulators that have no torch."""

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from anabranch.sparse.options import OkTopk

Precision = Literal["fp32", "bf16"]
NARROW_NUMEL = 2**16 - 1  # position 65,535 means none
HEAD_NBYTES = 8  # two int32 before the pairs of a message
WIDEST = 4  # times the mean region: what an owner's buffer can hold, however unevenly the values lie
MOST_REGION_NUMEL = 2**31 - 1  # positions within a region travel as int32


class Encoding(NamedTuple):
    """A format of pairs: those of a pair's four 16-bit parts travel that are from ``first`` up to ``last``."""

    first: int
    last: int

    @property
    def rounds(self) -> bool:
        """Whether values lose their lower half."""
        return self.first > 0

    @property
    def pair_nbytes(self) -> int:
        """What one pair takes."""
        return 2 * (self.last - self.first)


FP32 = Encoding(0, 4)


def encoding_for(precision: Precision, widest_region_numel: int) -> Encoding:
    """The format of fewest bytes for these values and regions."""
    if precision == "fp32":
        return FP32
    return Encoding(1, 3 if widest_region_numel <= NARROW_NUMEL else 4)


def widest_numel(numel: int, ranks: int) -> int:
    """The most elements that a region of a bucket may have; refuses buckets whose positions would not fit int32."""
    widest = min(numel, WIDEST * -(-numel // ranks))
    if widest > MOST_REGION_NUMEL:
        raise ValueError(
            f"a bucket of {numel} elements on {ranks} ranks has regions of up to {widest} elements, and positions in "
            f"a region are int32: use smaller buckets"
        )
    return widest


class Sizes(NamedTuple):
    """What the host knows of an exchange: how many values to select, slots per message, and the wire's format."""

    k: int
    capacity: int
    wire: Encoding
    everything: bool

    @classmethod
    def of(cls, numel: int, ranks: int, density: float, options: "OkTopk") -> "Sizes":
        """For a bucket of this size; at density 1 regions are uniform and every element has its slot."""
        widest = widest_numel(numel, ranks)
        k = min(numel, max(1, round(density * numel)))
        slots = -(-numel // ranks) if k == numel else min(widest, -(-round(options.capacity_factor * k) // ranks))
        wire = encoding_for(options.wire, widest)
        slots += slots * wire.pair_nbytes % 4 // 2  # messages of whole words: kernels count in their heads
        return cls(k, slots, wire, k == numel)

    @property
    def message_nbytes(self) -> int:
        """What goes to each other rank, once in the all-to-all and once in the all-gather."""
        return HEAD_NBYTES + self.capacity * self.wire.pair_nbytes
