"""Residuals under Lean: asked for in an update, and loaded in their own order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import anabranch as ab
from ranks import on_ranks

ROWS, COLUMNS = 6, 20


class Sums(nn.Module):
    """Two matrices, whose gradients are what they are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.second = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        return (self.first * gradients[0]).sum() + (self.second * gradients[1]).sum()


def drawn(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(10 * step + rank))


def explained_in_an_update(rank: int) -> list[bool]:
    """An optimizer that asks for the explanation of the model that it updates, from the lane's thread."""
    said: list[bool] = []

    class Asking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            said.append("the plan it was given" in lean.explain())
            super().step(closure)

    plan = ab.Plan((ab.Bucket(("second", "first"), collective="oktopk:0.7"),))
    memory = ab.Lean(lambda parameters: Asking(parameters, lr=0.1), residuals="int8")
    options = ab.OkTopk(density=0.7, warmup_steps=0)
    lean: Any = ab.DataParallel(Sums(), plan=plan, compress=options, profile_steps=0, memory=memory)
    for step in range(3):
        lean(drawn(step, rank)).backward()
    lean.close()
    return said


def test_an_optimizer_may_call_explain_in_the_middle_of_an_update() -> None:
    assert all(said and all(said) for said in on_ranks(explained_in_an_update, 2, timeout_s=30.0))


def plain_sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def another_order(rank: int) -> str:
    """The residual of a channels-last model, loaded into another such, and into one that is not."""
    formats = (torch.channels_last, torch.channels_last, torch.contiguous_format)
    kept: Any = None
    answers = ""
    for format_ in formats:
        convolution: Any = nn.Conv2d(3, 4, 3, bias=False)
        lean: Any = ab.DataParallel(
            convolution.to(memory_format=format_),
            plan=ab.Plan((ab.Bucket(("weight",), collective="oktopk:0.1"),)),
            compress=ab.OkTopk(density=0.1, warmup_steps=0),
            profile_steps=0,
            memory=ab.Lean(plain_sgd),
        )
        if kept is None:
            lean(torch.randn(1, 3, 4, 4)).square().sum().backward()
            kept = lean.comm_state_dict()
        else:
            try:
                lean.load_comm_state_dict(kept)
            except ValueError as error:
                assert format_ == torch.contiguous_format
                answers = str(error)
        lean.close()
    return answers


def test_a_residual_is_loaded_in_its_own_memory_order() -> None:
    for answers in on_ranks(another_order, 2):
        assert "the residual of weight" in answers and "strides [27, 1, 9, 3], and here it is row-major" in answers
