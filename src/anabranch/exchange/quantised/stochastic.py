"""Randomness of stochastic rounding: bits that depend on a value's position and on a seed, and on nothing else.

They are a hash in integers of 32 bits, so that kernels and torch operations have the same bits, and a run can be
repeated. A hash of this form (shift, multiply, shift) is a permutation of all 32-bit numbers: over many positions every
number is as frequent as any other. Its constants are those of C. Wellons, *Prospecting for hash functions*, 2018.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import unpack
from typing import NamedTuple

import torch

MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))  # as int32


class Seeds(NamedTuple):
    """Seeds, as int32, of the two roundings of one exchange on one rank: as sender and as owner."""

    sender: int
    owner: int

    @classmethod
    def of(cls, rank: int, step: int, names: Sequence[str]) -> "Seeds":
        """The seeds of a rank, in this step, for the bucket of these parameters."""
        text = f"{rank} {step} {' '.join(names)}"
        return cls(*unpack("<2i", blake2b(text.encode(), digest_size=8).digest()))


def random_bits(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Random int32 numbers in the shape of ``like``, by the position of each element."""
    # int32 and not uint32, which torch cannot multiply: products wrap around, and masks make shifts unsigned.
    bits = torch.arange(like.numel(), dtype=torch.int32, device=like.device).bitwise_xor_(seed)
    for shift, multiplier in zip((16, 15), MULTIPLIERS, strict=True):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(multiplier)
    return bits.bitwise_xor_(_shifted(bits, 16)).view(like.shape)


def uniform(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Random multiples of 2⁻²⁴ in [0, 1), float32, in the shape of ``like``."""
    return _shifted(random_bits(like, seed), 8).float().mul_(2.0**-24)


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    return (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)
