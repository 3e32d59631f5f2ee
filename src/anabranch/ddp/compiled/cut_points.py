"""Where to cut a compiled graph: finely, to see when gradients could leave, and then where the buckets of a plan end.

The backward of a part is one call, and its gradients leave when it ends. A gradient is complete when the backward of
the first operation that uses its parameter has run. So a cut before operation i lets all gradients leave, before the
operations that come earlier have run backward, whose parameters are first used at i or later.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

import torch
from torch import fx

PARTS = 16  # at most: what the last part sends is never hidden, and this is a sixteenth of all gradients
MIN_PART_NBYTES = 1 << 16  # a shorter message costs little more than its latency, and each part costs compile time
SLACK = 2.0  # by what factor a part may exceed that, so that it begins where little crosses the cut: between two blocks

IN_PLACE_OPERATORS = frozenset({operator.setitem, *(getattr(operator, f"i{name}") for name in (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
))})  # fmt: skip

Cuts = tuple[int, ...]  # positions of operations, ascending: each begins a part


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What cutting must know of a graph with operations 0, 1, ….

    first_use   by the name of a parameter, the first operation that uses it
    nbytes      by the same names, the bytes of its gradient
    crossing    per operation, the bytes of activations that cross a cut before it; inf where no cut is possible
    last_use    per operation, the last one that uses its result; ``len(crossing)`` if the graph returns it
    """

    first_use: Mapping[str, int]
    nbytes: Mapping[str, int]
    crossing: Sequence[float]
    last_use: Sequence[int]


def fine_cuts(shape: GraphShape, model_nbytes: int) -> Cuts:
    """Cuts into parts of about a sixteenth of the model's gradients each, where little crosses the cut."""
    part_nbytes = max(MIN_PART_NBYTES, model_nbytes / PARTS)
    completed = [0] * len(shape.crossing)
    for name, first in shape.first_use.items():
        completed[first] += shape.nbytes[name]
    before = [0, *accumulate(completed)]  # bytes of the gradients that operations before a position complete
    cuts: list[int] = []
    end: int | None = len(shape.crossing)
    while end is not None and (end := _previous_cut(shape, before, end, part_nbytes)) is not None:
        cuts.append(end)
    return tuple(reversed(cuts))


def is_connected(shape: GraphShape, model_nbytes: int) -> bool:
    """Whether a graph cannot be cut that otherwise would be."""
    free = replace(shape, crossing=[0.0] * len(shape.crossing))
    return not fine_cuts(shape, model_nbytes) and bool(fine_cuts(free, model_nbytes))


def cuts_for(parts: Sequence[Iterable[str]], shape: GraphShape, allowed: Cuts) -> Cuts:
    """Select those of the ``allowed`` cuts that let these gradients leave as soon as they can, in this order."""
    found = set()
    needed = len(shape.crossing)  # the first operation that the parts so far need
    for names in parts[:-1]:
        needed = min([needed, *(shape.first_use[name] for name in names if name in shape.first_use)])
        found.update([cut for cut in allowed if cut <= needed][-1:])
    return tuple(sorted(found))


def _previous_cut(shape: GraphShape, before: Sequence[int], end: int, part_nbytes: float) -> int | None:
    """The cut that begins the part that ends before operation ``end``; None if it begins the graph."""
    found: list[int] = []
    most_nbytes = inf
    last_use = 0
    for position in range(end - 1, 0, -1):
        last_use = max(last_use, shape.last_use[position])
        nbytes = before[end] - before[position]
        if before[position] == 0 or nbytes > most_nbytes:
            break
        has_result = last_use >= end  # a part without one could not be placed
        if nbytes >= part_nbytes and has_result and shape.crossing[position] < inf:
            most_nbytes = min(most_nbytes, max(nbytes, SLACK * part_nbytes))
            found.append(position)
    return min(found, key=shape.crossing.__getitem__, default=None)


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
    changes = [0.0] * (len(nodes) + 1)  # how the bytes that cross change from one position to the next
    forbidden = [0] * (len(nodes) + 1)
    made: dict[int, int] = {}  # by storage, the operation that made it; later ones may return views of it
    nesting = 0  # levels of vmap and its like, whose values exist only between their first operation and their last
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
    """The number of levels of torch.func (vmap, grad, jvp, functionalize) by which what follows is deeper."""
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
