"""What a second run of a block must leave as it is: statistics, buffers, what hooks of others see, its arguments."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten


class StatisticsHeld:
    """Within it, norms compute the same but do not count the batch: they have seen it in the forward.

    Their statistics are others for that time, which nobody reads: without any, autograd would save fewer tensors than
    in the forward, and checkpointing would refuse that.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._norms = [inner for module in modules for inner in module.modules() if isinstance(inner, _NormBase)]
        self._others: dict[nn.Module, dict[str, torch.Tensor | None]] = {}
        self._own: dict[nn.Module, dict[str, torch.Tensor | None]] = {}

    def __enter__(self) -> None:
        """Set aside the statistics of those that count."""
        for norm in self._norms:
            if norm.training and norm.track_running_stats and norm not in self._own:
                own = self._own[norm] = dict(norm._buffers)
                norm._buffers.update(self._others_for(norm, own))

    def __exit__(self, *exception: object) -> None:
        """Put them back."""
        for norm, own in self._own.items():
            norm._buffers.update(own)
        self._own = {}

    def _others_for(self, norm: nn.Module, own: Mapping[str, torch.Tensor | None]) -> Mapping[str, torch.Tensor | None]:
        others = self._others.get(norm)
        if others is None or any(
            mine is not None and (other is None or other.device != mine.device or other.dtype != mine.dtype)
            for mine, other in ((own[name], others.get(name)) for name in own)
        ):  # also when the model has moved
            others = {name: None if mine is None else torch.zeros_like(mine) for name, mine in own.items()}
            self._others[norm] = others
        return others


class Seen(NamedTuple):
    """A buffer as it was."""

    module: nn.Module
    name: str
    path: str
    buffer: torch.Tensor
    version: int
    content: torch.Tensor | None


class Buffers:
    """The buffers of modules as they are now, but for the statistics of norms, which are held aside.

    With ``contents`` they can be put back.
    """

    def __init__(self, modules: Sequence[nn.Module], contents: bool = False) -> None:
        self._seen = [
            Seen(inner, name, f"{prefix}.{name}".lstrip("."), buffer, buffer._version, _copy(buffer, contents))
            for module in modules
            for prefix, inner in module.named_modules()
            if not isinstance(inner, _NormBase)
            for name, buffer in inner._buffers.items()
            if buffer is not None
        ]

    def changed(self) -> str | None:
        """The name of one that is another by now, or has another content."""
        for seen in self._seen:
            if seen.module._buffers.get(seen.name) is not seen.buffer or seen.buffer._version != seen.version:
                return seen.path
        return None

    @torch.no_grad()
    def put_back(self) -> None:
        """All of them, with what they held."""
        for seen in self._seen:
            seen.module._buffers[seen.name] = seen.buffer
            if seen.content is not None:
                seen.buffer.copy_(seen.content)


class Aside:
    """A run of modules within it leaves nothing behind, also in hooks, which others use to capture what passes.

    ``changed`` names a buffer that it would have changed.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.changed: str | None = None
        self._modules = list(dict.fromkeys(inner for module in modules for inner in module.modules()))
        self._parts, self._held = modules, StatisticsHeld(modules)

    def __enter__(self) -> "Aside":
        """Take note of everything."""
        self._held.__enter__()
        self._before = Buffers(self._parts, contents=True)
        self._hooks = [inner._forward_hooks for inner in self._modules]
        for inner in self._modules:
            inner._forward_hooks = OrderedDict()
        return self

    def __exit__(self, *exception: object) -> None:
        """Put everything back."""
        self.changed = self._before.changed()
        for inner, hooks in zip(self._modules, self._hooks, strict=True):
            inner._forward_hooks = hooks
        if self.changed is not None:
            self._before.put_back()
        self._held.__exit__()


def _copy(buffer: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    return buffer.detach().clone() if wanted else None


class Call:
    """A call that can be made again with its tensors given one by one, as torch's checkpoint sees to those.

    The first is made with what was given itself, since a function may put something into a list that it was given;
    later ones with lists and dicts of the same. Of the tensors it keeps none once they were taken and it was called.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._function = function
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = (args, dict(kwargs))
        leaves, self._spec = tree_flatten(self._given)
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def take_tensors(self) -> list[torch.Tensor]:
        """To call it with."""
        taken, self._tensors = self._tensors, []
        return taken

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Call the function."""
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
        else:
            leaves = list(self._leaves)
            for place, tensor in zip(self._places, tensors, strict=True):
                leaves[place] = tensor
            args, kwargs = tree_unflatten(leaves, self._spec)
        return self._function(*args, **kwargs)


def containers_copied(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same in lists and dicts of their own."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    copied: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, spec)
    return copied
