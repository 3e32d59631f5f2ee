"""An optimizer per bucket, all with one memory: whatever the buckets are, each parameter keeps its own state.

The user sees one optimizer of the class that he asked for, over all parameters: learning-rate schedulers change its
groups, and its ``state_dict`` is an ordinary one. Its ``step`` does nothing more, since backward has done it all. A
bucket's optimizer has the bucket's parameters, in the groups that the user sees, with their current settings, and the
same ``state``.
"""

import inspect
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from anabranch.comm.flat import shaped
from anabranch.lean.options import OptimizerFactory


class BucketOptimizers:
    """Makes and keeps the optimizers of one model. ``shown`` is the one for the user."""

    def __init__(self, factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter]) -> None:
        self._factory = factory
        self._parameters = parameters
        self._made: list[torch.optim.Optimizer] = []
        self.shown = self._make(list(parameters.values()))
        self.shown.step = MethodType(_already_done, self.shown)  # type: ignore[method-assign]
        self.shown._opt_called = True  # type: ignore[attr-defined] # else schedulers warn of a step() that nobody called
        self.shown._step_supports_amp_scaling = True  # type: ignore[attr-defined] # a scaler's step() comes to ours
        self.shown.add_param_group = MethodType(_too_late, self.shown)  # type: ignore[method-assign]
        groups = enumerate(self.shown.param_groups)
        self._group_of = {parameter: index for index, group in groups for parameter in group["params"]}

    def over(self, parameters: Sequence[nn.Parameter]) -> "BucketOptimizer":
        """One for the parameters of a bucket; those of buckets that are no more go with them."""
        return BucketOptimizer(self._make(parameters), parameters, self.shown, self._group_of)

    def described(self) -> list[str]:
        """A line per group and per parameter, such that ranks with equal lines update alike."""
        groups = [
            f"{type(self.shown).__name__}, group {index} of {len(group['params'])} parameters "
            f"({', '.join(f'{name} {_comparable(value)}' for name, value in group.items() if name != 'params')})"
            for index, group in enumerate(self.shown.param_groups)
        ]
        return [*(f"{name} in group {self._group_of[p]}" for name, p in self._parameters.items()), *groups]

    def forget(self) -> None:
        """The buckets are no more; what their optimizers remember stays."""
        self._made = [self.shown]

    def _make(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        made = self._factory(list(parameters))
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"Lean's optimizer function returned {made!r}: expected a torch.optim.Optimizer")
        if any(made is other for other in self._made):
            raise ValueError(
                f"Lean's optimizer function returned the same {type(made).__name__} twice: expected a new one in every "
                "call, over the parameters it is given"
            )
        if _needs_closure(made):
            raise ValueError(
                f"{type(made).__name__} calls the model again in its step, which cannot be done inside backward: "
                "use an optimizer whose step() needs no closure"
            )
        held = {parameter for group in made.param_groups for parameter in group["params"]}
        if held != set(parameters):
            raise ValueError(
                f"Lean's optimizer function was given {len(parameters)} parameters and returned an optimizer over "
                f"{len(held)} others or fewer: it must hold exactly those it is given"
            )
        self._made.append(made)
        return made


class BucketOptimizer:
    """Updates the parameters of one bucket."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        shown: torch.optim.Optimizer,
        group_of: Mapping[nn.Parameter, int],
    ) -> None:
        self._optimizer, self._parameters, self._shown = optimizer, parameters, shown
        self._numels = [parameter.numel() for parameter in parameters]
        self._all = [True] * len(parameters)
        self._checked = False
        # Not as the function has grouped these few: it may have done so by their places among those it was given.
        members: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            members.setdefault(group_of[parameter], []).append(parameter)
        optimizer.param_groups = [shown.param_groups[index] | {"params": own} for index, own in members.items()]
        self._groups = list(zip(optimizer.param_groups, members, strict=True))

    @property
    def takes_found_inf(self) -> bool:
        """Whether its step can be told on the device to do nothing: fused ones can."""
        return bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))

    def touched(self, update: torch.Tensor) -> torch.Tensor:
        """For each parameter, whether anything is there for it."""
        return torch.stack([piece.any() for piece in update.split(self._numels)])

    def step(
        self, update: torch.Tensor, found_inf: torch.Tensor | None = None, used: Sequence[bool] | None = None
    ) -> None:
        """One step with ``update``, the bucket's average gradient; afterwards no parameter has a gradient.

        ``found_inf`` (a float on the device, for those that take it): where it is not 0, nothing changes. ``used``: the
        other parameters are left alone, as without a gradient.
        """
        if self.takes_found_inf:
            self._optimizer.found_inf, self._optimizer.grad_scale = found_inf, None  # type: ignore[attr-defined]
        # Both are looked up in every step: schedulers change the settings, load_state_dict() replaces both.
        self._optimizer.state = self._shown.state
        for group, index in self._groups:
            chosen = self._shown.param_groups[index]
            group.update((name, value) for name, value in chosen.items() if name != "params")
        pieces = zip(self._parameters, update.split(self._numels), used or self._all, strict=True)
        for parameter, piece, wanted in pieces:
            if wanted and parameter.requires_grad:  # one that was frozen must not decay, or go on by its momentum
                parameter.grad = shaped(piece, parameter)  # fused optimizers see memory, not shapes
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        for group, index in self._groups:
            _check_settings(self._optimizer, group, self._shown.param_groups[index])
        if not self._checked:
            self._checked = True
            _check_state(self._optimizer)


def _check_settings(optimizer: torch.optim.Optimizer, group: dict[str, Any], shown: dict[str, Any]) -> None:
    """Refuse a step that has changed its group: the next one would get the user's settings again."""
    for name, value in group.items():
        was = shown.get(name) if name != "params" else value
        if value is not was and (isinstance(value, torch.Tensor) or value != was):
            raise ValueError(
                f"{type(optimizer).__name__}.step() changes {name!r} in its parameter groups, and every bucket has "
                "its own: use an optimizer that keeps what it remembers in state, by parameter"
            )


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse one that remembers something of all parameters together: each bucket's step would change it."""
    if others := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise ValueError(
            f"{type(optimizer).__name__} keeps {others[0]!r} in its state, for no parameter, and every bucket has a "
            "step of its own: use an optimizer that keeps what it remembers by parameter"
        )


def _too_late(self: torch.optim.Optimizer, param_group: Any) -> None:
    """The user's ``optimizer.add_param_group()``."""
    raise ValueError(
        f"{type(self).__name__}.add_param_group() of {len(param_group['params'])} parameters under Lean: its buckets "
        "are those of the module that was wrapped; close() this DataParallel and wrap a module that has them"
    )


def _comparable(value: object) -> object:
    """Such that equal settings look equal on every rank: not where an object lies in memory."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    told = value is None or isinstance(value, int | float | str | tuple | list)
    return value if told else type(value).__name__


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty)


def _already_done(self: torch.optim.Optimizer, closure: Any = None) -> None:
    """The user's ``optimizer.step()``: backward has done it."""
    if hasattr(self, "found_inf"):  # set by a scaler that was told to step
        del self.found_inf
        raise RuntimeError(
            "GradScaler.step() under Lean: every bucket was updated in backward. Call follow(scaler) on the model "
            "once, then scaler.scale(loss).backward() alone: no unscale_(), step() or update()"
        )
    if closure is not None:
        raise ValueError("under Lean every bucket was updated in backward: call optimizer.step() without a closure")
