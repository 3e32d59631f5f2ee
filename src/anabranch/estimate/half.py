"""Autocast to bfloat16 on tensors without data: torch's own knows CPUs and GPUs only.

While the mode is active, the functions below compute in bfloat16 and in float32, as under ``torch.autocast("cuda",
torch.bfloat16)``; all others take what they are given. As there, a weight is cast once in a forward. Left out are
functions that no known model calls, and those that torch calls below the level of Python.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

IN_BFLOAT16 = frozenset({
    functional.linear, functional.conv1d, functional.conv2d, functional.conv3d, functional.conv_transpose1d,
    functional.conv_transpose2d, functional.conv_transpose3d, functional.prelu,
    torch.conv1d, torch.conv2d, torch.conv3d, torch.matmul, torch.mm, torch.mv, torch.bmm, torch.addmm, torch.addmv,
    torch.addbmm, torch.baddbmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm,
    torch.Tensor.bmm, torch.Tensor.addmm,
})  # fmt: skip
IN_FLOAT32 = frozenset({
    functional.layer_norm, functional.group_norm, functional.softmax, functional.log_softmax, functional.cross_entropy,
    functional.nll_loss, functional.mse_loss, functional.l1_loss, functional.softplus, functional.cosine_similarity,
    torch.softmax, torch.log_softmax, torch.exp, torch.log, torch.pow, torch.rsqrt, torch.reciprocal, torch.cumsum,
    torch.sum, torch.norm, torch.Tensor.softmax, torch.Tensor.log_softmax, torch.Tensor.exp, torch.Tensor.log,
    torch.Tensor.pow, torch.Tensor.__pow__, torch.Tensor.rsqrt, torch.Tensor.sum, torch.Tensor.cumsum,
    torch.Tensor.norm,
})  # fmt: skip


class HalfPrecision(TorchFunctionMode):
    """While active, functions compute in the precision that autocast gives them."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[int, torch.Tensor] = {}  # in bfloat16, by the address of the parameter

    def forget(self) -> None:
        """Drop the weights that were cast: the forward is over."""
        self._weights.clear()

    def lowered(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of float32 in bfloat16, and all others as they are."""
        return [self._lowered(tensor) for tensor in tensors]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in IN_BFLOAT16:
            args, kwargs = (_mapped(self._lowered, part) for part in (args, kwargs or {}))
        elif func in IN_FLOAT32:
            args, kwargs = (_mapped(_raised, part) for part in (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _lowered(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(torch.bfloat16)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor.to(torch.bfloat16)
        return self._weights[id(tensor)]


def _raised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _mapped(cast: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    return tree_map(lambda leaf: cast(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)
