"""Which operations run the steps of a quantised exchange: torch's, or Triton kernels."""

from types import ModuleType

import torch

from anabranch.exchange.contracts import runs_triton
from anabranch.exchange.quantised import torch_steps


def steps_for(buffer: torch.Tensor) -> ModuleType:
    """``quantise``, ``reduce`` and ``finish``: as kernels on a GPU that has Triton, in torch operations elsewhere."""
    if not runs_triton(buffer):
        return torch_steps
    from anabranch.exchange.quantised import triton_steps  # when a GPU first needs them

    return triton_steps
