"""Encoding of (value, position) pairs as bytes, with values in float32 or rounded to bfloat16.

    fp32            8 bytes   value 4, position 4
    bf16            6 bytes   value 2, position 4
    bf16, narrow    4 bytes   value 2, position 2: where no region has more than 65,535 elements

A pair is two int32: the bits of the value, and its position in the region, −1 in an unused slot. Byte order is the
machine's own, which is little-endian wherever torch runs GPUs. Values are rounded at selection (``round_values``), so
encoding and decoding lose nothing.
"""

import torch

from anabranch.sparse.sizes import HEAD_NBYTES, NARROW_NUMEL, Encoding


def encode(pairs: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """int32 [..., 2] → uint8 [..., pair_nbytes]."""
    return pairs.view(torch.int16)[..., encoding.first : encoding.last].contiguous().view(torch.uint8)


def decode(message: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """uint8 [..., pair_nbytes] → int32 [..., 2]."""
    halves = message.contiguous().view(torch.int16)
    if not encoding.rounds:
        return halves.view(torch.int32)
    pairs = torch.zeros(*halves.shape[:-1], 4, dtype=torch.int16, device=halves.device)
    pairs[..., encoding.first : encoding.last] = halves
    whole = pairs.view(torch.int32)
    if encoding.last == 3:
        whole[..., 1].masked_fill_(whole[..., 1] == NARROW_NUMEL, -1)
    return whole


def round_values(values: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """The float32 values as the receiver will decode them."""
    return values.to(torch.bfloat16).to(torch.float32) if encoding.rounds else values


def frame_messages(heads: torch.Tensor, pairs: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Messages uint8 [P, nbytes] from heads int32 [P, 2] and pairs int32 [P, m, 2]."""
    return torch.cat([heads.view(torch.uint8), encode(pairs, encoding).flatten(1)], dim=1)


def unframe_messages(messages: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads int32 [P, 2] and pairs int32 [P, m, 2] of messages uint8 [P, nbytes]."""
    heads = messages[:, :HEAD_NBYTES].contiguous().view(torch.int32)
    body = messages[:, HEAD_NBYTES:].reshape(len(messages), -1, encoding.pair_nbytes)
    return heads, decode(body, encoding)


def message_head(count: torch.Tensor, poison: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    """int32 [..., 2]: the count, or −1 where ``poison`` is set, and the bits of the float32 ``extra``."""
    counts = torch.where(poison, -1, count.to(torch.int32))
    return torch.stack([counts, extra.view(torch.int32).expand_as(counts)], dim=-1)
