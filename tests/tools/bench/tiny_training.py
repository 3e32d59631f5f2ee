"""A model that trains within a moment on a CPU, for ``python -m benchmarks.lean tools.bench.tiny_training:build:4``."""

import os

import torch
from torch import nn

WIDTH = 64
TOO_LARGE = 13  # a batch for which rank 1 has not enough memory


def build(batch: int, device: torch.device) -> tuple[nn.Module, object]:
    """The model, and its loss as a function of it."""
    if batch == TOO_LARGE and torch.device(device).type != "meta" and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("Tried to allocate more than there is. Less would do.")
    with torch.device(device):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        inputs = torch.ones(batch, WIDTH)
    return model, lambda wrapped: wrapped(inputs).square().mean()
