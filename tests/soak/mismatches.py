"""Mismatches: what a victim does differently when it wraps its model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parallel.twins import SCENARIOS, WIDTH
from soak.configurations import Configuration


def _with(configuration: Configuration, **ours: Any) -> Configuration:
    return replace(configuration, ours={**configuration.ours, **ours})


def _other_plan(configuration: Configuration) -> Configuration:
    """Another plan than the others' if they have one; one of its own if they have none."""
    return replace(configuration, given_plan=not configuration.given_plan)


# Other arguments: action → the victim's configuration.
SETTINGS: Mapping[str, Callable[[Configuration], Configuration]] = {
    "policy": lambda own: _with(own, policy=SCENARIOS["goes back"]),
    "compress": lambda own: _with(own, compress=None if own.ours.get("compress") else "bf16"),
    "plan": _other_plan,
    "profile-steps": lambda own: _with(own, profile_steps=3),
    "planner": lambda own: _with(own, planner="mgwfbp" if own.ours.get("planner") != "mgwfbp" else "single"),
    "lanes": lambda own: _with(own, lanes=4),
    "optimizer": lambda own: replace(own, optimizer="adamw" if own.optimizer == "sgd" else "sgd"),
    "rows": lambda own: replace(own, rows=7),
    "seed": lambda own: replace(own, seed=8),
}


def _longer(module: nn.Module) -> None:
    module.add_module("more", nn.Linear(WIDTH, WIDTH))


def _double(module: nn.Module) -> None:
    module.to(torch.float64)


def _reshaped(module: nn.Module) -> None:
    last = list(module.parameters())[-1]
    last.data = torch.zeros(last.numel() + 1)


def _reordered(module: nn.Module) -> None:
    parts = list(module._modules.items())
    module._modules.clear()
    module._modules.update(dict(reversed(parts)))


def _frozen(module: nn.Module) -> None:
    next(module.parameters()).requires_grad_(False)


# Another model: action → a change of the victim's module before it is wrapped.
MODULES: Mapping[str, Callable[[nn.Module], None]] = {
    "model": _longer,
    "dtype": _double,
    "shapes": _reshaped,
    "order": _reordered,
    "frozen": _frozen,
}
