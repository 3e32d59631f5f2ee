"""Runs a block a second time without side effects: on statistics, buffers, other code's hooks, and its arguments."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten

_Statistics = Mapping[str, torch.Tensor | None]


class FrozenStatistics:
    """A context in which norms compute as in training but do not update their running statistics.

    The statistics are replaced by scratch tensors for that time. With no statistics at all, autograd would save fewer
    tensors than in the forward, and torch's checkpoint would refuse that.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._norms = [inner for module in modules for inner in module.modules() if isinstance(inner, _NormBase)]
        self._scratch: dict[nn.Module, _Statistics] = {}
        self._replaced: dict[nn.Module, _Statistics] = {}

    def __enter__(self) -> None:
        for norm in self._norms:
            if norm.training and norm.track_running_stats and norm not in self._replaced:
                own = self._replaced[norm] = dict(norm._buffers)
                norm._buffers.update(self._scratch_for(norm, own))

    def __exit__(self, *exception: object) -> None:
        for norm, own in self._replaced.items():
            norm._buffers.update(own)
        self._replaced = {}

    def _scratch_for(self, norm: nn.Module, own: _Statistics) -> _Statistics:
        scratch = self._scratch.get(norm)
        if scratch is None or any(
            mine is not None and (other is None or other.device != mine.device or other.dtype != mine.dtype)
            for mine, other in ((own[name], scratch.get(name)) for name in own)
        ):  # also when the model has moved
            scratch = {name: None if mine is None else torch.zeros_like(mine) for name, mine in own.items()}
            self._scratch[norm] = scratch
        return scratch


class BufferState(NamedTuple):
    """A buffer at the time of a snapshot."""

    module: nn.Module
    name: str
    path: str
    buffer: torch.Tensor
    version: int
    content: torch.Tensor | None


class BufferSnapshot:
    """The buffers of modules as they are now, except for statistics of norms, which ``FrozenStatistics`` protects.

    Only a snapshot with ``contents`` can be restored.
    """

    def __init__(self, modules: Sequence[nn.Module], contents: bool = False) -> None:
        self._states = [
            BufferState(
                inner,
                name,
                f"{prefix}.{name}".lstrip("."),
                buffer,
                buffer._version,
                buffer.detach().clone() if contents else None,
            )
            for module in modules
            for prefix, inner in module.named_modules()
            if not isinstance(inner, _NormBase)
            for name, buffer in inner._buffers.items()
            if buffer is not None
        ]

    def changed(self) -> str | None:
        """Return the name of a buffer that was replaced or written to since the snapshot; None if there is none."""
        for state in self._states:
            if state.module._buffers.get(state.name) is not state.buffer or state.buffer._version != state.version:
                return state.path
        return None

    @torch.no_grad()
    def restore(self) -> None:
        """Give the modules these buffers back, with the contents of then."""
        for state in self._states:
            state.module._buffers[state.name] = state.buffer
            if state.content is not None:
                state.buffer.copy_(state.content)


class NoSideEffects:
    """A context in which a run of modules changes neither statistics nor buffers and calls no forward hooks.

    Others use forward hooks to capture outputs. ``changed`` names a buffer that the run would have changed.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.changed: str | None = None
        self._outer = modules
        self._all = list(dict.fromkeys(inner for module in modules for inner in module.modules()))
        self._statistics = FrozenStatistics(modules)

    def __enter__(self) -> Self:
        self._statistics.__enter__()
        self._buffers = BufferSnapshot(self._outer, contents=True)
        self._hooks = [inner._forward_hooks for inner in self._all]
        for inner in self._all:
            inner._forward_hooks = OrderedDict()
        return self

    def __exit__(self, *exception: object) -> None:
        self.changed = self._buffers.changed()
        for inner, hooks in zip(self._all, self._hooks, strict=True):
            inner._forward_hooks = hooks
        if self.changed is not None:
            self._buffers.restore()
        self._statistics.__exit__()


class ReplayableCall:
    """A call that torch's checkpoint can repeat: its tensors, which checkpoint keeps, are passed one by one.

    The first call gets the original arguments, since a function may append to a list that it was given. Later calls get
    lists and dicts of their own. Once the tensors were taken and the first call was made, it refers to no tensor.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._function = function
        self._original: tuple[tuple[Any, ...], Mapping[str, Any]] | None = (args, dict(kwargs))
        leaves, self._spec = tree_flatten(self._original)
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._other_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def take_tensors(self) -> list[torch.Tensor]:
        """Return the tensors to call it with, and let go of them."""
        taken, self._tensors = self._tensors, []
        return taken

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._original is not None:
            (args, kwargs), self._original = self._original, None
        else:
            leaves = list(self._other_leaves)
            for position, tensor in zip(self._positions, tensors, strict=True):
                leaves[position] = tensor
            args, kwargs = tree_unflatten(leaves, self._spec)
        return self._function(*args, **kwargs)


def copy_containers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same tensors and values in new lists and dicts."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    copied: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, spec)
    return copied
