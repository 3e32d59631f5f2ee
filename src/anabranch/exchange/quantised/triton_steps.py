"""The steps of a quantised exchange as Triton kernels, one launch each; ``torch_steps.py`` says what they compute."""

from typing import Any

import torch

from anabranch.exchange.quantised import kernels
from anabranch.exchange.quantised.torch_steps import Kept
from anabranch.values.kinds.formats import FINITE, NEGLIGIBLE, BlockFormat

VALUES = 2048  # handled by one program


def quantise(
    values: torch.Tensor, residual: torch.Tensor | None, ranks: int, form: BlockFormat, seed: int | None = None
) -> torch.Tensor:
    """The messages to all owners, one row each."""
    region = form.region_numel(len(values), ranks)
    messages = torch.empty(ranks, form.message_nbytes(region), dtype=torch.uint8, device=values.device)
    with_residual = residual is not None
    kernels.quantise[_grid(region, form), ranks](
        values, residual if residual is not None else values, *_views(messages), seed or 0, len(values),
        region // form.block, messages.shape[1], has_residual=with_residual, **_rounding(form, seed), **_blocks(form),
    )  # fmt: skip
    return messages


def reduce(
    received: torch.Tensor, divisor: float, form: BlockFormat, with_error: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This owner's message to everyone; ``with_error`` also the error that its rounding has made in the average."""
    region = form.region_in(received.shape[1])
    message = torch.empty_like(received[0])
    error = torch.empty(region, dtype=torch.float32, device=received.device) if with_error else None
    kernels.reduce[_grid(region, form),](
        *_views(received), *_views(message), error if error is not None else message, 1.0 / divisor, 0,
        len(received), region // form.block, received.shape[1], has_residual=with_error, **_rounding(form, None),
        **_blocks(form),
    )  # fmt: skip
    return message, error


def finish(gathered: torch.Tensor, buffer: torch.Tensor, form: BlockFormat, kept: Kept | None = None) -> None:
    """``buffer`` ← the averages; and a residual ← what is still to be sent."""
    region, with_residual = form.region_in(gathered.shape[1]), kept is not None
    kept = kept or Kept(buffer, gathered, buffer, 0, 1.0)  # the kernel reads none of it
    numbers = gathered[:, form.integers_nbytes(region) :].contiguous().view(torch.bfloat16) if with_residual else None
    poisoned = (~numbers.isfinite().all()).view(1).to(torch.int32) if numbers is not None else buffer
    kernels.finish[_grid(region, form), len(gathered)](
        *_views(gathered), *_views(kept.sent), kept.rounding_error, poisoned, buffer, kept.residual, kept.owner,
        float(kept.divisor), len(buffer), region // form.block, gathered.shape[1],
        limit=torch.finfo(buffer.dtype).max, has_residual=with_residual, **_blocks(form),
    )  # fmt: skip


def _grid(region: int, form: BlockFormat) -> int:
    return -(-region // (VALUES // form.block * form.block))


def _views(messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory of messages as bytes and as int16, for their numbers."""
    return messages, messages.view(-1).view(torch.int16)


def _blocks(form: BlockFormat) -> dict[str, Any]:
    stages = form.block.bit_length() - 1 if form.rotates else 0
    return {
        "bits": form.bits, "integers": form.integers_nbytes(form.block), "block": form.block,
        "rows": VALUES // form.block, "stages": stages, "rotation": form.rotation_scale, "enable_fp_fusion": False,
    }  # fmt: skip


def _rounding(form: BlockFormat, seed: int | None) -> dict[str, Any]:
    return {
        "by_chance": seed is not None, "most": form.most, "negligible": NEGLIGIBLE, "finite": FINITE,
        "binary": form.binary_scales,
    }  # fmt: skip
