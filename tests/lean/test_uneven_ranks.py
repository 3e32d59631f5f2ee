"""Lean on several ranks that do not all do the same: they choose together, and evaluate the same model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from lean.launches import Answers, each_on_ranks
from ranks import cases_on_ranks

WIDTH = 16


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def made(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(WIDTH)] if norm else []
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), *norms, nn.Tanh()) for _ in range(3)))


def wrapped(model: nn.Module, budget: int | None = None) -> Any:
    return ab.DataParallel(model, profile_steps=0, memory=ab.Lean(sgd, within=budget))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def evaluated(rank: int) -> list[float]:
    lean = wrapped(made(norm=True))
    for step in range(3):
        lean(batch(10 * step + rank)).sum().backward()
    lean.eval()
    with torch.no_grad():
        found = float(lean(batch(99)).sum())
    lean.close()
    return [found]


def test_ranks_evaluate_the_same_model(launched: Answers) -> None:
    one, other = launched["evaluated"]
    assert one == other


def uneven(rank: int, on_its_own: bool) -> list[str]:
    """Ranks add up different numbers of micro-batches, or one of them computes with the module itself."""
    model = made()
    lean = wrapped(model, 1 << 20)
    for step in range(5):
        with lean.no_sync():
            for micro in range(1 + 2 * rank):
                lean(batch(100 * step + 10 * micro + rank)).sum().backward()
        if on_its_own and rank == 1:
            model(batch(7))
        lean(batch(100 * step + rank)).sum().backward()
    actions = list(lean._activations._patched.actions)
    lean.close()
    return actions


def test_ranks_choose_together_whatever_else_they_compute() -> None:
    for one, other in each_on_ranks(uneven, 2, [(False,), (True,)]):
        assert one == other == ["", "0", "1", "2", "(end)"]


def too_small(rank: int) -> str:
    lean = wrapped(made(), 10)
    for step in range(2):
        lean(batch(step + rank)).sum().backward()
    words = []
    for step in range(2):
        with pytest.raises(ValueError, match="within is 10 bytes") as caught:
            lean(batch(step + rank))
        words.append(str(caught.value))
    lean.close()
    assert words[0] == words[1]
    return words[0]


def test_a_budget_that_is_too_small_is_an_error_on_every_rank(launched: Answers) -> None:
    one, other = launched["too_small"]
    assert one == other


def averaged(rank: int) -> float:
    """A copy of the module, as for an average of its weights, made while it is surveyed and after."""
    model = made()
    lean = wrapped(model, 1 << 20)
    copies = [copy.deepcopy(model)]
    for step in range(4):
        lean(batch(step + rank)).sum().backward()
    copies.append(copy.deepcopy(model))
    with torch.no_grad():
        assert torch.equal(copies[1](batch(9)), model(batch(9)))
        difference = float((copies[0](batch(9)) - copies[1](batch(9))).abs().sum())
    lean.close()
    return difference


def test_the_module_can_be_copied_at_any_time(launched: Answers) -> None:
    assert all(difference > 0 for difference in launched["averaged"])


def dummy_loss(rank: int) -> list[object]:
    """One rank's loss is made from parameters now and then, as for an empty batch; steps are counted all the same."""
    lean: Any = ab.DataParallel(made(), profile_steps=2, network=ab.Network.ring(2, 1e-5, 1e-9), memory=ab.Lean(sgd))
    for step in range(40):
        output = lean(batch(10 * step + rank))
        if step % 3 == 1 and rank == 1:
            torch.stack([p.sum() for p in lean.module.parameters()]).sum().mul(0.0).backward()
        else:
            output.square().mean().backward()
    assert lean._tuner is not None
    steps = lean._tuner.steps_done
    weights = [float(p.detach().double().sum()) for p in lean.parameters()]
    lean.close()
    return [steps, weights]


def test_a_loss_that_does_not_use_the_output(launched: Answers) -> None:
    one, other = launched["dummy_loss"]
    assert one == other and one[0] == 40


@pytest.fixture(scope="module")
def launched() -> Answers:
    """What each scenario of this file returns on each rank, in one launch."""
    return cases_on_ranks({one.__name__: (one,) for one in SCENARIOS}, 2, timeout_s=240.0)


SCENARIOS: tuple[Callable[[int], object], ...] = (
    evaluated,
    too_small,
    averaged,
    dummy_loss,
)
