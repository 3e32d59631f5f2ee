"""Which operations run the steps of a quantised exchange: torch's, or Triton kernels on a GPU that has Triton."""

from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from anabranch.exchange.quantised import torch_steps
from anabranch.exchange.quantised.torch_steps import Kept
from anabranch.values.kinds.formats import BlockFormat


class QuantisedSteps(Protocol):
    """The three steps, in torch operations or as kernels."""

    def quantise(
        self,
        values: torch.Tensor,
        residual: torch.Tensor | None,
        ranks: int,
        form: BlockFormat,
        seed: int | None = None,
    ) -> torch.Tensor: ...

    def reduce(
        self, received: torch.Tensor, divisor: float, form: BlockFormat, with_error: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def finish(
        self, gathered: torch.Tensor, buffer: torch.Tensor, form: BlockFormat, kept: Kept | None = None
    ) -> None: ...


def steps_for(buffer: torch.Tensor) -> QuantisedSteps:
    """Triton kernels on a GPU that has them, torch operations elsewhere."""
    kernels = _triton_steps() if buffer.is_cuda else None
    return torch_steps if kernels is None else kernels


@cache
def _triton_steps() -> Any:
    """The steps as kernels, imported when a GPU first needs them; None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    from anabranch.exchange.quantised import triton_steps

    return triton_steps
