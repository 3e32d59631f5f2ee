"""Buckets under Lean: gradients are added to residuals without touching tensors of others, and only if finite."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.lean import buckets
from lean.launches import each_on_ranks
from ranks import on_ranks

WIDTH = 8


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Positions(nn.Module):
    """At a batch of one, the gradient of ``places`` is a view of what flows on to ``before``."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.places = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.after(torch.tanh(self.before(x) + self.places.unsqueeze(0)))
        return found


class Sum(nn.Module):
    """Two parameters whose gradients are views of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ (self.one.view(WIDTH, WIDTH) + self.other.view(-1).view(WIDTH, WIDTH)))


def held_by_others(rank: int, which: type[nn.Module], size: int) -> None:
    """With Lean and without: the same bits."""
    torch.manual_seed(0)
    plain_model = which()
    torch.manual_seed(0)
    lean_model = which()
    names = tuple(name for name, _ in reversed(list(plain_model.named_parameters())))
    given: dict[str, Any] = {
        "plan": ab.Plan((ab.Bucket(names, collective="oktopk:0.1"),)),
        "compress": ab.OkTopk(density=0.1, warmup_steps=0, deterministic=True),
        "profile_steps": 0,
    }
    # Without views DDP would write both averages of Sum to the memory that autograd has given to both gradients.
    plain: Any = ab.DataParallel(plain_model, gradient_as_bucket_view=True, **given)
    optimizer = sgd(list(plain_model.parameters()))
    lean: Any = ab.DataParallel(lean_model, memory=ab.Lean(sgd), **given)
    for step in range(5):
        x = torch.randn(size, 6, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        plain(x).square().sum().backward()
        optimizer.step()
        lean(x).square().sum().backward()
        for (name, a), b in zip(plain_model.named_parameters(), lean_model.parameters(), strict=True):
            assert torch.equal(a, b), (step, name)
    plain.close()
    lean.close()


def test_a_gradient_that_others_hold_is_left_alone() -> None:
    each_on_ranks(held_by_others, 2, [(Positions, 1), (Positions, 2), (Sum, 1)])


def test_large_gradients_are_added_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "CHUNK_NUMEL", 5)
    state = _State()
    parameter = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    bucket = _live(parameter, state)
    gradient = torch.randn(4, 3, 2, 2)
    expected = state.residual.clone() + gradient.permute(0, 2, 3, 1).flatten()
    kept = gradient.clone()
    parameter.grad = gradient
    bucket.add_to_residual("p", parameter)
    assert torch.equal(state.residual, expected) and torch.equal(gradient, kept)
    parameter.grad = gradient.clone()
    parameter.grad[3, 2, 1, 1] = float("nan")
    bucket.add_to_residual("p", parameter)
    assert torch.equal(state.residual, expected)  # left out as a whole, not only the chunk with the NaN
    assert [bool(finite) for finite in bucket.finite_flags] == [True, False]


class _State:
    """What a sparse exchange remembers, as far as additions ask."""

    def __init__(self) -> None:
        self.residual = torch.randn(48)


def _live(parameter: nn.Parameter, state: Any) -> buckets.LiveBucket:
    planned = ab.Bucket(("p",), collective="oktopk:0.1")
    return buckets.LiveBucket(planned, [parameter], mock.Mock(), state, {"p": state.residual})


def huge(rank: int) -> None:
    """A gradient that is finite, and too large for any sum: the step is left out, and training goes on."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    lean: Any = ab.DataParallel(
        model,
        plan=ab.Plan((ab.Bucket(("weight",), collective="oktopk:0.1"),)),
        compress=ab.OkTopk(density=0.1, warmup_steps=0),
        profile_steps=0,
        memory=ab.Lean(sgd),
    )
    for step, factor in enumerate((1.0, 3e38, 1.0, 1.0)):
        before = model.weight.detach().clone()
        (lean(torch.ones(1, WIDTH)).sum() * factor).backward()
        assert torch.equal(before, model.weight) == (factor > 1), step
    assert lean.skipped == 1
    lean.close()


def test_a_huge_gradient_does_not_stay() -> None:
    on_ranks(huge, 2)


def only_empty(rank: int) -> None:
    """A sparse bucket without elements."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4)))
    plan = ab.Plan((ab.Bucket(("nothing",), collective="oktopk:0.1"), ab.Bucket(("weight",), collective="oktopk:0.1")))
    options = ab.OkTopk(density=0.1, warmup_steps=0)
    lean: Any = ab.DataParallel(model, plan=plan, compress=options, profile_steps=0, memory=ab.Lean(sgd))
    (lean(torch.ones(1, WIDTH)).sum() + model.nothing.sum()).backward()  # type: ignore[operator]
    assert lean.skipped == 0
    lean.close()


def test_a_sparse_bucket_without_elements() -> None:
    on_ranks(only_empty, 2)
