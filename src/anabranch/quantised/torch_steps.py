"""The steps of a quantised exchange in torch operations: on CPUs, and as the twin of the Triton kernels.

Each function computes, bit by bit, what the kernel of the same name does.
"""

import torch

from anabranch.quantised.block_format import FINITE, NEGLIGIBLE, SCALE_NBYTES, BlockFormat, Kept

NAN_BITS = 0x7FC0  # of a bfloat16


def quantise(values: torch.Tensor, residual: torch.Tensor | None, ranks: int, form: BlockFormat) -> torch.Tensor:
    """The messages to all owners, one row each: this rank's values, with its residual added, in the given format."""
    region = form.region_numel(len(values), ranks)
    padded = torch.zeros(ranks * region, dtype=torch.float32, device=values.device)
    padded[: len(values)] = _with_residual(values, residual)
    return _encoded(padded.view(ranks, region), form)


def reduce(received: torch.Tensor, divisor: float, form: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """This owner's message to everyone, and the error that its rounding has made in the average.

    ``received`` has the messages of all ranks, one row each. They are added in the order of ranks.
    """
    average = torch.zeros(1, form.region_of(received), dtype=torch.float32, device=received.device)
    for row in received:
        average = average + _integers_times_scales(row[None], form, 1.0 / divisor)
    message = _rounded(average, form)
    return message[0], _rotated(average - _integers_times_scales(message, form), form)[0]


def finish(gathered: torch.Tensor, buffer: torch.Tensor, form: BlockFormat, kept: Kept | None = None) -> None:
    """``buffer`` ← the averages in the messages of all owners, one row each.

    With a residual, it becomes what this rank offered and did not send, and what rounding as owner has left. If any
    average is NaN then all become NaN, so that nobody applies a part, and the residual stays as it was.
    """
    average = _average(gathered, buffer, form)
    if kept is not None:
        region = form.region_of(gathered)
        poisoned = average.isnan().any()
        left = _with_residual(buffer, kept.residual) - _decoded(kept.sent, form).view(-1)[: len(buffer)]
        mine = left[kept.owner * region : (kept.owner + 1) * region]
        mine += kept.rounding_error[: len(mine)] * kept.divisor
        kept.residual.copy_(torch.where(poisoned, kept.residual, left))
        average = torch.where(poisoned, torch.nan, average)
    buffer.copy_(average)


def _average(gathered: torch.Tensor, buffer: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The averages for ``buffer``, in float32; finite in its dtype, too, where scales were rounded up."""
    limit = torch.finfo(buffer.dtype).max
    return _decoded(gathered, form).view(-1)[: len(buffer)].clamp(-limit, limit)


def _with_residual(values: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return values.float() if residual is None else values.float() + residual


def _encoded(regions: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """Messages of these values, a region in each row."""
    return _rounded(_rotated(regions, form), form)


def _decoded(messages: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The values in these messages, a region in each row."""
    return _rotated(_integers_times_scales(messages, form), form)


def _rotated(regions: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The Walsh-Hadamard transform of every block, where the format has one; it is its own inverse."""
    if not form.rotates:
        return regions
    values = regions.reshape(-1, form.block) * form.rotation_scale  # first, so that sums do not overflow
    for _ in range(form.block.bit_length() - 1):  # sums of neighbours first, then their differences
        left, right = values[:, ::2], values[:, 1::2]
        values = torch.cat([left + right, left - right], dim=1)
    return values.view(regions.shape)


def _rounded(regions: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """Messages of these values, which are rotated where the format says so."""
    blocks = regions.view(len(regions), -1, form.block)
    largest = blocks.abs().amax(dim=2)
    finite = largest <= FINITE  # neither infinite nor NaN
    scales = torch.where(finite & (largest >= NEGLIGIBLE), largest * (1.0 / form.most), 0.0).to(torch.bfloat16)
    wide = scales.float()
    inverses = torch.where(wide > 0, 1.0 / wide, 0.0)
    bits = torch.where(finite, scales.view(torch.int16), NAN_BITS)  # torch makes NaNs of various bits
    integers = torch.round(torch.where(finite[:, :, None], blocks, 0.0) * inverses[:, :, None])
    payload = _packed(integers.to(torch.int8).view(len(regions), -1), form)
    return torch.cat([payload, bits.view(torch.uint8)], dim=1)


def _integers_times_scales(messages: torch.Tensor, form: BlockFormat, factor: float = 1.0) -> torch.Tensor:
    """The values in these messages, times ``factor``, a region in each row; rotated where the format says so."""
    region = form.region_of(messages)
    payload, scales = messages.split([form.payload_nbytes(region), region // form.block * SCALE_NBYTES], dim=1)
    wide = scales.contiguous().view(torch.bfloat16).float() * factor
    integers = _unpacked(payload, form).view(len(messages), -1, form.block)
    values: torch.Tensor = integers * wide[:, :, None]
    return values.view(len(messages), region)


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
