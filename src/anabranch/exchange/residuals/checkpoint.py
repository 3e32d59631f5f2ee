"""Validation of a saved sparse state: all of it is checked before anything is loaded, so a refusal changes nothing.

version, rank, world_size, step   whole numbers
scale                             loss scale of the residuals, or None
residuals, velocities             flat float32 tensors by parameter name
buckets                           settings of sparse buckets: names, tilt (threshold bias), boundaries, step
orders                            strides of parameters that are not row-major, by name
steps_trained                     steps of the whole training
"""

from collections.abc import Mapping
from itertools import pairwise
from math import isfinite
from typing import Any

import torch

from anabranch.exchange.dense import SUMMABLE_BELOW, all_finite
from anabranch.values.files import brief
from anabranch.values.kinds.formats import widest_numel

VERSION = 1
FIELDS = ("version", "rank", "world_size", "step", "residuals", "buckets")
LATER_FIELDS = ("scale", "velocities", "orders", "steps_trained")  # older checkpoints do not have them
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
    for field in ("residuals", "velocities"):
        for name, piece in _mapping(field, state.get(field, {})).items():
            _check_piece(f"{field}[{brief(name)}]", piece, _numel(field, name, numels))
    for name, strides in _mapping("orders", state.get("orders", {})).items():
        _numel("orders", name, numels)
        if not isinstance(strides, list | tuple) or not all(type(stride) is int and stride >= 0 for stride in strides):
            raise refused(f"orders[{brief(name)}]", strides, "a list of whole numbers")
    _check_buckets(state["buckets"], numels, world_size)


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


def _check_buckets(buckets: Any, numels: Mapping[str, int], world_size: int) -> None:
    if not isinstance(buckets, list | tuple):
        raise refused("buckets", buckets, "a list")
    seen: set[str] = set()
    for number, bucket in enumerate(buckets):
        where = f"buckets[{number}]"
        _check_fields(f"{where}.", _mapping(where, bucket), BUCKET_FIELDS)
        names = bucket["names"]
        if not isinstance(names, list | tuple) or not names:
            raise refused(f"{where}.names", names, "a list of parameter names")
        numel = sum(_numel(f"{where}.names", name, numels) for name in names)
        if len({*names, *seen}) != len(names) + len(seen):
            raise refused(f"{where}.names", names, "each parameter once, in one bucket")
        seen.update(names)
        _check_boundaries(f"{where}.boundaries", bucket["boundaries"], numel, world_size)
        if not (_is_number(bucket["tilt"]) and abs(bucket["tilt"]) <= MAX_TILT):
            raise refused(f"{where}.tilt", bucket["tilt"], f"a number from {-MAX_TILT:g} to {MAX_TILT:g}")
        _whole(f"{where}.step", bucket["step"], 0)


def _check_boundaries(field: str, found: Any, numel: int, world_size: int) -> None:
    widest = widest_numel(numel, world_size)
    is_list = isinstance(found, list | tuple) and len(found) == world_size + 1 and all(type(b) is int for b in found)
    if not is_list or (found[0], found[-1]) != (0, numel) or any(not 0 <= b - a <= widest for a, b in pairwise(found)):
        rise = f"from 0 to {numel} that do not fall, and rise by at most {widest} each"
        expected = f"{world_size + 1} whole numbers, for {world_size} ranks, {rise}"
        raise refused(field, found, expected)


def _check_piece(field: str, piece: Any, numel: int) -> None:
    if not isinstance(piece, torch.Tensor) or piece.layout != torch.strided or piece.is_meta:
        raise refused(field, piece, "a dense tensor")
    if piece.dtype != torch.float32 or tuple(piece.shape) != (numel,):
        raise refused(field, piece, f"a torch.float32 tensor of shape [{numel}], the size of this parameter")
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
