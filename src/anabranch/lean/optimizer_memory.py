"""The memory of an optimizer: its state, and the workspace of its step."""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from anabranch.lean.optimizers import part_of
from anabranch.planning.footprint import OptimizerMemory, allocated_nbytes


def memory_of(optimizer: torch.optim.Optimizer) -> OptimizerMemory:
    """Its state, and the workspace of a step of all parameters."""
    return OptimizerMemory(state_nbytes(optimizer), _workspace_nbytes(optimizer))


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """What it holds between steps, counters aside."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(allocated_nbytes(nbytes_of(value)) for value in values if torch.is_tensor(value) and value.dim())


def next_step_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Run a step, and return the most that it allocates. Parameters and gradients have no data."""
    new = NewBytes()
    with new:
        optimizer.step()
    return new.most_nbytes


def nbytes_of(tensor: torch.Tensor) -> int:
    """The memory of a tensor; one that rounds its values says the size that they would have."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    return sum(nbytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def _workspace_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """What a step needs: nothing if it is fused; else as a step on tensors without data shows, which ours can run.

    As much as the gradients is taken for other classes, whose step may do anything, and where values are needed.
    """
    groups = [group for group in optimizer.param_groups if not group.get("fused")]
    if type(optimizer).__module__.startswith("torch.optim."):
        try:
            return _seen_nbytes(optimizer, groups)
        except (RuntimeError, NotImplementedError, AssertionError):  # the last one: capturable, which asks for a GPU
            pass
    return sum(p.nbytes for group in groups for p in group["params"] if p.requires_grad)


def _seen_nbytes(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> int:
    """The most that a second step of a copy without data allocates."""
    copy = part_of(optimizer, vars(optimizer), ())
    copy.state = defaultdict(dict)
    copy.param_groups = [_without_data(group) for group in groups]
    copy.step()
    return next_step_nbytes(copy)


def _without_data(group: dict[str, Any]) -> dict[str, Any]:
    """The group with parameters and gradients that have no data; foreach as torch would decide for those with."""
    copies = []
    for parameter in group["params"]:
        if parameter.requires_grad:
            copies.append(nn.Parameter(torch.empty_like(parameter, device="meta")))
            copies[-1].grad = torch.empty_like(copies[-1])
    foreach = group.get("foreach")
    on_gpu = any(parameter.is_cuda for parameter in group["params"])
    return {**group, "params": copies, "foreach": on_gpu if foreach is None else foreach}


class NewBytes(TorchDispatchMode):
    """While active, counts the bytes without data that operations allocate and that still live: the most so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_nbytes = 0
        self._nbytes = 0
        self._known: set[int] = set()  # addresses of storages: older ones, and those that were counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known.update(storage._cdata for storage in _storages_without_data((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for storage in _storages_without_data(result):
            if storage._cdata not in self._known:
                nbytes = allocated_nbytes(storage.nbytes())
                self._known.add(storage._cdata)
                self._nbytes += nbytes
                self.most_nbytes = max(self.most_nbytes, self._nbytes)
                weakref.finalize(storage, self._freed, storage._cdata, nbytes).atexit = False
        return result

    def _freed(self, address: int, nbytes: int) -> None:
        self._known.discard(address)
        self._nbytes -= nbytes


def _storages_without_data(tree: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_meta)
