"""What is read from graphs of torch.compile, on real ones."""

from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import fx, nn

from anabranch.ddp.compiled.cut_points import (
    GraphShape,
    fine_cuts,
    has_dynamic_shapes,
    is_connected,
    operations,
    shape_of,
)
from ddp.compiled.models import ResNet

WIDTH = 4


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> tuple[fx.Graph, list[Any]]:
    """The graph of a function, and its inputs."""
    found: list[tuple[fx.Graph, list[Any]]] = []

    def backend(module: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        found.append((module.graph, given))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    (graph,) = found
    return graph


def shape(module: nn.Module, x: torch.Tensor) -> tuple[GraphShape, list[str]]:
    """The shape of a module's graph, and the names of its operations."""
    graph, inputs = graph_of(module, x)
    parameters = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    nbytes = {name: parameter.numel() * parameter.element_size() for name, parameter in parameters.items()}
    found = shape_of(graph, [names.get(id(value)) for value in inputs], nbytes)
    return found, [node.name for node in operations(graph)]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(self.a(x).relu()).relu()
        return result


class TiedAround(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.a(self.b(self.a(x)))
        return result


class InPlace(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x += self.a(x)
        view = x.view(-1)
        view.add_(1)
        x += self.b(x)
        return x


class Mapped(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a.weight, self.b.weight
        mapped = torch.vmap(lambda row: (row @ a).relu() @ b)(x)
        result: torch.Tensor = mapped.relu()
        return result


def test_first_uses_bytes_and_results() -> None:
    found, names = shape(Chain(), torch.randn(2, WIDTH))
    assert len(names) == 4
    assert found.first_use == {"a.weight": 0, "a.bias": 0, "b.weight": 2, "b.bias": 2}
    assert found.nbytes["a.weight"] == WIDTH * WIDTH * 4
    assert list(found.crossing[1:]) == [2 * WIDTH * 4] * 3
    assert list(found.last_use) == [1, 2, 3, 4]


def test_a_parameter_that_is_used_twice_is_complete_at_its_first_use() -> None:
    found, _ = shape(TiedAround(), torch.randn(2, WIDTH))
    assert found.first_use["a.weight"] == 0
    assert found.first_use["b.weight"] == 1


def test_no_cut_between_a_value_and_what_overwrites_it_or_a_view_of_it() -> None:
    found, names = shape(InPlace(), torch.randn(2, WIDTH))
    assert all(crossing == inf for crossing in found.crossing[1:]), names


def test_no_cut_inside_vmap() -> None:
    found, names = shape(Mapped(), torch.randn(2, WIDTH))
    first, last = (names.index(f"_vmap_{way}crement_nesting") for way in ("in", "de"))
    assert found.first_use == {"a.weight": first + 2, "b.weight": first + 4}
    inside = list(found.crossing[first + 1 : last + 1])
    assert inside == [inf] * (last - first) and found.crossing[last + 1] < inf, names


def test_dynamic_shapes() -> None:
    module = Chain()
    assert has_dynamic_shapes(graph_of(module, torch.randn(3, WIDTH), dynamic=True)[0])
    assert not has_dynamic_shapes(graph_of(module, torch.randn(3, WIDTH))[0])


def test_a_residual_network_that_adds_in_place_is_cut_finely() -> None:
    found, _ = shape(ResNet(width=16, classes=100), torch.randn(2, 3, 32, 32))
    total = sum(found.nbytes.values())
    assert not is_connected(found, total)
    cuts = fine_cuts(found, total)
    bounds = [0, *cuts, len(found.crossing)]
    parts = [
        sum(found.nbytes[name] for name, first in found.first_use.items() if begin <= first < end)
        for begin, end in pairwise(bounds)
    ]
    assert len(parts) >= 8
    assert max(parts) < total / 6
    assert found.first_use["head.weight"] in range(cuts[-1], len(found.crossing)), "the last layer leaves at once"
