"""A module that is changed after it was wrapped: the same results as under DDP, and a word about it."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.ddp.reducer import unwrap
from parallel.twins import WIDTH, Feature, Model, batch, different, twins
from ranks import cases_on_ranks


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


def channels_last(module: nn.Module) -> None:
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


VIEWS = {"gradient_as_bucket_view": True}
CHANGES: Mapping[
    str, tuple[Callable[[nn.Module], object], Mapping[str, Any], str]
] = {  # what explain() says comes last
    "bfloat16": (lambda module: module.to(torch.bfloat16), {}, "does not average gradients of what was converted"),
    "double": (lambda module: module.double(), VIEWS, "convolutions.0.weight was converted, to torch.float64 on cpu"),
    "there and back": (lambda module: module.double().float(), {}, "was converted, to torch.float32"),
    "channels last": (channels_last, {}, ""),
    "channels last, views": (channels_last, VIEWS, ""),
    "channels last, static": (channels_last, {"static_graph": True}, ""),
    "frozen": (lambda module: module.get_submodule("last").requires_grad_(False), {"find_unused_parameters": True}, ""),
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
        if step == at:
            change(theirs.module)
            change(ours.module)
            if change is channels_last:  # DDP itself mixes up elements of gradients, unless it is built anew
                unwrap(theirs)
                theirs = DistributedDataParallel(theirs.module, **options)
        for model in (theirs, ours):
            train(model, step)
        apart += [f"step {step}: {what}" for what in different(theirs, ours, 0.0)]
    return {"apart": apart[:3], "explained": ours.explain()}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["is given the plan", "plans again and again"])
@pytest.mark.parametrize("at", [0, 1, 9])
def test_a_module_that_is_changed_after_wrapping(at: int, scenario: str) -> None:
    for name, answers in cases_on_ranks({name: (changed, name, at, scenario) for name in CHANGES}, 2).items():
        for answer in answers:
            assert answer["apart"] == [], name
            assert CHANGES[name][2] in answer["explained"], name
