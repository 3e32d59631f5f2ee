"""Reads from an fx graph of torch.compile what cutting it must know."""

import operator
from collections.abc import Mapping, Sequence
from math import inf

import torch
from torch import fx

from anabranch.ddp.compiled.cuts import GraphShape

IN_PLACE_OPERATORS = frozenset({operator.setitem, *(getattr(operator, f"i{name}") for name in (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
))})  # fmt: skip


def operations(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a cut can lie between, in order."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def shape_of(graph: fx.Graph, names: Sequence[str | None], nbytes: Mapping[str, int]) -> GraphShape:
    """The shape of a graph whose inputs have these names; None for those that are no trained parameters."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    nodes = operations(graph)
    positions = {node: position for position, node in enumerate(nodes)}
    uses = {node: [positions[user] for user in node.users if user in positions] for node in (*inputs, *nodes)}
    first_use: dict[str, int] = {}
    for node, name in zip(inputs, names, strict=True):
        if name is not None and uses[node]:
            first_use[name] = min(uses[node])
    is_returned = {node for output in graph.nodes if output.op == "output" for node in output.all_input_nodes}
    last_use = [len(nodes) if node in is_returned else max(uses[node], default=-1) for node in nodes]
    changes = [0.0] * (len(nodes) + 1)  # of the bytes that cross, from one position to the next
    forbidden = [0] * (len(nodes) + 1)
    made: dict[int, int] = {}  # by storage, the operation that made it; later ones may return views of it
    nesting = 0  # of vmap and its like, whose values exist only between their first operation and their last
    for position, node in enumerate(nodes):
        if nesting > 0:
            forbidden[position] = 1
        nesting += _deeper(node)
        last = max(uses[node], default=position)
        changes[position + 1] += _nbytes(node)
        changes[last + 1] -= _nbytes(node)
        first = made.setdefault(storage, position) if (storage := _storage(node)) is not None else position
        if _overwrites(node):  # the part that made the value may need it unchanged in its backward
            forbidden[first + 1 : position + 1] = [1] * (position - first)
    crossing, total = [], 0.0
    for position in range(len(nodes)):
        total += changes[position]
        crossing.append(inf if forbidden[position] else total)
    return GraphShape(first_use, {name: nbytes[name] for name in first_use}, crossing, last_use)


def has_dynamic_shapes(graph: fx.Graph) -> bool:
    """Whether an input is a number, or has a dimension, that may change from call to call."""
    examples = [node.meta.get("example_value") for node in graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(example, torch.SymInt | torch.SymFloat)
        or (isinstance(example, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in example.shape))
        for example in examples
    )


def _nbytes(node: fx.Node) -> float:
    example = node.meta.get("example_value")
    tensors = example if isinstance(example, tuple | list) else [example]
    return sum(
        float(tensor.numel() * tensor.element_size())
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor.numel(), torch.SymInt)
    )


def _storage(node: fx.Node) -> int | None:
    """Which memory holds the result, or what the operation overwrites: a number that views share."""
    source = node.args[0] if _overwrites(node) and node.args and isinstance(node.args[0], fx.Node) else node
    example = source.meta.get("example_value")
    if not isinstance(example, torch.Tensor):
        return None
    try:
        return int(example.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a tensor inside vmap or its like has none
        return None


def _deeper(node: fx.Node) -> int:
    """By how many levels of torch.func (vmap, grad, jvp, functionalize) what follows is deeper."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return int(name.endswith("_increment_nesting")) - int(name.endswith("_decrement_nesting"))


def _overwrites(node: fx.Node) -> bool:
    """Whether it changes its first argument in place."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return node.op in ("call_method", "call_function") and (
        target in IN_PLACE_OPERATORS
        or (name.endswith("_") and not name.endswith("__"))
        or node.kwargs.get("inplace") is True
    )
