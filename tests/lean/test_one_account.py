"""What ``Lean(within=...)`` predicts and what ``anabranch memory`` prints come from one account of memory.

The live side knows activations by blocks that it has seen; ``anabranch memory`` by a run on tensors without data. All
else is the same: with the same activations both say the same number, and with their own nearly the same.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import anabranch as ab
from anabranch.lean.activations.solver import Action, BlockCosts
from anabranch.lean.memory_budget import ResidualStorage
from anabranch.planning.footprint import Setting, peak_footprint
from anabranch.tools.predict.memory.estimator import ActivationMode, MemoryEstimator
from anabranch.tools.predict.memory.probe import Build, Loss
from anabranch.tools.predict.memory.training_modes import LEAN, LEAN_BF16, LEAN_DENSE, LEAN_INT8
from lean.launches import each_on_ranks

WIDTH, ROWS, LAYERS, RANKS, DENSITY = 128, 2048, 12, 2, 0.1  # an activation has a MiB
SETTING = Setting(ranks=RANKS, density=DENSITY, blas_workspace_nbytes=0)
MODES = {"in place": LEAN, "bf16": LEAN_BF16, "int8": LEAN_INT8}
ACTIVATIONS: tuple[ActivationMode, ...] = ("keep", "recompute")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


class Layered(nn.Module):
    """Layers and a head, with the loss inside, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        classes = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        return cross_entropy(self.head(hidden), classes)


def build_at(batch: int) -> Build:
    def build(device: torch.device) -> tuple[nn.Module, Loss]:
        with device:
            model, inputs = Layered(), torch.ones(batch, WIDTH)
        return model, lambda wrapped: wrapped(inputs)

    return build


def planned() -> ab.Plan:
    """A bucket for every matrix, and one for all vectors."""
    names = [name for name, _ in reversed(list(Layered().named_parameters()))]
    matrices = [ab.Bucket((name,), collective=f"oktopk:{DENSITY}") for name in names if name.endswith("weight")]
    return ab.Plan((*matrices, ab.Bucket(tuple(name for name in names if name.endswith("bias")))))


def everywhere(blocks: list[BlockCosts], activations: ActivationMode) -> dict[str, Action]:
    """The action of every block; what cannot be recomputed is kept."""
    return {block.name: activations if block.recomputes else "keep" for block in blocks}


def live(rank: int, compress: bool, clip_norm: float | None) -> dict[str, list[int]]:
    """By how residuals are stored: its predicted peak for each way to treat activations, then with those of a probe."""
    model, loss = build_at(ROWS)(torch.device("cpu"))
    within = ab.Lean(adamw, within="1GiB", clip_norm=clip_norm)
    options = ab.OkTopk(density=DENSITY, warmup_steps=0) if compress else None
    plan = planned() if compress else None
    lean: Any = ab.DataParallel(model, profile_steps=0, plan=plan, compress=options, memory=within)
    for _ in range(3):
        loss(lean).backward()
    blocks, storages = lean._profiled
    found = {}
    for storage in storages:
        peaks = [storage.peak_nbytes(blocks, everywhere(blocks, how)) for how in ACTIVATIONS]
        found[storage.residuals] = [*peaks, *(probed_peak(storage, how) for how in ACTIVATIONS)]
    lean.close()
    return found


def probed_peak(storage: ResidualStorage, activations: ActivationMode) -> int:
    """What Lean would predict if its blocks had shown what a run on tensors without data shows."""
    profile = estimator(activations)._profile(ROWS, activations)
    own = {gradient.name: gradient for gradient in storage.profile.gradients}
    seen = tuple(
        replace(own[one.name], peak_before=one.peak_before, when_ready=one.when_ready) for one in profile.gradients
    )
    step = replace(
        storage.profile,
        gradients=seen,
        after_backward=profile.after_backward,
    )
    return max(peak_footprint(step, mode, setting).nbytes for mode, setting in storage.exchanges)


def estimator(activations: ActivationMode) -> MemoryEstimator:
    return MemoryEstimator(build_at, adamw, activations)


SCENARIOS = [(True, None), (True, 1.0), (False, None), (False, 1.0)]


@pytest.mark.slow
def test_both_say_the_same() -> None:
    for scenario, answers in zip(SCENARIOS, each_on_ranks(live, RANKS, SCENARIOS), strict=True):
        check_predictions(answers[0], *scenario)


def check_predictions(found: dict[str, list[int]], compress: bool, clip_norm: float | None) -> None:
    assert list(found) == (list(MODES) if compress else ["in place"])
    buckets = [bucket.names for bucket in planned().buckets] if compress else None
    setting = replace(SETTING, clips=clip_norm is not None, buckets=buckets)
    for number, activations in enumerate(ACTIVATIONS):
        for residuals, peaks in found.items():
            mode = MODES[residuals] if compress else LEAN_DENSE
            printed = estimator(activations).footprints(ROWS, setting, [mode])[mode].nbytes
            assert peaks[len(ACTIVATIONS) + number] == printed, (mode, activations)
            assert peaks[number] == pytest.approx(printed, rel=0.05), (mode, activations)
