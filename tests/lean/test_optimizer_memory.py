"""What an optimizer's step needs, as Lean counts it for a live one: what ``anabranch memory`` counts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.lean.optimizer_memory import memory_of
from anabranch.tools.predict.memory.probe import optimizer_memory

SGD, ADAMW = partial(torch.optim.SGD, lr=0.1), torch.optim.AdamW
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(SGD, foreach=True),
    "momentum": partial(SGD, momentum=0.9, foreach=True),
    "decayed": partial(SGD, momentum=0.9, weight_decay=0.1, foreach=True),
    "adamw": partial(ADAMW, foreach=True),
    "amsgrad": partial(ADAMW, foreach=True, amsgrad=True),
    "adamw, one by one": partial(ADAMW, foreach=False),
    "rmsprop": partial(torch.optim.RMSprop, foreach=True),
}


def stepped(make: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_live_optimizer_needs_what_a_probe_of_it_says(name: str) -> None:
    model, optimizer = stepped(OPTIMIZERS[name])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    expected = optimizer_memory(model, OPTIMIZERS[name])
    found = memory_of(optimizer)
    assert found == expected
    assert (found.workspace_nbytes == 0) == (name in ("sgd", "momentum"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "nothing was updated"


def test_a_fused_step_needs_nothing() -> None:
    _, optimizer = stepped(partial(ADAMW, fused=True))
    assert memory_of(optimizer).workspace_nbytes == 0


def test_a_capturable_step_which_runs_on_gpus_only_needs_as_much_as_the_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(64, 64))
    assert memory_of(ADAMW([parameter], capturable=True)).workspace_nbytes == parameter.nbytes


class Own(torch.optim.SGD):
    """Anybody's: its step is not run to look at it."""

    def step(self, closure: Any = None) -> Any:
        self.runs = getattr(self, "runs", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("make", [partial(Own, lr=0.1), torch.optim.Adafactor])
def test_as_much_as_the_gradients_where_a_step_cannot_be_looked_at(make: Callable[..., Any]) -> None:
    model, optimizer = stepped(make)
    assert memory_of(optimizer).workspace_nbytes == sum(parameter.nbytes for parameter in model.parameters())
    assert getattr(optimizer, "runs", 1) == 1
