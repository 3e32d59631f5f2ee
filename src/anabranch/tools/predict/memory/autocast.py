"""Autocast to bfloat16 on tensors without data: torch's own knows CPUs and GPUs only.

The functions below compute in bfloat16 and in float32, as under ``torch.autocast("cuda", torch.bfloat16)``; all others
take what they are given. As there, a weight is cast once in a forward. Left out are functions that no known model
calls, those that torch calls below the level of Python, and names that a model's file has imported before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

Cast = Callable[[torch.Tensor], torch.Tensor]

IN_BFLOAT16: Mapping[Any, Sequence[str]] = {
    functional: (
        "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu",
        "scaled_dot_product_attention",
    ),
    torch: ("conv1d", "conv2d", "conv3d", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "einsum"),
    torch.Tensor: ("matmul", "__matmul__", "mm", "bmm", "addmm"),
}  # fmt: skip
IN_FLOAT32: Mapping[Any, Sequence[str]] = {
    functional: (
        "layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "l1_loss",
        "softplus", "cosine_similarity",
    ),
    torch: ("softmax", "log_softmax", "exp", "log", "pow", "rsqrt", "reciprocal", "cumsum", "sum", "norm"),
    torch.Tensor: ("softmax", "log_softmax", "exp", "log", "pow", "__pow__", "rsqrt", "sum", "cumsum", "norm"),
}  # fmt: skip


@contextmanager
def autocast_to_bfloat16() -> Iterator[Callable[[], None]]:
    """Cast while it is open, also where backward recomputes; yields a function that drops the weights that were cast.

    Call that function at the end of a forward, where torch's autocast drops them.
    """
    cast_weight = cache(_to_bfloat16)

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        return cast_weight(tensor) if isinstance(tensor, nn.Parameter) else _to_bfloat16(tensor)

    with ExitStack() as stack:
        for table, cast in ((IN_BFLOAT16, lower), (IN_FLOAT32, _to_float32)):
            for owner, name in ((owner, name) for owner, names in table.items() for name in names):
                stack.enter_context(patch.object(owner, name, _casting(getattr(owner, name), cast)))
        yield cast_weight.cache_clear


def _casting(function: Callable[..., Any], cast: Cast) -> Callable[..., Any]:
    @wraps(function)
    def casting(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        return function(*args, **kwargs)

    return casting


def _to_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of float32 in bfloat16, any other as it is."""
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of bfloat16 in float32, any other as it is."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
