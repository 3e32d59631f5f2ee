"""The steps of a quantised exchange in torch operations: on CPUs, and as the twin of the Triton kernels.

Each function computes, bit by bit, what the kernel of the same name does, but for the payload of NaN.

Gradients are rounded to the nearest. Residuals that are stored in few bits (``PackedResidual``) are rounded up or down
at random, by bits that depend on a value's position and on a seed alone: a hash in integers of 32 bits, so that kernels
and torch operations have the same bits, and a run can be repeated. A hash of this form (shift, multiply, shift) is a
permutation of all 32-bit numbers: over many positions every number is as frequent as any other. Its constants are those
of C. Wellons, *Prospecting for hash functions*, 2018.
"""

from typing import NamedTuple

import torch

from anabranch.values.kinds.formats import FINITE, NAN_BITS, NEGLIGIBLE, BlockFormat

MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))  # as int32


class Kept(NamedTuple):
    """What a rank with a residual keeps from the first steps of an exchange until ``finish``.

    sent             its own messages to all owners
    rounding_error   the error that it has made as owner, in the average
    owner            the region that it owns: its rank
    """

    residual: torch.Tensor
    sent: torch.Tensor
    rounding_error: torch.Tensor
    owner: int
    divisor: float


def quantise(
    values: torch.Tensor, residual: torch.Tensor | None, ranks: int, form: BlockFormat, seed: int | None = None
) -> torch.Tensor:
    """The messages to all owners, one row each: this rank's values, with its residual added, in the given format.

    ``seed``: of the random bits by which values are rounded; None rounds to the nearest.
    """
    region = form.region_numel(len(values), ranks)
    dtype = torch.float32 if form.scaled or seed is not None else torch.bfloat16  # then this copy is the rounding
    padded = torch.empty(ranks * region, dtype=dtype, device=values.device)
    padded[: len(values)] = values if residual is None else values.float() + residual
    padded[len(values) :] = 0.0
    return _rounded(_rotated(padded.view(ranks, region), form), form, seed)


