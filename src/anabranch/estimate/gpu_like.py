"""Operations that keep less on a GPU than anywhere else, made to do so also where tensors have no data.

Below autograd nobody can see which device a model is meant for. On a GPU dropout keeps a mask of one byte per element,
elsewhere one of four; attention keeps its inputs and outputs, elsewhere with dropout all its probabilities.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:  # noqa: ARG001
    if not training or p == 0:
        return input
    result: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return result


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa and key.shape[-3] != query.shape[-3]:  # the fused kernels read every key several times
        times = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(times, dim=-3) for t in (key, value))
    mask = attn_mask
    if mask is not None:
        mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype) if mask.dtype == torch.bool else mask
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    operation: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    result: torch.Tensor = operation(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]
    return result


@contextmanager
def gpu_like() -> Iterator[None]:
    """While open, ``torch.nn.functional`` drops out and attends as on a GPU. For tensors without data only."""
    changed: dict[str, Any] = {"dropout": _dropout, "scaled_dot_product_attention": _attention}
    known = {name: getattr(functional, name) for name in changed}
    for name, function in changed.items():
        setattr(functional, name, function)
    try:
        yield
    finally:
        for name, function in known.items():
            setattr(functional, name, function)
