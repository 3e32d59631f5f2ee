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
from anabranch.lean.activations.cost_model import Action, BlockCosts
from anabranch.lean.within import Storage, WithinBudget
from anabranch.planning.memory import Setting, peak_footprint
from anabranch.tools.predict.memory.estimator import ActivationMode, MemoryEstimator
from anabranch.tools.predict.memory.modes import LEAN, LEAN_BF16, LEAN_DENSE, LEAN_HOST, LEAN_INT8
from anabranch.tools.predict.memory.probe import Build, Loss, probe
from ranks import on_ranks

WIDTH, ROWS, LAYERS, RANKS, DENSITY = 128, 2048, 12, 2, 0.1  # an activation has a MiB: smaller ones are not counted
SETTING = Setting(ranks=RANKS, density=DENSITY, blas_workspace_nbytes=0)
MODES = {"in place": LEAN, "host": LEAN_HOST, "bf16": LEAN_BF16, "int8": LEAN_INT8}
ACTIVATIONS: tuple[ActivationMode, ...] = ("keep", "recompute", "offload")


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
    """The action of every block; what cannot be recomputed or offloaded is kept."""
    possible = {"keep": True, "recompute": True, "offload": True}
    found: dict[str, Action] = {}
    for block in blocks:
        possible |= {"recompute": block.recomputes, "offload": block.offloads}
        found[block.name] = activations if possible[activations] else "keep"
    return found


def live(rank: int, compress: bool, clip_norm: float | None) -> dict[str, list[int]]:
    """By how residuals are stored: its predicted peak for each way to treat activations, then with those of a probe."""
    model, loss = build_at(ROWS)(torch.device("cpu"))
    within = ab.Lean(adamw, within="1GiB", clip_norm=clip_norm)
    options = ab.OkTopk(density=DENSITY, warmup_steps=0) if compress else None
    plan = planned() if compress else None
    lean: Any = ab.DataParallel(model, profile_steps=0, plan=plan, compress=options, memory=within)
    for _ in range(3):
        loss(lean).backward()
    assert isinstance(lean._within, WithinBudget)
    seen: Any = lean._within._found
    blocks, link, _ = seen
    found = {}
    storages = lean._held().storages(blocks, 1e9, with_host=True)
    for storage in storages:
        peaks = [storage.peak_nbytes(blocks, link, everywhere(blocks, how)) for how in ACTIVATIONS]
        found[storage.residuals] = [*peaks, *(probed_peak(storage, how, link) for how in ACTIVATIONS)]
    lean.close()
    return found


def probed_peak(storage: Storage, activations: ActivationMode, link: Any) -> int:
    """What Lean would predict if its blocks had shown what a run on tensors without data shows."""
    profile = estimator(activations)._profile(ROWS, activations)
    own = {gradient.name: gradient for gradient in storage.step.profile.gradients}
    seen = tuple(
        replace(own[one.name], peak_before=one.peak_before, when_ready=one.when_ready) for one in profile.gradients
    )
    step = replace(
        storage.step.profile,
        gradients=seen,
        after_backward=profile.after_backward,
        offloaded_nbytes=profile.offloaded_nbytes,
    )
    window_nbytes = max(link.window_nbytes, link.ahead_nbytes)
    return max(
        peak_footprint(step, way, replace(setting, window_nbytes=window_nbytes)).nbytes for way, setting in storage.ways
    )


def estimator(activations: ActivationMode) -> MemoryEstimator:
    return MemoryEstimator(build_at, adamw, activations)


@pytest.mark.parametrize(("compress", "clip_norm"), [(True, None), (True, 1.0), (False, None), (False, 1.0)])
def test_both_say_the_same(compress: bool, clip_norm: float | None) -> None:
    (found, _) = on_ranks(live, RANKS, compress, clip_norm)
    assert list(found) == (list(MODES) if compress else ["in place"])
    buckets = [bucket.names for bucket in planned().buckets] if compress else None
    setting = replace(SETTING, clips=clip_norm is not None, buckets=buckets)
    for number, activations in enumerate(ACTIVATIONS):
        for residuals, peaks in found.items():
            mode = MODES[residuals] if compress else LEAN_DENSE
            printed = estimator(activations).footprints(ROWS, setting, [mode])[mode].nbytes
            assert peaks[len(ACTIVATIONS) + number] == printed, (mode, activations)
            assert peaks[number] == pytest.approx(printed, rel=0.05), (mode, activations)


def test_a_probe_counts_what_is_offloaded() -> None:
    """Every Linear saves its input, which may be a Tanh's output; the loss saves logarithms, classes and a weight."""
    saved_nbytes = (2 * LAYERS + 2) * 4 * ROWS * WIDTH + 8 * ROWS + 4
    assert probe(build_at(ROWS), offload=True).offloaded_nbytes == saved_nbytes
    assert probe(build_at(ROWS)).offloaded_nbytes == 0