def reduce(
    received: torch.Tensor, divisor: float, form: BlockFormat, with_error: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This owner's message to everyone; ``with_error`` also the error that its rounding has made in the average.

    ``received`` has the messages of all ranks, one row each. They are added in the order of ranks.
    """
    average = torch.zeros(1, form.region_in(received.shape[1]), dtype=torch.float32, device=received.device)
    for row in received:
        average += _unrounded(row[None], form, 1.0 / divisor)
    message = _rounded(average, form)
    return message[0], _rotated(average - _unrounded(message, form), form)[0] if with_error else None


def finish(gathered: torch.Tensor, buffer: torch.Tensor, form: BlockFormat, kept: Kept | None = None) -> None:
    """``buffer`` ← the averages in the messages of all owners, one row each.

    With a residual, it becomes what this rank offered and did not send, and what rounding as owner has left. If any
    average is not finite then all become NaN, so that nobody applies a part, and the residual stays as it was.
    """
    average = _decoded(gathered, form, len(buffer))
    if form.scaled:  # scales were rounded up: the largest values would overflow
        limit = torch.finfo(buffer.dtype).max
        average = average.clamp(-limit, limit)
    if kept is not None:
        region = form.region_in(gathered.shape[1])
        poisoned = ~average.isfinite().all()
        left = buffer.float() + kept.residual - _decoded(kept.sent, form, len(buffer))
        mine = left[kept.owner * region : (kept.owner + 1) * region]
        mine += kept.rounding_error[: len(mine)] * kept.divisor
        kept.residual.copy_(torch.where(poisoned, kept.residual, left))
        average = torch.where(poisoned, torch.nan, average)
    buffer.copy_(average)


def _decoded(messages: torch.Tensor, form: BlockFormat, numel: int) -> torch.Tensor:
    """The first ``numel`` values of these messages."""
    return _rotated(_unrounded(messages, form), form).view(-1)[:numel]


def _rotated(regions: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The Walsh-Hadamard transform of every block, where the format has one; it is its own inverse."""
    if not form.rotates:
        return regions
    values = regions.reshape(-1, form.block) * form.rotation_scale  # first, so that sums do not overflow
    for _ in range(form.block.bit_length() - 1):  # sums of neighbours first, then their differences
        left, right = values[:, ::2], values[:, 1::2]
        values = torch.cat([left + right, left - right], dim=1)
    return values.view(regions.shape)


def _rounded(regions: torch.Tensor, form: BlockFormat, seed: int | None = None) -> torch.Tensor:
    """Messages of these values, a region in each row, which are rotated where the format says so."""
    if not form.scaled:
        return _as_bfloat16(regions, seed).view(torch.uint8)
    blocks = regions.view(len(regions), -1, form.block)
    largest = blocks.abs().amax(dim=2)
    finite = largest <= FINITE  # neither infinite nor NaN
    scales = _scales(torch.where(finite & (largest >= NEGLIGIBLE), largest, 0.0), form)
    wide = scales.float()
    inverses = torch.where(wide > 0, 1.0 / wide, 0.0)
    bits = torch.where(finite, scales.view(torch.int16), NAN_BITS)  # torch makes NaNs of various bits
    scaled = torch.where(finite[:, :, None], blocks, 0.0) * inverses[:, :, None]
    integers = torch.round(scaled) if seed is None else _rounded_at_random(scaled, form.most, seed)
    payload = _packed(integers.to(torch.int8).view(len(regions), -1), form)
    return torch.cat([payload, bits.view(torch.uint8)], dim=1)


def _unrounded(messages: torch.Tensor, form: BlockFormat, factor: float = 1.0) -> torch.Tensor:
    """The values in these messages, times ``factor``, a region in each row; rotated where the format says so."""
    if not form.scaled:
        values = messages.view(torch.bfloat16)
        return values if factor == 1.0 else values.float().mul_(factor)
    region = form.region_in(messages.shape[1])
    payload, scales = messages.tensor_split([form.integers_nbytes(region)], dim=1)
    wide = scales.contiguous().view(torch.bfloat16).float() * factor
    integers = _unpacked(payload, form).view(len(messages), -1, form.block)
    return (integers * wide[:, :, None]).view(len(messages), region)


def _as_bfloat16(values: torch.Tensor, seed: int | None) -> torch.Tensor:
    """Values in bfloat16: to the nearest, or random bits are added before the lower half is cut off."""
    if seed is None:
        return values.to(torch.bfloat16)
    bits = (values.view(torch.int32) + (random_bits(values, seed) & 0xFFFF)) >> 16
    return torch.where(values.isnan(), NAN_BITS, bits).to(torch.int16).view(torch.bfloat16)


def _scales(largest: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The scales of blocks with these largest magnitudes, in bfloat16; 0 of a block of zeros."""
    if form.binary_scales:  # the exponent of largest / most, rounded up: most is just below a power of two
        exponent = ((largest.view(torch.int32) + (1 << (25 - form.bits)) - 1) >> 23) - (form.bits - 2)
        return torch.where(largest > 0, (exponent << 23).view(torch.float32), 0.0).to(torch.bfloat16)
    return (largest * (1.0 / form.most)).to(torch.bfloat16)


def _rounded_at_random(values: torch.Tensor, most: int, seed: int) -> torch.Tensor:
    """The integer above or below each value: the one above with the probability of the fraction."""
    low = values.floor()
    return (low + (_uniform(values, seed) < values - low)).clamp(-most, most)  # 1 / scale may be a bit too large


def _packed(integers: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """Bytes of int8 values: two of 4 bits in each byte, the first one in the lower half."""
    if form.bits == 8:
        return integers.view(torch.uint8)
    shifted = (integers + 8).view(torch.uint8)
    return shifted[:, ::2] | (shifted[:, 1::2] << 4)


def _unpacked(payload: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The int8 values in these bytes, as float32."""
    if form.bits == 8:
        return payload.view(torch.int8).float()
    halves = torch.stack([payload & 15, payload >> 4], dim=2).view(len(payload), -1)
    return halves.float() - 8.0


def random_bits(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Random int32 numbers in the shape of ``like``, by the position of each element."""
    # int32 and not uint32, which torch cannot multiply: products wrap around, and masks make shifts unsigned.
    bits = torch.arange(like.numel(), dtype=torch.int32, device=like.device).bitwise_xor_(seed)
    for shift, multiplier in zip((16, 15), MULTIPLIERS, strict=True):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(multiplier)
    return bits.bitwise_xor_(_shifted(bits, 16)).view(like.shape)


def _uniform(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Random multiples of 2⁻²⁴ in [0, 1), float32, in the shape of ``like``."""
    return _shifted(random_bits(like, seed), 8).float().mul_(2.0**-24)


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    return (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)
