"""Blocks that are run twice, to be measured or recomputed, leave everything as one run would; or they are refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.lean.activations.profiler import ManagedActivations
from anabranch.lean.activations.solver import BudgetError
from lean.activations.networks import SelfChoosing, one_thread

__all__ = ["one_thread"]

modes = pytest.mark.parametrize("mode", ["recompute", "auto"])


def managed_by(mode: str, model: nn.Module) -> ManagedActivations:
    return SelfChoosing(model, 1 << 30) if mode == "auto" else ManagedActivations(model, "recompute")


class Smoothed(nn.Module):
    """Has a memory of its own, which what it computes depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(given)
        with torch.no_grad():
            self.mean.lerp_(result.mean(0), 0.1)
        return torch.tanh(result - self.mean)


class Blocks(nn.Module):
    """Three blocks, called in some way."""

    def __init__(self, block: Callable[[], nn.Module], call: Callable[[nn.Module, Any], Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.call = call or (lambda layer, value: layer(value))

    def forward(self, value: Any) -> Any:
        for layer in self.layers:
            value = self.call(layer, value)
        return value


def spectral() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh())


def instance() -> nn.Module:
    norm = nn.InstanceNorm1d(4, track_running_stats=True)
    return nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), norm, nn.Tanh())


def trained(model: nn.Module, given: torch.Tensor, mode: str | None) -> dict[str, torch.Tensor]:
    """All gradients and buffers after four steps."""
    managed = None if mode is None else managed_by(mode, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(given).square().sum().backward()
        optimizer.step()
    if managed is not None:
        managed.undo()
    return {**{name: p.detach() for name, p in model.named_parameters()}, **dict(model.named_buffers())}


@modes
@pytest.mark.parametrize("block", [Smoothed, spectral, instance])
def test_state_that_changes_in_forward(block: Callable[[], nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    model = Blocks(block)
    given = torch.randn(8, 4, 16) if block is instance else torch.randn(8, 16)
    plain = trained(copy.deepcopy(model), given, None)
    if mode == "recompute" and block is not instance:
        with pytest.raises(ValueError, match=r"block 'layers.0' changes its buffer '.*' in forward"):
            trained(model, given, mode)
        return
    ours = trained(model, given, mode)
    assert all(torch.equal(plain[name], value) for name, value in ours.items())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, *, given: dict[str, Any]) -> torch.Tensor:
        given["seen"].append(given["value"].detach())
        return torch.tanh(self.linear(given["value"]))


@modes
def test_lists_that_blocks_fill_are_filled_once(mode: str) -> None:
    seen: list[torch.Tensor] = []
    model = Blocks(Named, lambda layer, value: layer(given={"value": value, "seen": seen}))
    trained(model, torch.randn(8, 16), mode)
    assert len(seen) == 4 * 3


@modes
def test_hooks_see_every_output_of_a_forward_once(mode: str) -> None:
    seen: list[int] = []

    def note(module: nn.Module, args: object, output: object) -> None:
        seen.append(1)

    model = Blocks(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    for layer in model.layers:
        layer.get_submodule("0").register_forward_hook(note)
    managed = managed_by(mode, model)
    for _ in range(4):
        seen.clear()
        output = model(torch.randn(8, 16))
        assert len(seen) == 3
        output.sum().backward()  # in which hooks see what is recomputed, as with torch's own checkpoint
    managed.undo()


def test_what_is_changed_after_a_block_had_it_by_name_is_refused() -> None:
    def changing(layer: nn.Module, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(given={"value": value, "seen": []})
        value += result
        return value

    model = Blocks(Named, changing)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(model, torch.randn(8, 16).requires_grad_().clone(), "recompute")


def test_frozen_blocks_and_missing_ones_are_profiled_too() -> None:
    def call(layer: nn.Module | None, value: torch.Tensor) -> Any:
        return value if layer is None else layer(value)

    blocks = Blocks(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()), call)
    blocks.layers.append(None)  # type: ignore[arg-type]
    blocks.requires_grad_(False)
    model = nn.Sequential(blocks, nn.Linear(16, 4))
    managed = SelfChoosing(model, 1 << 30)
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
    assert managed.agreed


class Again(nn.Module):
    """One layer, many times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())])

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            given = self.layers[0](given)
        return given


def test_a_layer_that_runs_again_is_recomputed_one_run_at_a_time() -> None:
    whole = 32 * 64 * 4  # bytes of an activation
    chosen: dict[int, str] = {}
    for budget in (60 * whole, 24 * whole, 4 * whole):
        model = Again()
        managed = SelfChoosing(model, budget)
        try:
            for _ in range(3):
                model(torch.randn(32, 64)).sum().backward()
            assert managed.agreed
            chosen[budget // whole] = managed.agreed["actions"]["layers.0"]
        except BudgetError:
            chosen[budget // whole] = "none"
    assert chosen[60] == "keep" and chosen[24] not in ("keep", "none") and chosen[4] == "none"
