"""The private names of torch's FSDP2 that ``replicate`` and ``watch`` use: its records of units and of parameters."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from anabranch.values.dependencies import check_parts, check_signatures

TESTED = "2.13.0"
SIGNATURES = {"set_all_reduce_hook": ("hook", "stream"), "_get_fsdp_state": ()}
STATE_PARTS = ("_state_ctx", "_states_to_forward_prefetch")
GROUP_PARTS = (
    "mesh_info", "_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook", "_is_hsdp", "_reshard_after_forward",
    "all_reduce_grads", "device", "fsdp_params", "gradient_divide_factor", "reduce_grads",
)  # fmt: skip
PARAMETER_PARTS = ("mp_policy", "offload_to_cpu", "padded_sharded_param_size", "sharded_param")


class ShardedUnit(NamedTuple):
    """A unit of FSDP2's: the modules, by path, that one fully_shard() was given, and FSDP2's records of them.

    ``groups`` are of parameters that are alike. Before torch 2.13 a unit has at most one.
    """

    modules: dict[str, Any]
    state: Any
    groups: list[Any]


def sharded_units(model: nn.Module) -> list[ShardedUnit]:
    """The units of a model, in the order of its modules; RuntimeError if this torch has no such records of one."""
    units: dict[int, ShardedUnit] = {}
    for path, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        check_signatures("torch", TESTED, module, SIGNATURES)
        state, groups = module._get_fsdp_state(), parameter_groups(module)
        check_parts("torch", TESTED, state, STATE_PARTS)
        for group in groups:
            check_parts("torch", TESTED, group, GROUP_PARTS)
            for record in group.fsdp_params:
                check_parts("torch", TESTED, record, PARAMETER_PARTS)
        units.setdefault(id(state), ShardedUnit({}, state, groups)).modules[path] = module
    return list(units.values())


def parameter_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's records of the parameters of a unit."""
    state: Any = module._get_fsdp_state()
    if not hasattr(state, "_fsdp_param_groups"):
        check_parts("torch", TESTED, state, ("_fsdp_param_group",))
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(state._fsdp_param_groups)


def gradient_dtype(record: Any) -> torch.dtype:
    """The dtype in which FSDP2 reduces the gradient of a parameter, of which ``record`` is FSDP2's own.

    Where the policy does not name it, that is the dtype of computing; from torch 2.15 on, the one that gradients have.
    """
    follows_gradients = hasattr(type(record), "unsharded_grad_dtype")
    unnamed = record.sharded_param.grad_dtype if follows_gradients else record.mp_policy.param_dtype
    found: torch.dtype = record.mp_policy.reduce_dtype or unnamed or record.sharded_param.dtype
    return found


def is_finalized_by_hand(module: FSDPModule) -> bool:
    """Whether a backward leaves some of its work to ``finalize_backward``, which newer torch has (2.15)."""
    state: Any = module._get_fsdp_state()
    return bool(getattr(state._state_ctx, "manual_backward_finalization", False))


def is_in_backward(module: FSDPModule) -> bool:
    """Whether FSDP2 waits for the end of a backward; it still does after one that was broken off by an error."""
    state: Any = module._get_fsdp_state()
    return bool(getattr(state._state_ctx, "post_backward_final_callback_queued", False))
