"""Validation of a saved sparse state: all of it is checked before anything is loaded, so a refusal changes nothing.

version, rank, world_size, step   whole numbers
scale                             loss scale of the residuals, or None
residuals, velocities             flat float32 tensors by parameter name
slices                            by kind and name, of tensors that have not all elements of their parameter: the first
                                  element, and how many the parameter has
buckets                           settings of sparse buckets: names, tilt (threshold bias), boundaries, step
nodes                             the ranks of each node, where a two-level bucket has boundaries
orders                            strides of parameters that are not row-major, by name
steps_trained                     steps of the whole training
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

import torch

from anabranch.exchange.dense import SUMMABLE_BELOW, all_finite
from anabranch.exchange.shares import WHOLE, Share
from anabranch.values.files import brief
from anabranch.values.kinds.formats import widest_numel
from anabranch.values.nodes import Nodes

VERSION = 1
FIELDS = ("version", "rank", "world_size", "step", "residuals", "buckets")
LATER_FIELDS = ("scale", "velocities", "orders", "steps_trained", "slices", "nodes")  # may be missing
PIECES = ("residuals", "velocities")
BUCKET_FIELDS = ("names", "tilt", "boundaries", "step")
MAX_COUNT = 1 << 53
MAX_TILT = 256.0  # the log of the largest float32 over the smallest is 192
REMEDY = "load what comm_state_dict() returned for this model, unchanged"


def check_saved(state: Mapping[str, Any], numels: Mapping[str, int]) -> None:
    """Raise ValueError, naming field, value found and value expected, unless this is a state of these parameters."""
    version = state.get("version")
    if type(version) is not int or version != VERSION:
        raise refused(
            "version", version, f"{VERSION}, which this anabranch reads", "load it with the one that wrote it"
        )
    _check_fields("", state, FIELDS, LATER_FIELDS)
    world_size = _whole("world_size", state["world_size"], 1)
    _whole("rank", state["rank"], 0, world_size - 1)
    _whole("step", state["step"], 0)
    _whole("steps_trained", state.get("steps_trained", 0), 0)
    if (scale := state.get("scale")) is not None and not (_is_number(scale) and scale > 0):
        raise refused("scale", scale, "a finite number above 0, or None")
    slices = _mapping("slices", state.get("slices", {}))
    _check_fields("slices.", slices, (), PIECES)
    for field in PIECES:
        pieces, parts = _mapping(field, state.get(field, {})), _mapping(f"slices.{field}", slices.get(field, {}))
        for name, part in parts.items():
            _check_slice(f"slices.{field}[{brief(name)}]", part, _numel(f"slices.{field}", name, numels))
            if name not in pieces:
                raise refused(f"slices.{field}, a name,", name, f"one of {field}")
        for name, piece in pieces.items():
            numel = _numel(field, name, numels)
            low = parts[name][0] if name in parts else None
            _check_piece(f"{field}[{brief(name)}]", piece, numel, low)
    for name, strides in _mapping("orders", state.get("orders", {})).items():
        _numel("orders", name, numels)
        if not isinstance(strides, list | tuple) or not all(type(stride) is int and stride >= 0 for stride in strides):
            raise refused(f"orders[{brief(name)}]", strides, "a list of whole numbers")
    flat = _Regions(world_size, WHOLE)
    nodes = _nodes(state["nodes"], world_size) if state.get("nodes") is not None else None
    between = flat if nodes is None else _Regions(len(nodes), Share(nodes.per_node, nodes.place_of(state["rank"])))
    _check_buckets(state["buckets"], numels, flat, between)


class _Regions(NamedTuple):
    """The regions that a bucket may have: as many as ranks exchange it, over this share of its parameters."""

    ranks: int
    share: Share


def refused(field: str, found: object, expected: str, remedy: str = REMEDY) -> ValueError:
    """The error about one field of a saved state."""
    shown = "None" if found is None and field != "version" else brief(found)
    if isinstance(found, torch.Tensor):
        shown = f"a {found.dtype} tensor of shape {list(found.shape)}"
    return ValueError(f"{field} of the saved communication state is {shown}: expected {expected}; {remedy}")


def _check_fields(where: str, found: Mapping[Any, Any], needed: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    for name in needed:
        if name not in found:
            raise ValueError(
                f"{where}{name} is missing in the saved communication state: expected this field; {REMEDY}"
            )
    for name in found:
        if name not in (*needed, *others):
            raise refused(f"{where}{brief(name)}", found[name], f"no such field, but {', '.join((*needed, *others))}")


def _check_buckets(buckets: Any, numels: Mapping[str, int], flat: _Regions, between: _Regions) -> None:
    if not isinstance(buckets, list | tuple):
        raise refused("buckets", buckets, "a list")
    seen: set[str] = set()
    for number, bucket in enumerate(buckets):
        where = f"buckets[{number}]"
        _check_fields(f"{where}.", _mapping(where, bucket), BUCKET_FIELDS)
        names = bucket["names"]
        if not isinstance(names, list | tuple) or not names:
            raise refused(f"{where}.names", names, "a list of parameter names")
        sizes = [_numel(f"{where}.names", name, numels) for name in names]
        if len({*names, *seen}) != len(names) + len(seen):
            raise refused(f"{where}.names", names, "each parameter once, in one bucket")
        seen.update(names)
        _check_boundaries(f"{where}.boundaries", bucket["boundaries"], sizes, flat, between)
        if not (_is_number(bucket["tilt"]) and abs(bucket["tilt"]) <= MAX_TILT):
            raise refused(f"{where}.tilt", bucket["tilt"], f"a number from {-MAX_TILT:g} to {MAX_TILT:g}")
        _whole(f"{where}.step", bucket["step"], 0)


def _check_boundaries(field: str, found: Any, sizes: Sequence[int], flat: _Regions, between: _Regions) -> None:
    is_list = isinstance(found, list | tuple)
    ranks, share = between if is_list and len(found) == between.ranks + 1 else flat
    numel = sum(len(share.of(size)) for size in sizes)
    widest = widest_numel(numel, ranks)
    whole = is_list and len(found) == ranks + 1 and all(type(b) is int for b in found)
    if not whole or (found[0], found[-1]) != (0, numel) or any(not 0 <= b - a <= widest for a, b in pairwise(found)):
        rise = f"from 0 to {numel} that do not fall, and rise by at most {widest} each"
        raise refused(field, found, f"{ranks + 1} whole numbers, for {ranks} ranks, {rise}")


def _nodes(found: Any, world_size: int) -> Nodes:
    expected = f"lists of ranks, as many in each, with every rank from 0 to {world_size - 1} once"
    is_lists = isinstance(found, list | tuple) and all(isinstance(node, list | tuple) for node in found)
    if not is_lists or not all(type(rank) is int for node in found for rank in node):
        raise refused("nodes", found, expected)
    try:
        nodes = Nodes(found)
    except ValueError:
        raise refused("nodes", found, expected) from None
    if len(nodes) * nodes.per_node != world_size:
        raise refused("nodes", found, expected)
    return nodes


def _check_slice(field: str, found: Any, numel: int) -> None:
    is_pair = isinstance(found, list | tuple) and len(found) == 2 and all(type(number) is int for number in found)
    if not is_pair or not 0 <= found[0] < found[1] == numel:
        raise refused(field, found, f"the first element, and {numel}, the size of this parameter")


def _check_piece(field: str, piece: Any, numel: int, low: int | None) -> None:
    """``low``: the first element of a slice; None if it has all."""
    if not isinstance(piece, torch.Tensor) or piece.layout != torch.strided or piece.is_meta:
        raise refused(field, piece, "a dense tensor")
    least, most = (numel, numel) if low is None else (1, numel - low)
    if piece.dtype != torch.float32 or piece.dim() != 1 or not least <= len(piece) <= most:
        expected = f"[{numel}], the size of this parameter" if low is None else f"[1] to [{most}], its end"
        raise refused(field, piece, f"a torch.float32 tensor of shape {expected}")
    if not bool(all_finite(piece.detach(), below=SUMMABLE_BELOW)):
        worst = float(piece.detach().abs().max())
        raise refused(field, worst, f"finite values below {SUMMABLE_BELOW:g}", "load an earlier checkpoint")


def _numel(field: str, name: Any, numels: Mapping[str, int]) -> int:
    if not isinstance(name, str) or name not in numels:
        raise refused(f"{field}, a name,", name, f"a parameter of this model, such as {next(iter(numels))}")
    return numels[name]


def _mapping(field: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise refused(field, value, "a dict")
    return value


def _whole(field: str, value: Any, least: int, most: int = MAX_COUNT) -> int:
    if type(value) is not int or not least <= value <= most:
        raise refused(field, value, f"a whole number from {least} to {most}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_COUNT and isfinite(value)
