"""The ranks of a device mesh: whether they were given the same, before they wait for each other.

Ranks that call FSDP2 with different units, models or options send messages that do not belong together, and wait until
the timeout of their process groups. So all that must be the same is compared first, among all ranks of the mesh.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from anabranch.exchange.agreement import all_or_none, check_same, explained, wire_device
from anabranch.exchange.groups import default_group, inherit_timeout
from anabranch.exchange.interface import Group
from anabranch.exchange.model_parameters import model_parts


def mesh_groups(mesh: DeviceMesh) -> tuple[Group, ...]:
    """The process groups by which all ranks of a mesh are asked, for the functions of ``exchange.agree``.

    That of all ranks, where the mesh has all: ranks whose mesh has another shape then take part, and are found. Else
    those of the dimensions.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is {mesh!r}: expected a DeviceMesh, as init_device_mesh(device, (ranks,)) makes it")
    if mesh.mesh.numel() == dist.get_world_size():
        return (default_group(),)
    return tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))


def inherit_timeouts(mesh: DeviceMesh) -> None:
    """A rank that stalls is an error on the others when the timeout given to init_process_group() is over."""
    for dimension in range(mesh.ndim):
        inherit_timeout(mesh.get_group(dimension))


def fails_together(what: str, mesh: DeviceMesh) -> AbstractContextManager[None]:
    """A context for what each rank does alone: if it fails on one rank of the mesh, it fails on all."""
    return all_or_none(what, *mesh_groups(mesh))


def check_same_over(what: str, lines: Iterable[str], mesh: DeviceMesh) -> None:
    """DisagreementError on every rank unless all ranks of the mesh have this mesh, and pass the same lines."""
    shape = f"mesh of {mesh.device_type}, dimensions {mesh.mesh_dim_names}, ranks {mesh.mesh.tolist()}"
    check_same(what, [shape, *lines], *mesh_groups(mesh))


@explained()
def over_mesh(numbers: Iterable[float], mesh: DeviceMesh, operation: Any) -> list[float]:
    """Each number over all ranks of the mesh. Collective."""
    groups = mesh_groups(mesh)
    values = torch.tensor(list(numbers), dtype=torch.float64, device=wire_device(groups[0]))
    for group in groups:
        dist.all_reduce(values, op=operation, group=group)
    found: list[float] = values.tolist()
    return found


def described_model(model: nn.Module) -> list[str]:
    """Lines that are the same for models that can be sharded together."""
    return [f"{name} {part}" for name, part in model_parts(model, buffers=False).items()]


def described_options(options: Mapping[str, Any], model: nn.Module | None = None) -> list[str]:
    """Options of fully_shard() in lines that are the same on ranks that were given the same.

    Of values that print where they are in memory, such as functions and parameters, the names alone.
    """
    names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}

    def words(value: Any) -> str:
        if isinstance(value, set | frozenset):
            return str(sorted(names.get(id(one), type(one).__name__) for one in value))
        if is_dataclass(value) and not isinstance(value, type):
            inside = [f"{one.name}={words(getattr(value, one.name))}" for one in fields(value)]
            return f"{type(value).__qualname__}({', '.join(inside)})"
        if isinstance(value, bool | int | float | str | None):
            return repr(value)
        return str(getattr(value, "__qualname__", type(value).__qualname__))

    return [f"{name} {words(value)}" for name, value in sorted(options.items())]
