"""Autocast on tensors without data: the dtypes and the memory that torch's own has on a CPU, and what a GPU's has."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from anabranch.estimate.half import HalfPrecision
from anabranch.estimate.probe import Loss, probe
from estimate.models import images

META = torch.device("meta")


def layers(batch: int, autocast: bool = False) -> Callable[[torch.device], tuple[nn.Module, Loss]]:
    """What CPUs and GPUs treat alike under autocast: convolutions and matrices in bfloat16, all else as it comes."""

    def build(device: torch.device) -> tuple[nn.Module, Loss]:
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 256), nn.ReLU(),
            nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10),
        ).to(device)  # fmt: skip
        given = torch.zeros(batch, 3, 8, 8, device=device)

        def loss(wrapped: nn.Module) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                result: torch.Tensor = wrapped(given)
            return result.float().square().mean()

        return model, loss

    return build


def test_memory_is_that_of_torchs_own_on_a_cpu() -> None:
    there = probe(layers(64, autocast=True), device=torch.device("cpu"), convolution_workspace=0.0)
    here = probe(layers(64), half=True, convolution_workspace=0.0)
    exact = probe(layers(64), convolution_workspace=0.0)
    peaks = [max(one.peak_before.nbytes for one in found.gradients) for found in (here, there)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    ready = [{one.name: one for one in found.gradients} for found in (here, there, exact)]
    for name, ours in ready[0].items():  # of weight and bias either may come first
        assert ours.nbytes == ready[1][name].nbytes == ready[2][name].nbytes, "gradients are float32"


def test_functions_have_the_precision_of_a_gpu() -> None:
    mode, weight = HalfPrecision(), nn.Parameter(torch.zeros(8, 8, device=META))
    x = torch.zeros(2, 8, device=META)
    with mode:
        y = functional.linear(x, weight)
        assert y.dtype == (x @ weight).dtype == torch.addmm(x, x, weight).dtype == torch.bfloat16
        assert functional.layer_norm(y, (8,)).dtype == functional.softmax(y, dim=1).dtype == torch.float32
        assert (y + 1).dtype == functional.gelu(y).dtype == torch.bfloat16
        assert torch.zeros(2, dtype=torch.int64, device=META).sum().dtype == torch.int64
        (casts,) = mode._weights.values()
        assert casts.dtype == torch.bfloat16, "a weight is cast once"
        mode.forget()
        assert not mode._weights
    assert functional.linear(x, weight).dtype == torch.float32


def test_a_model_needs_less() -> None:
    full, half = probe(images(8)), probe(images(8), half=True)
    assert half.gradients[0].peak_before.activations < full.gradients[0].peak_before.activations
    assert half.weights_nbytes == full.weights_nbytes
