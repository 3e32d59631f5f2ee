"""How (value, position) pairs travel: as bytes, with the value whole or rounded to bfloat16.

    fp32            8 bytes   value 4, position 4
    bf16            6 bytes   value 2, position 4
    bf16, narrow    4 bytes   value 2, position 2: where no region has more than 65,535 elements

Pairs are int32: the value's bits, and the position in its region, −1 for none. They are read as the machine stores
them, low bytes first, as on every machine that torch runs GPUs on. Rounding happens at selection
(``rounded``), so encoding and decoding lose nothing.
"""

import torch

from anabranch.sparse.sizes import HEAD_NBYTES, NARROW_NUMEL, Encoding


def encode(pairs: torch.Tensor, wire: Encoding) -> torch.Tensor:
    """int32 [..., 2] → uint8 [..., pair_nbytes]."""
    return pairs.view(torch.int16)[..., wire.first : wire.last].contiguous().view(torch.uint8)


def decode(message: torch.Tensor, wire: Encoding) -> torch.Tensor:
    """uint8 [..., pair_nbytes] → int32 [..., 2]."""
    halves = message.contiguous().view(torch.int16)
    if not wire.rounds:
        return halves.view(torch.int32)
    pairs = torch.zeros(*halves.shape[:-1], 4, dtype=torch.int16, device=halves.device)
    pairs[..., wire.first : wire.last] = halves
    whole = pairs.view(torch.int32)
    if wire.last == 3:
        whole[..., 1].masked_fill_(whole[..., 1] == NARROW_NUMEL, -1)
    return whole


def rounded(values: torch.Tensor, wire: Encoding) -> torch.Tensor:
    """The float32 values as they will arrive."""
    return values.to(torch.bfloat16).to(torch.float32) if wire.rounds else values


def framed(heads: torch.Tensor, pairs: torch.Tensor, wire: Encoding) -> torch.Tensor:
    """Messages uint8 [P, nbytes], of heads int32 [P, 2] and pairs int32 [P, m, 2]."""
    return torch.cat([heads.view(torch.uint8), encode(pairs, wire).flatten(1)], dim=1)


def unframed(messages: torch.Tensor, wire: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads and pairs again."""
    heads = messages[:, :HEAD_NBYTES].contiguous().view(torch.int32)
    body = messages[:, HEAD_NBYTES:].reshape(len(messages), -1, wire.pair_nbytes)
    return heads, decode(body, wire)


def head(count: torch.Tensor, poison: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    """int32 [..., 2]: a count, −1 if poisoned, and the bits of a float32."""
    counts = torch.where(poison, -1, count.to(torch.int32))
    return torch.stack([counts, extra.view(torch.int32).expand_as(counts)], dim=-1)
