"""BatchNorm's buffers: every forward sees what DDP would show it, whatever the program did to them in between."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel.twins import WIDTH, Feature, Model, Outcome, batch, run
from ranks import cases_on_ranks


class Normed(nn.Module):
    """Running statistics, a counter, a float64 buffer and an empty one."""

    empty: torch.Tensor
    tally: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("tally", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.tally += x.double().mean()
        result: torch.Tensor = self.b(self.norm(self.a(x)))
        total: torch.Tensor = self.tally.sum()
        return result + total.float()


class Recomputed(Normed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


def train(model: Model, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def alone(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    return train(model, optimizer, step)


def with_evaluation(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """Two evaluations after every second step: the first one synchronises, the second does not."""
    loss = train(model, optimizer, step)
    if step % 2:
        model.eval()
        with torch.no_grad():
            outputs = [model(batch(step + 300)), model(batch(step + 400))]
        model.train()
        return torch.stack([loss, *(output.mean() for output in outputs)])
    return loss


def with_differentiable_evaluation(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """Evaluation that forgot no_grad(): a forward that is never differentiated."""
    model.eval()
    shown = model(batch(step + 300)).mean().detach()
    model.train()
    return torch.stack([shown, train(model, optimizer, step)])


def rank_0_changes(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """In place, after the buffers were sent: everyone must see it at the next forward."""
    if step % 3 == 0 and dist.get_rank() == 0:
        model.module.norm.running_mean.add_(step)
    return train(model, optimizer, step)


def rank_1_changes(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """Is overwritten."""
    if step % 3 == 0 and dist.get_rank() == 1:
        model.module.norm.running_mean.add_(step)
        model.module.tally = torch.ones(3, dtype=torch.float64)
    return train(model, optimizer, step)


def replaced(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    if step % 3 == 0:
        model.module.norm.running_var = torch.full((WIDTH,), 2.0 + step + dist.get_rank())
        model.module.tally = torch.full((3,), float(step + dist.get_rank()), dtype=torch.float64)
    return train(model, optimizer, step)


def replaced_by_longer(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """Another shape, alike on every rank, as DDP needs it."""
    model.module.tally = torch.full((1 + step % 3,), 0.1 * (step + dist.get_rank()), dtype=torch.float64)
    return train(model, optimizer, step)


def replaced_on_rank_0(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    if step % 3 == 0 and dist.get_rank() == 0:
        model.module.norm.running_var = torch.full((WIDTH,), 2.0 + step)
    return train(model, optimizer, step)


def loaded(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """A checkpoint is loaded on the way."""
    if step == 0:
        model.module.saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if step % 5 == 4:
        model.load_state_dict(model.module.saved)
    return train(model, optimizer, step)


def accumulated(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """Under no_sync(), ranks' buffers part until the next synchronised forward."""
    with model.no_sync():
        model(batch(step + 600)).square().mean().backward()
        model(batch(step + 700)).square().mean().backward()
    return train(model, optimizer, step)


def twice_forward(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    optimizer.zero_grad()
    loss = model(batch(step)).square().mean() + model(batch(step + 500)).abs().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


WAYS: Mapping[str, Callable[..., object]] = {
    way.__name__: way
    for way in (
        alone, with_evaluation, with_differentiable_evaluation, rank_0_changes, rank_1_changes, replaced,
        replaced_by_longer, replaced_on_rank_0, loaded, accumulated, twice_forward,
    )
}  # fmt: skip
CASES: Mapping[str, Feature] = {
    **{name: Feature(Normed, way) for name, way in WAYS.items()},
    "recomputed": Feature(Recomputed, alone),
    "bucket views": Feature(Normed, with_evaluation, {"gradient_as_bucket_view": True}),
    "static": Feature(Normed, with_evaluation, {"static_graph": True}),
    "not sent": Feature(Normed, with_evaluation, {"forward_sync_buffers": False}),
}


def follow(rank: int, name: str, scenario: str) -> dict[str, Any]:
    return run(rank, CASES[name], scenario)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["plans again and again", "is given the plan"])
def test_every_forward_sees_what_ddp_would_show_it(scenario: str) -> None:
    for name, answers in cases_on_ranks({name: (follow, name, scenario) for name in CASES}, 2, timeout_s=120.0).items():
        for outcome in map(Outcome.of, answers):
            assert outcome.apart == [], name
            assert outcome.layouts >= (1 if scenario == "is given the plan" else 2), name
