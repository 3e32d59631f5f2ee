"""A model's parameters: which must be the same on all ranks, which are trained, and their parts of flat buckets."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def ignored_names(module: nn.Module) -> Collection[str]:
    """Names of the parameters and buffers that DDP does not synchronise; torch's own attribute lists them."""
    names: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def model_parts(module: nn.Module, frozen: bool = True, buffers: bool = True) -> dict[str, str]:
    """A description of each synchronised parameter and buffer, by name; ranks with equal parts can train together.

    ``frozen`` and ``buffers``: whether parameters without a gradient, and buffers, are synchronised, too.
    """
    parameters = {
        name: "uninitialized"  # DDP refuses it
        if is_lazy(p)
        else f"{tuple(p.shape)} {p.dtype} grad={p.requires_grad} strides {p.stride()}"
        for name, p in module.named_parameters()
        if frozen or p.requires_grad
    }
    states = {name: f"buffer {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()} if buffers else {}
    ignored = ignored_names(module)
    return {name: part for name, part in (parameters | states).items() if name not in ignored}


@contextmanager
def trained_only(module: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context in which the module trains these parameters and no others, whatever is frozen now."""
    trained = set(parameters)
    changed = [p for p in module.parameters() if p.requires_grad != (p in trained)]
    for parameter in changed:
        parameter.requires_grad_(parameter in trained)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(parameter not in trained)


def shaped(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``piece``, one parameter's part of a flat bucket, as a view of the parameter's shape.

    Elements are in the order of the parameter's own memory, as in DDP's buckets: a channels-last parameter gets
    channels-last strides. A parameter that is not dense in memory (an expanded one, say) gets contiguous strides.
    """
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return piece.as_strided(parameter.shape, parameter.stride())
    return piece.view(parameter.shape)
