"""How (value, position) pairs travel: as bytes, with the value whole or rounded to bfloat16.

    fp32            8 bytes   value 4, position 4
    bf16            6 bytes   value 2, position 4
    bf16, narrow    4 bytes   value 2, position 2: where no region has more than 65,535 elements

Pairs are int32: the value's bits, and the position in its region, −1 for none. They are read as the machine stores
them, low bytes first, as on every machine that torch runs GPUs on. Rounding happens at selection
(``rounded``), so encoding and decoding lose nothing.
"""

from typing import Literal, NamedTuple

import torch

Precision = Literal["fp32", "bf16"]
NARROW_NUMEL = 2**16 - 1  # position 65,535 means none


class Wire(NamedTuple):
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

    def encode(self, pairs: torch.Tensor) -> torch.Tensor:
        """int32 [..., 2] → uint8 [..., pair_nbytes]."""
        return pairs.view(torch.int16)[..., self.first : self.last].contiguous().view(torch.uint8)

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        """uint8 [..., pair_nbytes] → int32 [..., 2]."""
        halves = message.contiguous().view(torch.int16)
        if not self.rounds:
            return halves.view(torch.int32)
        pairs = torch.zeros(*halves.shape[:-1], 4, dtype=torch.int16, device=halves.device)
        pairs[..., self.first : self.last] = halves
        whole = pairs.view(torch.int32)
        if self.last == 3:
            whole[..., 1].masked_fill_(whole[..., 1] == NARROW_NUMEL, -1)
        return whole


FP32 = Wire(0, 4)
HEAD_NBYTES = 8  # two int32 before the pairs of a message


def wire_for(precision: Precision, widest_region_numel: int) -> Wire:
    """The format of fewest bytes for these values and regions."""
    if precision == "fp32":
        return FP32
    return Wire(1, 3 if widest_region_numel <= NARROW_NUMEL else 4)


def rounded(values: torch.Tensor, wire: Wire) -> torch.Tensor:
    """The float32 values as they will arrive."""
    return values.to(torch.bfloat16).to(torch.float32) if wire.rounds else values


def framed(heads: torch.Tensor, pairs: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Messages uint8 [P, nbytes], of heads int32 [P, 2] and pairs int32 [P, m, 2]."""
    return torch.cat([heads.view(torch.uint8), wire.encode(pairs).flatten(1)], dim=1)


def unframed(messages: torch.Tensor, wire: Wire) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads and pairs again."""
    heads = messages[:, :HEAD_NBYTES].contiguous().view(torch.int32)
    body = messages[:, HEAD_NBYTES:].reshape(len(messages), -1, wire.pair_nbytes)
    return heads, wire.decode(body)


def head(count: torch.Tensor, poison: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    """int32 [..., 2]: a count, −1 if poisoned, and the bits of a float32."""
    counts = torch.where(poison, -1, count.to(torch.int32))
    return torch.stack([counts, extra.view(torch.int32).expand_as(counts)], dim=-1)
