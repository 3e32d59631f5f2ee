"""A module that is changed after it was wrapped: the same results as under DDP, and a word about it."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel.twins import WIDTH, Feature, Model, batch, bits, different, twins
from ranks import on_ranks


class Net(nn.Module):
    """Convolutions, which have memory formats, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)])
        self.last = nn.Linear(2 * WIDTH * WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x[:, :, None] * x[:, None, :])[:, None].to(self.last.weight.dtype)
        for convolution in self.convolutions:
            x = convolution(x).tanh()
        result: torch.Tensor = self.last(x.flatten(1))
        return result


Change = Callable[[nn.Module], object]
CHANGES: Mapping[str, tuple[Change, Mapping[str, Any], str]] = {  # with DDP's options, and what explain() says
    "bfloat16": (lambda module: module.to(torch.bfloat16), {}, "DDP does not average gradients of what was converted"),
    "double": (
        lambda module: module.double(),
        {},
        "convolutions.0.weight was converted, to torch.float64 on cpu",
    ),
    "there and back": (lambda module: module.double().float(), {}, "was converted, to torch.float32"),
    "channels last": (lambda module: module.to(memory_format=torch.channels_last), {}, ""),  # type: ignore[call-overload]
    "channels last, views": (
        lambda module: module.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        {"gradient_as_bucket_view": True},
        "",
    ),
    "frozen": (
        lambda module: module.get_submodule("last").requires_grad_(False),
        {"find_unused_parameters": True},
        "no longer planning: parameters were frozen",
    ),
}


def train(model: Model, step: int) -> None:
    """Plain SGD, which holds no state of another dtype."""
    model.zero_grad()
    model(batch(step)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)


def changed(rank: int, name: str, at: int, scenario: str) -> dict[str, Any]:
    change, options, _ = CHANGES[name]
    theirs, ours = twins(Feature(Net, options=options), scenario)
    apart: list[str] = []
    for step in range(24):
        for model in (theirs, ours):
            if step == at:
                change(model.module)
            train(model, step)
        apart += [f"step {step}: {what}" for what in different(theirs, ours, 0.0)]
    everywhere = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(everywhere, next(ours.parameters()).detach().float().sum().view(1))
    return {"apart": apart[:3], "explained": ours.explain(), "same": bits(everywhere[0]) == bits(everywhere[1])}


@pytest.mark.parametrize("scenario", ["is given the plan", "plans again and again"])
@pytest.mark.parametrize("at", [0, 1, 9])
@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_is_changed_after_wrapping(name: str, at: int, scenario: str) -> None:
    for answer in on_ranks(changed, 2, name, at, scenario):
        assert answer["apart"] == []
        assert CHANGES[name][2] in answer["explained"]
