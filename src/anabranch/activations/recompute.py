"""Carries out what was chosen for a model's blocks, in place of their forward: no wrappers, so no names change."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anabranch.activations.blocks import END, REST, Unit, blocks_of
from anabranch.activations.offloader import Offloader
from anabranch.activations.side_effects import Buffers, Call, StatisticsHeld
from anabranch.activations.solver import ACTIONS, OFFLOADED, Action

Last = tuple[str, int]  # the name of the block that is the last to run in a forward, and how often it runs in it


class Stretch:
    """One or more units that are treated as one."""

    def __init__(self, action: Action, units: Sequence[Unit], offloader: Offloader | None) -> None:
        self.action, self.units, self._offloader = action, list(units), offloader
        self.then: Callable[[], None] | None = None  # called when they have run
        self._held: StatisticsHeld | None = None

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that it runs."""
        return [part for unit in self.units for part in unit.parts]

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that runs the units, with their activations treated as chosen."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        output = self._treated(function, args, kwargs)
        if self.then is not None:
            self.then()
        return output

    def _treated(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._hooks():
            if self.action in ("keep", "offload"):
                return function(*args, **kwargs)
            before = None if self._held is not None else Buffers(self.parts)
            held = self._held = self._held or StatisticsHeld(self.parts)
            call = Call(function, args, kwargs)  # so that no name of theirs can meet one of checkpoint's own
            output = checkpoint(
                call, *call.take_tensors(), use_reentrant=False, context_fn=lambda: (nullcontext(), held)
            )
            if before is not None and (changed := before.changed()) is not None:
                raise ValueError(
                    f"block {self.units[0].name!r} changes its buffer {changed!r} in forward, so that computing it "
                    "again gives something else: use Activations with mode 'keep', 'offload' or 'auto'"
                )
            return output

    def _hooks(self) -> AbstractContextManager[None]:
        if self._offloader is None:
            return nullcontext()
        if self.action in OFFLOADED:
            return self._offloader.hooks(*self.parts)
        return self._offloader.keep()


class Outside(Stretch):
    """What is saved outside all units: offloaded, but kept once ``ran`` was called ``runs`` times in a forward."""

    def __init__(self, model: nn.Module, offloader: Offloader | None, runs: int) -> None:
        super().__init__("offload", [Unit(REST, model)], offloader)
        self._runs, self._left = runs, 0
        self._open: ExitStack | None = None  # while the model's forward runs

    def ran(self) -> None:
        """The unit that is the last to run has; that was the last time, if it has run as often as it does."""
        self._left -= 1
        if self._left == 0 and self._open is not None and self._offloader is not None:
            self._open.enter_context(self._offloader.keep())

    def _treated(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._left = self._runs
        try:
            with self._hooks(), ExitStack() as self._open:
                return function(*args, **kwargs)
        finally:
            self._open = None


class ModuleForward:
    """The forward of a module that is a unit; an object, not a closure, so that a deep copy calls the copied module."""

    def __init__(self, module: nn.Module, stretch: Stretch) -> None:
        self._module, self._stretch = module, stretch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self._stretch.run(partial(type(self._module).forward, self._module), args, kwargs)


class SequentialForward:
    """The forward of a Sequential whose children are treated in stretches; those in none run as they are."""

    def __init__(self, module: nn.Module, stretches: Sequence[Stretch]) -> None:
        self._module = module
        self._stretches = {unit.children[0]: stretch for stretch in stretches for unit in stretch.units[:1]}
        self._in_stretches = {name for stretch in stretches for unit in stretch.units for name in unit.children}

    def __call__(self, input: Any) -> Any:
        """Run them in order."""
        for name, child in self._module._modules.items():  # named_children() leaves out a layer that is used again
            if name in self._stretches:
                stretch = self._stretches[name]
                input = stretch.run(partial(_in_order, stretch.parts), (input,), {})
            elif child is not None and name not in self._in_stretches:
                input = child(input)
        return input


def _in_order(parts: Sequence[nn.Module], value: Any) -> Any:
    for part in parts:
        value = part(value)
    return value


class PatchedModel:
    """A model whose blocks' activations are treated as chosen until ``undo()``; blocks without an action are let be.

    What is saved outside all blocks has an action as ``REST``. What is saved after the last block has run can be kept
    all the same, as ``END``: ``last`` says which block that is.
    """

    def __init__(
        self,
        model: nn.Module,
        actions: Mapping[str, Action],
        offloader: Offloader | None = None,
        stretch: Callable[[Action, Sequence[Unit], Offloader | None], Stretch] = Stretch,
        last: Last | None = None,
    ) -> None:
        units = {unit.name: unit for unit in blocks_of(model)}
        _check(units, actions, offloader)
        self.actions = dict(actions)
        self._patched: list[nn.Module] = []
        sequentials: dict[nn.Module, list[Stretch]] = {}
        stretches_of: dict[str, Stretch] = {}
        for name, unit in units.items():
            action = actions.get(name)
            if action is None:
                continue
            if action == "join":
                stretches_of[name] = sequentials[unit.module][-1]
                stretches_of[name].units.append(unit)
                continue
            own = stretches_of[name] = stretch(action, [unit], offloader)
            if unit.children:
                sequentials.setdefault(unit.module, []).append(own)
            else:
                self._patch(unit.module, ModuleForward(unit.module, own))
        for module, stretches in sequentials.items():
            self._patch(module, SequentialForward(module, stretches))
        if actions.get(REST, "keep") == "offload" and model not in self._patched:  # else nothing is outside
            name, runs = last or ("", 0)
            outside = Outside(model, offloader, runs)
            self._patch(model, ModuleForward(model, outside))
            if name in stretches_of and actions.get(END) == "keep":
                stretches_of[name].then = outside.ran

    def undo(self) -> None:
        """Give every module its own forward back."""
        while self._patched:
            del self._patched.pop().__dict__["forward"]

    def _patch(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        if "forward" in module.__dict__:
            self.undo()
            raise ValueError(
                f"the forward of a {type(module).__name__} is already replaced: expected its class's own; undo "
                "whatever replaced it, or choose an action for other blocks"
            )
        module.forward = forward
        self._patched.append(module)


def recompute(model: nn.Module, names: Sequence[str] | None = None) -> PatchedModel:
    """Recompute the named units in backward, all of them if no names are given, each from its own input."""
    chosen = [unit.name for unit in blocks_of(model)] if names is None else names
    return PatchedModel(model, dict.fromkeys(chosen, "recompute"))


def _check(units: Mapping[str, Unit], actions: Mapping[str, Action], offloader: Offloader | None) -> None:
    for name, action in actions.items():
        if name in (REST, END) and action not in ("keep", "offload"):
            raise ValueError(f"action of what is outside all blocks is {action!r}: expected 'keep' or 'offload'")
        if name not in (REST, END) and name not in units:
            known = ", ".join(units) or "none: it has no repeated blocks"
            raise ValueError(f"no block is called {name!r}: expected one of blocks_of(model), which are {known}")
        if action not in ACTIONS:
            raise ValueError(f"action of block {name!r} is {action!r}: expected one of {', '.join(ACTIONS)}")
        if offloader is None and action in OFFLOADED:
            raise ValueError(f"action of block {name!r} is {action!r}, but there is no offloader: give one")
    before: Action | None = None
    for name, unit in units.items():
        chosen = actions.get(name)
        if chosen == "join" and not (unit.joins and before in ("recompute", "recompute+offload", "join")):
            raise ValueError(f"block {name!r} cannot join the one before it: expected that to be recomputed too")
        before = chosen
