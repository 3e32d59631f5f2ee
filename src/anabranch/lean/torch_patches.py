"""Patches of torch's calls that would misunderstand a model under Lean, which has no gradients after backward.

Without them ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` would clip nothing; an optimizer that Lean does
not know would step without gradients; a GradScaler that is not followed would make every update too large; and
``torch.distributed.checkpoint`` would take the wrapper's "module." for a part of each parameter's name. Programs and
frameworks have imported these functions by name before. So the private parts of torch that they call are replaced, once
there is a model under Lean; for other models they do what they did.
"""

import logging
import sys
from collections import deque
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from anabranch.exchange.interface import Scaler
from anabranch.lean.optimizers import stepping
from anabranch.observe.step_timer import tensors_in

if TYPE_CHECKING:
    from anabranch.lean.parallel import LeanDataParallel

log = logging.getLogger("anabranch")

CLIP, PUBLIC_CLIP = "_clip_grads_with_norm_", "clip_grads_with_norm_"  # torch's clip_grad_norm_() calls the first
GROUPS = "_group_tensors_by_device_and_dtype"  # torch's clip_grad_value_() calls it with all gradients it has found
NAMES = "_get_fqns"  # torch.distributed.checkpoint's: the names under which an entry of a state_dict is saved
PREFIX = "module."  # of all parameters of a wrapper
CONCURRENT_PASSES = 64  # backward passes that run at the same time, at most

_models: "WeakSet[LeanDataParallel]" = WeakSet()
_scaled_passes: "deque[tuple[int, ref[torch.amp.GradScaler]]]" = deque(maxlen=CONCURRENT_PASSES)  # by graph task


def watch(model: "LeanDataParallel") -> None:
    """Have torch's calls respect this model from now on."""
    _models.add(model)
    _install()


def check_followed(followed: Scaler | None) -> None:
    """Raise RuntimeError if the loss of this backward pass was scaled by a GradScaler that the model does not follow.

    ``followed``: the one that it follows; another class may have a GradScaler inside.
    """
    task = torch._C._current_graph_task_id()
    scaler = next((scaler() for one, scaler in reversed(_scaled_passes) if one == task), None)
    if scaler is None or scaler is followed:
        return
    if followed is None or isinstance(followed, torch.amp.GradScaler):
        raise RuntimeError(
            f"the loss was scaled by a GradScaler whose scale is {scaler.get_scale()}, and this DataParallel under "
            f"Lean follows {'none' if followed is None else 'another one'}: its updates would be as much too "
            "large. Nothing was updated. Call follow(scaler) on the model once, on every rank, before training; "
            "then only scaler.scale(loss).backward()"
        )


@cache
def _install() -> None:
    """Replace torch's functions, once in a process."""
    register_optimizer_step_pre_hook(_refuse_idle_step)
    for scaler in (torch.amp.GradScaler, ShardedGradScaler):  # which has a scale() of its own
        scaler.scale = _recording_passes(scaler.scale)  # type: ignore[method-assign]
    parts = [
        (clip_grad, CLIP, _clipping),
        (clip_grad, GROUPS, _clipping_values),
        (checkpoint, NAMES, _naming),
    ]
    for owner, name, ours in parts:
        if not hasattr(owner, name):
            log.warning(
                "anabranch: torch %s has no %s.%s: under Lean, clip with Lean(clip_norm=...) only, and give "
                "torch.distributed.checkpoint model.module",
                torch.__version__, owner.__name__, name,
            )  # fmt: skip
            return
        setattr(owner, name, ours(getattr(owner, name)))
    if hasattr(utils, PUBLIC_CLIP):
        setattr(utils, PUBLIC_CLIP, clip_grad._clip_grads_with_norm_)


def _arguments_of_caller() -> dict[str, Any]:
    """The arguments of the function of torch's that called ours, which does not hand on all of them."""
    return sys._getframe(2).f_locals


