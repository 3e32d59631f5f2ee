"""Odd models and habits under torch.compile: the weights of stock compiled DDP, and one compilation after planning."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.functional import dropout
from torch.nn.parallel import DistributedDataParallel

from ddp.compiled.models import LAYERS, WIDTH, Log, compiled, furthest, inputs
from parallel.twins import SCENARIOS, ring
from ranks import on_ranks

RANK_OF_ADAPTERS = 128
STEPS = 24


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Tied(Chain):
    """The first layer's weight is the last one's, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ cast(torch.Tensor, self.layers[0].weight)


class SeveralOutputs(Chain):
    """Takes a dict with a tuple, returns a dict with one; one output is not used."""

    def forward(self, given: dict[str, tuple[torch.Tensor, torch.Tensor]], *, scale: torch.Tensor) -> Any:  # type: ignore[override]
        x = sum(given["x"]) * scale
        between = []
        for layer in self.layers:
            x = layer(x).relu()
            between.append(x)
        return {"last": (x, between[0]), "other": between[2]}


class Drops(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = dropout(layer(x).relu(), 0.3, self.training)
        return x


class Adapted(Chain):
    """A frozen base with small trained matrices beside it, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(requires_grad=False)
        self.down = nn.ParameterList(0.02 * torch.randn(WIDTH, RANK_OF_ADAPTERS) for _ in range(LAYERS))
        self.up = nn.ParameterList(torch.zeros(RANK_OF_ADAPTERS, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = (layer(x) + x @ down @ up).relu()
        return x


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


class Masked(Chain):
    """A mask by vmap between layers, as models of Transformers make theirs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            width = torch.arange(x.shape[1])
            x = layer(x).relu() * torch.vmap(lambda column, after=number: column >= after)(width)
        return x


class Unused(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Chain, Tied, SeveralOutputs, Drops, Adapted, Single, Masked, Unused)
}
OPTIONS: dict[str, dict[str, Any]] = {"static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss, whatever the model takes and returns."""
    if "SeveralOutputs" in repr(model):
        found = model({"x": (x, x / 2)}, scale=torch.tensor(1.5))
        return cast(torch.Tensor, found["last"][0].square().mean() + found["other"].mean())
    return cast(torch.Tensor, model(x).square().mean())


def trained(rank: int, name: str, habit: str) -> dict[str, Any]:
    """Train beside a compiled DDP, each with a backend of its own."""
    torch._dynamo.reset()
    nets = []
    for _ in range(2):
        torch.manual_seed(7)
        nets.append(MODELS[name]())
    options = OPTIONS.get(habit, {})
    theirs = DistributedDataParallel(nets[0], **options)
    log = Log(name="aot_eager")
    ours: dict[str, Any] = {"lanes": 1, "profile_steps": 2, "network": ring(), "policy": SCENARIOS["keeps the plan"]}
    order = "net.compile()" if habit == "twice" else "compile(DP)"
    made, called = compiled(nets[1], order, log, **options, **ours)
    if habit == "twice":
        called = cast(nn.Module, torch.compile(made, backend=log))
    stock = cast(nn.Module, torch.compile(theirs, backend=Log(name="aot_eager")))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, made)]
    for log.step in range(STEPS):
        rows = 4 if habit == "last batch" and log.step == STEPS - 1 else 8
        x = inputs(rank, log.step, rows)
        for wrapped, model, optimizer in zip((theirs, made), (stock, called), optimizers, strict=True):
            torch.manual_seed(log.step)
            optimizer.zero_grad()
            with wrapped.no_sync() if habit == "accumulates" else nullcontext():
                loss(model, x / 3).backward() if habit == "accumulates" else None
            loss(model, x).backward()
            optimizer.step()
    return {"apart": furthest(theirs, made), "compiled": log.compiled, "explained": made.explain()}


def all_trained(rank: int, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """One after the other, in the same processes."""
    warnings.simplefilter("ignore")  # torch's own, inside its compiler
    return [trained(rank, *case) for case in cases]


CASES = [
    *((name, "") for name in ("Tied", "SeveralOutputs", "Drops", "Adapted", "Single", "Masked")),
    *(("Chain", habit) for habit in ("static", "accumulates", "last batch", "twice")),
    ("Unused", "unused"),
]


@pytest.mark.campaign
def test_the_weights_of_compiled_ddp() -> None:
    for answers in on_ranks(all_trained, 2, CASES, timeout_s=150):
        for (name, habit), answer in zip(CASES, answers, strict=True):
            where = f"{name} {habit}: {answer['explained']}"
            assert answer["apart"] < 1e-6, where
            assert answer["compiled"], where
            later = {step for step in answer["compiled"] if step} - {STEPS - 1}  # where the last batch is smaller
            assert len(later) <= 1, where
            assert "predicted" in answer["explained"], where
