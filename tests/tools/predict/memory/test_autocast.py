"""Autocast on tensors without data: the dtypes and the memory that torch's own has on a CPU, and what a GPU's has."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional

from anabranch.lean.activations.recompute import recompute
from anabranch.tools.predict.memory import autocast
from anabranch.tools.predict.memory.autocast import IN_BFLOAT16, IN_FLOAT32, autocast_to_bfloat16
from anabranch.tools.predict.memory.probe import Loss, probe
from tools.predict.memory.models import images

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
    weight, x = nn.Parameter(torch.zeros(8, 8, device=META)), torch.zeros(2, 8, device=META)
    tables = (*IN_BFLOAT16.items(), *IN_FLOAT32.items())
    before = [(owner, name, vars(owner).get(name)) for owner, names in tables for name in names]
    to_bfloat16 = patch.object(autocast, "_to_bfloat16", wraps=autocast._to_bfloat16)
    with to_bfloat16 as cast, autocast_to_bfloat16() as end_forward:
        y = functional.linear(x, weight)
        assert y.dtype == (x @ weight).dtype == torch.addmm(x, x, weight).dtype == torch.bfloat16
        assert functional.layer_norm(y, (8,)).dtype == functional.softmax(y, dim=1).dtype == torch.float32
        assert y.softmax(dim=1).dtype == torch.float32
        assert (y + 1).dtype == functional.gelu(y).dtype == torch.bfloat16
        assert torch.zeros(2, dtype=torch.int64, device=META).sum().dtype == torch.int64
        assert sum(call.args[0] is weight for call in cast.call_args_list) == 1, "a weight is cast once in a forward"
        end_forward()
        functional.linear(x, weight)
        assert sum(call.args[0] is weight for call in cast.call_args_list) == 2
    assert functional.linear(x, weight).dtype == torch.float32
    assert all(vars(owner).get(name) is kept for owner, name, kept in before), "all is as it was"


def test_a_model_needs_less() -> None:
    full, half = probe(images(8)), probe(images(8), half=True)
    assert half.gradients[0].peak_before.activations < full.gradients[0].peak_before.activations
    assert half.weights_nbytes == full.weights_nbytes


def test_what_is_recomputed_has_the_same_precision() -> None:
    def build(device: torch.device) -> tuple[nn.Module, Loss]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).to(device)
        given = torch.zeros(512, 64, device=device)
        recompute(model)
        return model, lambda wrapped: wrapped(given).sum()

    full, half = probe(build), probe(build, half=True)
    peaks = [max(one.peak_before.activations for one in found.gradients) for found in (full, half)]
    assert peaks[1] < peaks[0]
