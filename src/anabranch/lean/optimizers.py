"""One optimizer per bucket, all with one shared state: each parameter keeps its own state whatever the buckets are.

The user sees one optimizer of the class that was asked for, over all parameters, or the one that the user gave.
Learning-rate schedulers change its groups, and its ``state_dict`` is an ordinary one. Its ``step`` only runs a closure,
if it is given one, since backward has updated every bucket. A bucket's optimizer has the bucket's parameters, in the
groups of the user's optimizer, with their current settings and the same ``state``.
"""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from anabranch.exchange.model_parameters import shaped
from anabranch.lean.options import OptimizerFactory

REPLACED = ("step", "add_param_group", "_opt_called", "_step_supports_amp_scaling")  # in the user's optimizer
BEFORE_LEAN = "_before_lean"  # the attribute in which an optimizer that was taken over keeps what it had before
# Where torch's register_step_pre_hook() and register_step_post_hook() put hooks.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class BucketOptimizers:
    """Makes the optimizers of one model's buckets. ``user_optimizer`` is the one that the user sees.

    ``source`` makes optimizers, or is the one to take over; then buckets have parts of it (``part_of``).
    """

    def __init__(
        self, source: OptimizerFactory | torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._parameters = parameters
        self._made: list[torch.optim.Optimizer] = []
        if source is None:
            raise ValueError(
                "Lean has no optimizer: expected Lean(optimizer=...), a function (parameters) -> optimizer or an "
                "optimizer of torch.optim; only an integration with a framework puts in the framework's own"
            )
        if isinstance(source, torch.optim.Optimizer):
            _check_taken_over(source, parameters)
            self._before: dict[str, Any] = vars(source).setdefault(BEFORE_LEAN, dict(vars(source)))
            self._factory: OptimizerFactory = partial(part_of, source, self._before)
            self.user_optimizer = user = source
        else:
            self._before = {}
            self._factory = source
            self.user_optimizer = user = self._make(list(parameters.values()))
        user.step = MethodType(_step_of_user, user)  # type: ignore[method-assign]
        user._opt_called = True  # type: ignore[attr-defined] # else schedulers warn that step() was not called
        user._step_supports_amp_scaling = True  # type: ignore[attr-defined] # so that a scaler calls our step()
        user.add_param_group = MethodType(_refuse_new_group, user)  # type: ignore[method-assign]
        groups = enumerate(user.param_groups)
        self._group_of = {parameter: index for index, group in groups for parameter in group["params"]}

    def for_bucket(self, parameters: Sequence[nn.Parameter]) -> "BucketOptimizer":
        """Make the optimizer of one bucket."""
        return BucketOptimizer(self._make(parameters), parameters, self.user_optimizer, self._group_of)

    def described(self) -> list[str]:
        """Return a line per group and per parameter. Ranks with equal lines update alike."""
        groups = [
            f"{type(self.user_optimizer).__name__}, group {index} of {len(group['params'])} parameters "
            f"({', '.join(f'{name} {_comparable(value)}' for name, value in group.items() if name != 'params')})"
            for index, group in enumerate(self.user_optimizer.param_groups)
        ]
        return [*(f"{name} in group {self._group_of[p]}" for name, p in self._parameters.items()), *groups]

    def forget_buckets(self) -> None:
        """Drop the buckets' optimizers, since the plan changes; their state stays in ``user_optimizer``."""
        self._made = [self.user_optimizer]

    def close(self) -> None:
        """Drop the buckets' optimizers, and give one that was taken over back as it was."""
        self.forget_buckets()
        own = vars(self.user_optimizer)
        if own.pop(BEFORE_LEAN, None) is not None:
            for name in REPLACED:
                own.pop(name)
            own.update((name, self._before[name]) for name in REPLACED if name in self._before)

    def _make(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        made = self._factory(list(parameters))
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"Lean's optimizer function returned {made!r}: expected a torch.optim.Optimizer")
        if any(made is other for other in self._made):
            raise ValueError(
                f"Lean's optimizer function returned the same {type(made).__name__} twice: expected a new one in every "
                "call, over the parameters it is given"
            )
        _check_needs_no_closure(made)
        held = {parameter for group in made.param_groups for parameter in group["params"]}
        if held != set(parameters):
            raise ValueError(
                f"Lean's optimizer function was given {len(parameters)} parameters and returned an optimizer over "
                f"{len(held)} others or fewer: it must hold exactly those it is given"
            )
        self._made.append(made)
        return made


stepping = threading.local()  # has ``now`` while this thread steps the optimizer of a bucket, and those inside it


class BucketOptimizer:
    """Updates the parameters of one bucket."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        user_optimizer: torch.optim.Optimizer,
        group_of: Mapping[nn.Parameter, int],
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._user_optimizer = user_optimizer
        self._numels = [parameter.numel() for parameter in parameters]
        self._all_used = [True] * len(parameters)
        self._checked = False
        # The factory's own groups of these few parameters do not count: it may have grouped by position.
        members: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            members.setdefault(group_of[parameter], []).append(parameter)
        optimizer.param_groups = [
            user_optimizer.param_groups[index] | {"params": own} for index, own in members.items()
        ]
        self._groups = list(zip(optimizer.param_groups, members, strict=True))

    @property
    def takes_found_inf(self) -> bool:
        """Whether a flag on the device can make its step do nothing, as in fused optimizers."""
        return bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))

    def nonzero(self, average: torch.Tensor) -> torch.Tensor:
        """For each parameter, whether its part of the bucket's average has an element that is not 0."""
        return torch.stack([piece.any() for piece in average.split(self._numels)])

    def parts(self, average: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """The part of the bucket's average that belongs to each parameter; not of those that are frozen."""
        pieces = zip(self._parameters, average.split(self._numels), strict=True)
        return {parameter: piece for parameter, piece in pieces if parameter.requires_grad}

    def step(
        self, average: torch.Tensor, found_inf: torch.Tensor | None = None, used: Sequence[bool] | None = None
    ) -> None:
        """Step once with ``average``, the bucket's average gradient; afterwards no parameter has a gradient of it.

        ``found_inf`` (a float on the device, if ``takes_found_inf``): where it is not 0, nothing changes. ``used``:
        parameters for which it is False are left alone, as without a gradient.
        """
        if self.takes_found_inf:
            self._optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        # Both are looked up in every step: schedulers change the settings, load_state_dict() replaces both.
        self._optimizer.state = self._user_optimizer.state
        for group, index in self._groups:
            settings = self._user_optimizer.param_groups[index]
            group.update((name, value) for name, value in settings.items() if name != "params")
        # Frozen parameters may have gradients from no_sync() before they were frozen.
        kept = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        pieces = zip(self._parameters, average.split(self._numels), used or self._all_used, strict=True)
        for parameter, piece, is_used in pieces:
            if is_used and parameter.requires_grad:  # a frozen parameter must neither decay nor follow its momentum
                parameter.grad = shaped(piece, parameter)  # fused optimizers see memory, not shapes
        stepping.now = True
        try:
            self._optimizer.step()
        finally:
            stepping.now = False
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in kept:
            parameter.grad = gradient
        if not self._checked:
            self._checked = True
            for group, index in self._groups:
                _check_step(self._optimizer, group, self._user_optimizer.param_groups[index])


def _check_taken_over(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError unless this optimizer can be split between buckets, and holds what the model trains."""
    name = type(optimizer).__name__
    _check_needs_no_closure(optimizer)
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [each for each, parameter in parameters.items() if parameter not in held]:
        raise ValueError(
            f"Lean optimizer is an {name} without {missing[0]}, and {len(missing)} of {len(parameters)} trained "
            "parameters are missing in all: expected all of them; freeze the others before wrapping"
        )
    if others := sum(parameter.requires_grad for parameter in held.difference(parameters.values())):
        raise ValueError(
            f"Lean optimizer is an {name} with {others} parameters that the model does not train: expected those of "
            "the wrapped module only, since nobody would update the others"
        )


def part_of(
    optimizer: torch.optim.Optimizer, before: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer like this one was ``before`` it was taken over, for some of its parameters."""
    part: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(part).update((name, value) for name, value in before.items() if name not in ("step", "add_param_group"))
    part.param_groups = [{"params": list(parameters)}]
    for hooks in STEP_HOOKS:  # the user's: they run once per step, and not for every bucket
        setattr(part, hooks, OrderedDict())
    return part


def _check_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse a step that changed its group, or state of all parameters together: every bucket has its own step."""
    changed = [
        f"{name!r} in its parameter groups"
        for name, value in group.items()
        if name != "params"
        and value is not (before := settings.get(name))
        and (isinstance(value, torch.Tensor) or value != before)
    ]
    changed += [f"{key!r} in its state, for no parameter" for key in optimizer.state if not torch.is_tensor(key)]
    if changed:
        raise ValueError(
            f"{type(optimizer).__name__}.step() changes {changed[0]}, and every bucket has a step of its own: use an "
            "optimizer that keeps what it remembers in state, by parameter"
        )


def _refuse_new_group(self: torch.optim.Optimizer, param_group: Any) -> None:
    """Replaces ``add_param_group()`` of the user's optimizer."""
    raise ValueError(
        f"{type(self).__name__}.add_param_group() of {len(param_group['params'])} parameters under Lean: its buckets "
        "are those of the module that was wrapped; close() this DataParallel and wrap a module that has them"
    )


def _comparable(value: object) -> object:
    """Return a setting such that equal ones look equal on every rank: never an object's address."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    plain = value is None or isinstance(value, int | float | str | tuple | list)
    return value if plain else type(value).__name__


def _check_needs_no_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        raise ValueError(
            f"{type(optimizer).__name__} calls the model again and again in its step, which cannot be done inside "
            "backward: use an optimizer whose step() needs no closure"
        )


def _step_of_user(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Replaces ``step()`` of the user's optimizer: backward updates every bucket, also that of a closure."""
    if hasattr(self, "found_inf"):  # set by a scaler whose step() was called
        del self.found_inf
        raise RuntimeError(
            "GradScaler.step() under Lean: every bucket was updated in backward. Call follow(scaler) on the model "
            "once, then scaler.scale(loss).backward() alone: no unscale_(), step() or update()"
        )
    before, after = (list(getattr(self, name, {}).values()) for name in STEP_HOOKS)
    result = None
    for hook in before:
        hook(self, (), {})
    if closure is not None:
        with torch.enable_grad():
            result = closure()
    elif _initialises_state(self):
        type(self).step(self)
    for hook in after:
        hook(self, (), {})
    return result


def _initialises_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step() is called by torch.distributed.checkpoint, to have a state to load into: no rate, no gradient."""
    if optimizer.state or any(group.get("lr") != 0 for group in optimizer.param_groups):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)


_step_of_user._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # as schedulers mark a step() that they have seen
