"""Formats of messages: how a region of float values becomes bytes. Integers first, then numbers in bfloat16.

int8 and int4: a block of integers shares a scale, which is its number: its largest magnitude over ``most``, the largest
integer of the format. A block that holds a value which is not finite has the scale NaN, and is NaN when it is read. A
block whose largest magnitude is under ``NEGLIGIBLE`` is sent as zeros: its scale would not be a normal number.

bf16: no integers, and every value is a number. Infinities stay infinite, and only the values concerned are NaN.

``binary_scales``: a scale is the least power of two for which no integer is too large. Such values are the same after
they are read and rounded again, so that they can be stored, read and stored any number of times.

``rotates``: a Walsh-Hadamard transform of each block comes first. It spreads a large value over its block, so that
the others are not rounded to 0 beside it. Sums of rotated blocks are rotated sums, so owners need not turn them back.
"""

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from anabranch.values.kinds import names as kinds

if TYPE_CHECKING:  # sizes are also for planners and simulators, which import no torch
    import torch

NEGLIGIBLE = 2.0**-100  # about 8e-31
FINITE = (2.0 - 2.0**-23) * 2.0**127  # the largest float32
NUMBER_NBYTES = 2  # of a bfloat16
NAN_BITS = 0x7FC0  # of a bfloat16


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
        """By which a rotated block is multiplied, so that its norm stays the same."""
        return 1.0 / isqrt(self.block)

    def region_numel(self, numel: int, ranks: int) -> int:
        """Values of a region, of which every rank owns one: whole blocks, the same number for all ranks."""
        return -(-numel // (ranks * self.block)) * self.block

    def region_of(self, messages: "torch.Tensor") -> int:
        """The number of values in each of these messages, one in each row."""
        return messages.shape[-1] // self.message_nbytes(self.block) * self.block

    def integers_nbytes(self, region: int) -> int:
        """Bytes of a region's integers."""
        return region * self.bits // 8 if self.scaled else 0

    def message_nbytes(self, region: int) -> int:
        """Bytes of a region's integers and numbers."""
        numbers = region // self.block if self.scaled else region
        return self.integers_nbytes(region) + numbers * NUMBER_NBYTES


class Kept(NamedTuple):
    """What a rank with a residual keeps from the first steps of an exchange until ``finish``.

    sent             its own messages to all owners
    rounding_error   the error that it has made as owner, in the average
    owner            the region that it owns: its rank
    """

    residual: "torch.Tensor"
    sent: "torch.Tensor"
    rounding_error: "torch.Tensor"
    owner: int
    divisor: float


BF16 = BlockFormat(kinds.BF16, 16, 8)  # values have no block in common; 8 of them keep messages aligned
INT8 = BlockFormat(kinds.INT8, 8, 128)
INT4 = BlockFormat(kinds.INT4, 4, 64, rotates=True)
FORMATS = {one.kind: one for one in (BF16, INT8, INT4)}
STORED = {kinds.BF16: BF16, kinds.INT8: BlockFormat(kinds.INT8, 8, 128, binary_scales=True)}  # of residuals
