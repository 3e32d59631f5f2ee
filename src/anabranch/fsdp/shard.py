"""FSDP2 in planned units: ``ab.shard`` calls torch's ``fully_shard`` as a ShardingPlan says.

    plan = ab.find_sharding(build, mesh, step).plan   # once
    model = ab.shard(build(), mesh, plan)

Parameters, gradients and losses are those of a unit per block: a unit only says what travels together, and when.
"""

import inspect
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_state

from anabranch.fsdp.mesh import check_same_over, described_model, described_options, fails_together, inherit_timeouts
from anabranch.fsdp.torch_internals import TESTED
from anabranch.values.dependencies import check_signatures
from anabranch.values.errors import PlanError
from anabranch.values.files import dumps, load_as
from anabranch.values.sharded import ShardingPlan

SIGNATURES = {
    "set_modules_to_forward_prefetch": ("modules",),
    "set_modules_to_backward_prefetch": ("modules",),
}
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def shard(
    model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan | str | os.PathLike[str] | None = None, **options: Any
) -> nn.Module:
    """Shard a model by FSDP2, in place, in the units of a plan; returns the model. Collective.

    If the arguments differ between ranks, or cannot be used on one of them, all ranks get an error.

    model      whole; its parameters become shards
    mesh       as fully_shard() takes it: of one dimension, or of two for HSDP; mesh["shard"] where ``ab.replicate``
               averages between nodes
    plan       a ShardingPlan or its file; by default, a unit for each of ``block_names(model)``, as FSDP2's users do
    options    of fully_shard(), such as mp_policy, but reshard_after_forward, which the plan decides
    """
    with fails_together("ab.shard()", mesh):
        plan, units = _read_plan(model, plan, options)
        inherit_timeouts(mesh)
    check_same_over("the sharding plan", dumps(plan).splitlines(), mesh)
    check_same_over("the model given to ab.shard()", described_model(model), mesh)
    check_same_over("an option of ab.shard()", described_options(options, model), mesh)
    for unit, modules in zip(plan.units, units, strict=True):
        of_one = modules[0] if len(modules) == 1 else modules
        fully_shard(of_one, mesh=mesh, reshard_after_forward=unit.reshard, **options)
    fully_shard(model, mesh=mesh, **options)
    if plan.prefetch > 1:  # less is what FSDP2 does by itself
        _prefetch(model, [modules[0] for modules in units], plan.prefetch)
    return model


def _read_plan(
    model: nn.Module, plan: ShardingPlan | str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> tuple[ShardingPlan, list[list[nn.Module]]]:
    """The plan, read or made, and the blocks of its units; an error if they cannot be sharded so."""
    if "reshard_after_forward" in options:
        raise ValueError(
            "reshard_after_forward is for the plan to say, by unit: leave it out, or give a plan such as "
            "ShardingPlan.per_block(names, reshard=False)"
        )
    check_signatures(
        "torch", TESTED, torch.distributed.fsdp, {"fully_shard": ("module", "mesh", "reshard_after_forward")}
    )
    check_signatures("torch", TESTED, FSDPModule, SIGNATURES)
    if (at := next((path for path, one in model.named_modules() if isinstance(one, FSDPModule)), None)) is not None:
        raise ValueError(
            f"{at or 'the model'} is sharded already, and FSDP2 cannot change its units: give ab.shard() the whole "
            "model, as it was built"
        )
    if plan is None:
        plan = ShardingPlan.per_block(block_names(model))
    elif not isinstance(plan, ShardingPlan):
        plan = load_as(ShardingPlan, plan)
    grouped = next((unit for unit in plan.units if len(unit.names) > 1), None)
    if grouped is not None and (reason := no_groups_reason(options)):
        raise PlanError(
            f"a unit of the plan has {len(grouped.names)} blocks, {grouped.names[0]} to {grouped.names[-1]}, and "
            f"{reason}: give a plan with a unit per block, or cast what blocks are given yourself, with "
            "MixedPrecisionPolicy(..., cast_forward_inputs=False), or install a newer torch"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    if unknown := [name for name in plan.names if name not in modules]:
        raise PlanError(f"the plan names {unknown[0]}, which this model does not have: plan for this model")
    units = [[modules[name] for name in unit.names] for unit in plan.units]
    _check_apart(model, plan, units)
    return plan, units


def no_groups_reason(options: Mapping[str, Any]) -> str:
    """Why a unit cannot have several blocks, as the end of a sentence; empty if it can. ``options``: of fully_shard().

    Before torch 2.13 a group of modules has one hook before its first module, which casts what that one is given.
    Blocks that are given more than the last one returns, such as masks and positions, then fail or compute otherwise.
    """
    policy = options.get("mp_policy")
    if policy is None or policy.param_dtype is None or not policy.cast_forward_inputs:
        return ""
    hooks = getattr(_fsdp_state, "_register_group_forward_hooks", None)
    if hooks is None or "cast_output_dtype" in inspect.signature(hooks).parameters:
        return ""
    return (
        f"FSDP2 of torch {torch.__version__} casts to {policy.param_dtype} only what the first block of a unit is given"
    )


def block_names(model: nn.Module) -> list[str]:
    """The modules of a model that may be units: the members of its outermost lists (Sequential, ModuleList, …).

    Modules outside of the lists are left to the root, since a model may use a parameter there without calling its
    module. So are modules that share parameters with others, which FSDP2 wants in one unit.
    """
    everywhere = model.named_modules(remove_duplicate=False)
    uses = Counter(id(p) for _, module in everywhere for p in module._parameters.values() if p is not None)
    names: list[str] = []

    def visit(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            if type(module) not in LISTS or type(child) in LISTS:
                visit(f"{prefix}{name}.", child)
            elif (parameters := list(child.parameters())) and all(uses[id(p)] == 1 for p in parameters):
                names.append(f"{prefix}{name}")

    visit("", model)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no list of layers (Sequential, ModuleList, ModuleDict) whose members could be "
            "units: name modules that are called once in a step, as in ShardingPlan.per_block(['encoder', 'decoder'])"
        )
    return names


def _check_apart(model: nn.Module, plan: ShardingPlan, units: Sequence[Iterable[nn.Module]]) -> None:
    """PlanError if a parameter would be in two units, or in a unit and in none."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owner: dict[int, str] = {}
    for unit, modules in zip(plan.units, units, strict=True):
        for parameter in {id(p) for module in modules for p in module.parameters()}:
            if parameter in owner:
                raise PlanError(
                    f"{names[parameter]} is in {owner[parameter]} and in {unit.names[0]}, which are two units: put "
                    "both into one, or leave them out of the plan"
                )
            owner[parameter] = unit.names[0]
    inside = {id(module) for modules in units for block in modules for module in block.modules()}
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        for parameter in module._parameters.values():
            if id(parameter) in owner:
                raise PlanError(
                    f"{names[id(parameter)]} is in the unit of {owner[id(parameter)]}, and {path or 'the model'} uses "
                    f"it outside: leave {owner[id(parameter)]} out of the plan"
                )


def _prefetch(model: nn.Module, heads: Sequence[nn.Module], prefetch: int) -> None:
    """Each unit gathers ``prefetch`` units ahead, in forward and in backward; a unit is known by its first module."""
    for place, module in enumerate([model, *heads]):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(list(heads[place : place + prefetch]))  # type: ignore[arg-type]
    for place, module in enumerate([*heads, model]):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_backward_prefetch(list(heads[max(0, place - prefetch) : place])[::-1])  # type: ignore[arg-type]
