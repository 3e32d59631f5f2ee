"""Steps in which one rank's loss does not use the model's output as the others' does, where DDP ends normally."""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel.models import Heads, NonReentrant, OneParameter, Reentrant
from parallel.twins import WIDTH, Feature, Model, Outcome, batch, mlp, run
from ranks import cases_on_ranks


class Towers(nn.Module):
    """Two outputs that share no parameter; the second tower's is also kept aside."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(2), mlp(2)
        self.aside = torch.empty(0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.aside = self.right(x)
        return self.left(x), self.aside


class Aside(nn.Module):
    """Returns a detached output, and keeps the one with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.aside = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = self.body(x)
        return self.aside if dist.get_rank() == 0 else self.aside.detach()


class Hidden:
    """An output that hides its tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Hiding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Hidden:  # type: ignore[override]
        return Hidden(super().forward(x))


def odd_one(step: int) -> bool:
    """Whether this rank is the one that differs in this step."""
    return step % 3 != 0 and dist.get_rank() == step % dist.get_world_size()


def from_parameters(model: Model) -> torch.Tensor:
    """A loss of zeros that gives every parameter a gradient."""
    return torch.stack([p.sum() for p in model.parameters() if p.requires_grad]).sum() * 0.0


def dummy(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """An empty batch: the forward runs, and the loss is made from parameters."""
    optimizer.zero_grad()
    output = model(batch(step))
    loss = from_parameters(model) if odd_one(step) else output.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def accumulated_dummy(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    optimizer.zero_grad()
    for part in range(2):
        with nullcontext() if part else model.no_sync():
            output = model(batch(10 * step + part))
            (from_parameters(model) if odd_one(step + part) else output.square().mean()).backward()
    optimizer.step()
    return None


def in_parts(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """One backward pass per tower."""
    optimizer.zero_grad()
    left, right = model(batch(step))
    if odd_one(step):
        right.square().mean().backward()
        left.square().mean().backward()
    else:
        (left.square().mean() + right.square().mean()).backward()
    optimizer.step()
    return None


def part_aside(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """The last part of the loss is an auxiliary one, of a tensor that the model does not return."""
    optimizer.zero_grad()
    left, right = model(batch(step))
    left.square().mean().backward()
    (model.module.aside.abs() if odd_one(step) else right.abs()).mean().backward()
    optimizer.step()
    return None


def detached(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    optimizer.zero_grad()
    model(batch(step))
    model.module.aside.square().mean().backward()
    optimizer.step()
    return None


def one_head(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """With find_unused_parameters: an output that one rank's loss leaves out."""
    optimizer.zero_grad()
    output = model(batch(step))
    loss = output["rest"][0].mean()
    if not odd_one(step):
        loss = loss + output["a"].square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def looked_at(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """One rank looks at gradients with autograd.grad(), before and after backward."""
    optimizer.zero_grad()
    x = batch(step).requires_grad_()
    loss = model(x).square().mean()
    for _ in range(2 if odd_one(step) else 0):
        torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(retain_graph=True)
    if odd_one(step):
        torch.autograd.grad(loss, x)
    optimizer.step()
    return loss.detach()


def twice(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """One rank runs backward twice; DDP averages the first, and what the second adds is taken away again."""
    optimizer.zero_grad()
    loss = model(batch(step)).square().mean()
    loss.backward(retain_graph=True)
    averages = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if odd_one(step):
        loss.backward()
    for p, average in zip(model.parameters(), averages, strict=True):
        p.grad = average
    optimizer.step()
    return loss.detach()


def further_forwards(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    """One rank runs forwards that are never differentiated, and two forwards for one backward."""
    optimizer.zero_grad()
    if odd_one(step):
        model(batch(step + 300))
    loss = model(batch(step)).square().mean()
    if odd_one(step):
        loss = loss + model(batch(step + 600)).abs().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def hidden(model: Model, optimizer: torch.optim.Optimizer, step: int) -> object:
    optimizer.zero_grad()
    model(batch(step)).value.square().mean().backward()
    optimizer.step()
    return None


UNUSED = {"find_unused_parameters": True}
CASES: Mapping[str, Feature] = {
    "dummy loss": Feature(train=dummy),
    "dummy loss, unused": Feature(train=dummy, options=UNUSED),
    "dummy loss, bucket views": Feature(train=dummy, options={"gradient_as_bucket_view": True}),
    "dummy loss, one parameter": Feature(OneParameter, dummy),
    "dummy loss, no_sync": Feature(train=accumulated_dummy),
    "dummy loss, checkpoint": Feature(NonReentrant, dummy),
    "dummy loss, re-entrant checkpoint": Feature(Reentrant, dummy),
    "backward in parts": Feature(Towers, in_parts),
    "auxiliary loss": Feature(Towers, part_aside),
    "detached output": Feature(Aside, detached),
    "one head": Feature(Heads, one_head, UNUSED),
    "autograd.grad": Feature(train=looked_at),
    "backward twice": Feature(train=twice),
    "further forwards": Feature(train=further_forwards),
    "hidden output": Feature(Hiding, hidden),
}


def follow(rank: int, name: str, scenario: str) -> dict[str, object]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradients became ready in another order")
        return run(rank, CASES[name], scenario)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_are_counted_alike_on_every_rank(world_size: int) -> None:
    cases = {name: (follow, name, "plans again and again") for name in CASES}
    for name, answers in cases_on_ranks(cases, world_size, timeout_s=120.0).items():
        outcomes = [Outcome.of(answer) for answer in answers]
        assert [outcome.apart for outcome in outcomes] == [[]] * world_size, name
        assert len({outcome.digest for outcome in outcomes}) == 1, f"{name}: ranks ended with other bits"
        assert all(outcome.layouts >= 2 for outcome in outcomes), f"{name}: no plan ran"