def _clipping(stock: Any) -> Any:
    """torch's clipping; for a model under Lean, the norm by which it has clipped already."""

    @wraps(stock)
    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        without = {id(parameter) for parameter in given if parameter.grad is None}
        for model in list(_models):
            own = [parameter for parameter in model.trained_parameters() if parameter.requires_grad]
            found = sum(id(parameter) in without for parameter in own)
            if not found or any(parameter.grad is not None for parameter in own):  # these accumulate: torch clips them
                continue
            mine = {id(parameter) for parameter in own}
            others = sum(parameter.requires_grad and id(parameter) not in mine for parameter in given)
            if found < len(own) or others:
                raise RuntimeError(
                    f"clip_grad_norm_() was given {found} of {len(own)} parameters of a model under Lean, and {others} "
                    "others that are trained: expected all of that model and no others, since it clips in backward, by "
                    "the norm over all its gradients; call it for each model, or use Lean(clip_norm=...)"
                )
            caller = _arguments_of_caller()
            norm = model.clip_grad_norm_(max_norm, caller.get("norm_type", 2.0))
            if caller.get("error_if_nonfinite", False) and not bool(norm.isfinite()):
                raise RuntimeError(
                    f"the norm of the gradients is {norm.item()}, and clip_grad_norm_() was given "
                    "error_if_nonfinite=True; under Lean that step was left out already"
                )
            total_norm.copy_(norm)
            return
        stock(given, max_norm, total_norm, *args, **kwargs)

    return clip


def _clipping_values(stock: Any) -> Any:
    """torch's grouping of gradients; where there are none, a model under Lean has clipped them, or raises an error."""

    @wraps(stock)
    def group(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        trained = [model for model in list(_models) if model.trained_parameters()]
        limit = _arguments_of_caller().get("clip_value")
        if any(map(len, gradients)) or not trained or limit is None:
            return stock(gradients, *args, **kwargs)
        if not any(model.memory.clip_value == float(limit) for model in trained):
            trained[0].clip_grad_value_(limit)  # raises
        return {}

    return group


def _refuse_idle_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before any optimizer's step: raise if it can only do nothing, since all it has is updated by that of Lean.

    One with other parameters, too, may have a step without gradients now and then; and a closure may bring some.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
    if not _models or getattr(stepping, "now", False) or closure is not None:
        return
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not held or any(parameter.grad is not None for parameter in held):
        return
    updated = {id(parameter) for model in list(_models) for parameter in model.trained_parameters()}
    if all(id(parameter) in updated for parameter in held):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() finds no gradients, since its parameters are those of a model under "
            "Lean, which backward has updated by another optimizer: expected that one. Use model.optimizer, also for "
            "schedulers and checkpoints; or wrap with Lean(optimizer=...) of this one"
        )


def _naming(stock: Any) -> Any:
    """torch's names of an entry; for a model under Lean, as for DDP."""

    @wraps(stock)
    def names(model: Any, name: str, *args: Any, skip_ddp_prefix: bool = True, **kwargs: Any) -> set[str]:
        inside = name.removeprefix(PREFIX)
        if inside == name or model not in _models:
            found: set[str] = stock(model, name, *args, skip_ddp_prefix=skip_ddp_prefix, **kwargs)
            return found
        found = stock(model.module, inside, *args, skip_ddp_prefix=skip_ddp_prefix, **kwargs)
        return found if skip_ddp_prefix else {f"{PREFIX}{one}" for one in found}

    return names


def _recording_passes(stock: Any) -> Any:
    """``GradScaler.scale``, which also records the backward passes that begin with what it has scaled."""

    @wraps(stock)
    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = stock(self, outputs)
        if self.is_enabled():
            for tensor in tensors_in(scaled):
                if tensor.requires_grad:
                    tensor.register_hook(partial(_record_pass, ref(self)))
        return scaled

    return scale


def _record_pass(scaler: "ref[torch.amp.GradScaler]", gradient: torch.Tensor) -> None:  # noqa: ARG001
    _scaled_passes.append((torch._C._current_graph_task_id(), scaler))
