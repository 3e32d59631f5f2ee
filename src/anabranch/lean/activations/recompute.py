"""Carries out the actions chosen for a model's blocks by replacing their forward: no wrappers, so no names change.

A block that is run a second time leaves no trace: on statistics, buffers, other code's hooks, and its arguments.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from anabranch.lean.activations.blocks import ModuleBlock, blocks_of
from anabranch.lean.activations.solver import ACTIONS, Action

COMPILED = "_compiled_call_impl"  # of torch: the attribute that module.compile() sets, and that a call runs
Run = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]  # calls a function with its arguments


class CopiedBuffers:
    """A context in which these modules write to copies of their buffers, so that theirs stay as they are."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._replaced: dict[nn.Module, dict[str, torch.Tensor | None]] = {}

    def __enter__(self) -> None:
        self._replaced = {module: dict(module._buffers) for module in self._modules}
        for module, own in self._replaced.items():
            module._buffers.update((name, None if b is None else b.clone()) for name, b in own.items())

    def __exit__(self, *exception: object) -> None:
        for module, own in self._replaced.items():
            module._buffers.update(own)
        self._replaced = {}


class WatchedBuffers:
    """The buffers of modules as they are now, except for statistics of norms, which may change in every forward."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._before = [
            (inner._buffers, name, f"{prefix}.{name}".lstrip("."), buffer, buffer._version)
            for module in modules
            for prefix, inner in module.named_modules()
            if not isinstance(inner, _NormBase)
            for name, buffer in inner._buffers.items()
            if buffer is not None
        ]

    def changed(self) -> str | None:
        """Return the name of a buffer that was replaced or written to since then; None if there is none."""
        for owner, name, path, buffer, version in self._before:
            if owner.get(name) is not buffer or buffer._version != version:
                return path
        return None


@contextmanager
def no_side_effects(modules: Sequence[nn.Module]) -> Iterator[WatchedBuffers]:
    """A context in which a run of modules changes neither statistics nor buffers and calls no forward hooks.

    Others use forward hooks to capture outputs. Yields the copies of the buffers, to which the run writes.
    """
    inner = dict.fromkeys(inner for module in modules for inner in module.modules())
    hooks = {module: module._forward_hooks for module in inner}
    for module in inner:
        module._forward_hooks = OrderedDict()
    try:
        with CopiedBuffers(inner):
            yield WatchedBuffers(modules)
    finally:
        for module, own in hooks.items():
            module._forward_hooks = own


class BlockRange:
    """Consecutive blocks that have one action together: one block, and those that join it."""

    def __init__(self, action: Action, blocks: Sequence[ModuleBlock]) -> None:
        self.action = action
        self.blocks = list(blocks)
        self._checked = False  # whether recomputing them gives the same again

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that it runs, in order."""
        return [module for block in self.blocks for module in block.modules]

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that runs the blocks, and carry out the action; without gradients, only call it."""
        if not torch.is_grad_enabled() or self.action == "keep":
            return function(*args, **kwargs)
        buffers = None if self._checked else WatchedBuffers(self.modules)
        # checkpoint keeps tensors that it is given one by one, and checks that nothing changes them until backward.
        leaves, structure = tree_flatten((args, dict(kwargs)))
        first = [(args, kwargs)]

        def call(*leaves: Any) -> Any:
            # The first call gets the original lists, since a function may append to them; a later one its own.
            own_args, own_kwargs = first.pop() if first else tree_unflatten(list(leaves), structure)
            return function(*own_args, **own_kwargs)

        # Norms compute as in training. Without statistics autograd would save fewer tensors, which checkpoint refuses.
        inner = (inner for module in self.modules for inner in module.modules())
        contexts = nullcontext(), CopiedBuffers(one for one in inner if isinstance(one, _NormBase) and one.training)
        output = checkpoint(call, *leaves, use_reentrant=False, context_fn=lambda: contexts)
        if buffers is not None and (changed := buffers.changed()) is not None:
            raise ValueError(
                f"block {self.blocks[0].name!r} changes its buffer {changed!r} in forward, so that computing it "
                "again gives something else: use Activations with mode 'keep', or Lean(within=...), which keeps it"
            )
        self._checked = True
        return output


class ModuleForward:
    """Replaces the forward of a module; an object and not a closure, so that a deep copy calls the copied module.

    compiled   what to run instead of its class's forward; torch leaves it out of copies, and this object with it
    """

    def __init__(self, module: nn.Module, run: Run, compiled: Callable[..., Any] | None = None) -> None:
        self._module = module
        self._run = run
        self._compiled = compiled

    @_disable_dynamo  # torch compiles no checkpoint with a context; what is compiled inside stays compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._compiled or partial(type(self._module).forward, self._module), args, kwargs)


def _run_compiled(module: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what ``module.compile()`` has made, while the module has the forward that was compiled."""
    replaced = module.__dict__.pop("forward", None)  # None: in a backward after undo()
    try:
        return compiled(*args, **kwargs)
    finally:
        if replaced is not None:
            module.__dict__["forward"] = replaced


class SequentialForward:
    """Replaces the forward of a Sequential whose children are run in ranges; children in no range run as they are."""

    def __init__(self, module: nn.Module, ranges: Sequence[tuple[BlockRange, Run]]) -> None:
        self._module = module
        self._ranges = {blocks.blocks[0].children[0]: (blocks, run) for blocks, run in ranges}
        self._in_ranges = {name for blocks, _ in ranges for block in blocks.blocks for name in block.children}

    @_disable_dynamo
    def __call__(self, input: Any) -> Any:
        for name, child in self._module._modules.items():  # named_children() leaves out a layer that is used again
            if name in self._ranges:
                blocks, run = self._ranges[name]
                input = run(partial(_run_in_order, blocks.modules), (input,), {})
            elif child is not None and name not in self._in_ranges:
                input = child(input)
        return input


def _run_in_order(modules: Sequence[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


class PatchedModel:
    """A model whose blocks' activations are treated as chosen until ``undo()``; blocks that are kept run as before.

    ``run`` runs a range of blocks that are recomputed; the profiler puts its measurement around it.
    """

    def __init__(self, model: nn.Module, actions: Mapping[str, Action], run: Callable[..., Any] | None = None) -> None:
        blocks = {block.name: block for block in blocks_of(model)}
        _check(blocks, actions)
        self.actions = dict(actions)
        self._replaced: list[tuple[nn.Module, str, Any]] = []  # modules, attributes, and what these were
        self._patch_blocks(blocks, run or BlockRange.run)

    def patches(self, module: nn.Module) -> bool:
        """Whether the forward of this module is replaced."""
        return any(module is replaced for replaced, *_ in self._replaced)

    def undo(self) -> None:
        """Give every module its own forward back."""
        while self._replaced:
            module, attribute, before = self._replaced.pop()
            if before is None:
                del module.__dict__[attribute]
            else:
                module.__dict__[attribute] = before

    def _patch_blocks(self, blocks: Mapping[str, ModuleBlock], run: Callable[..., Any]) -> None:
        in_sequential: dict[nn.Module, list[BlockRange]] = {}
        for name, block in blocks.items():
            action = self.actions.get(name)
            if action is None or action == "keep":
                continue  # what compiles the whole model compiles it, too
            if action == "join":
                in_sequential[block.module][-1].blocks.append(block)
                continue
            own = BlockRange(action, [block])
            if block.children:
                in_sequential.setdefault(block.module, []).append(own)
            else:
                self._patch_block(block.module, partial(run, own))
        for module, ranges in in_sequential.items():
            self._replace(module, "forward", SequentialForward(module, [(each, partial(run, each)) for each in ranges]))

    def _patch_block(self, module: nn.Module, run: Run) -> None:
        self.patch_forward(module, run)  # all that torch looks at where it compiles what calls the module
        compiled = module.__dict__.get(COMPILED)
        if compiled is not None:
            ours = ModuleForward(module, run, partial(_run_compiled, module, compiled))
            self._replace(module, COMPILED, ours, compiled)

    def patch_forward(self, module: nn.Module, run: Run) -> None:
        """Let ``run`` call the module's forward."""
        # What torch.compile(module) returns has a compiled forward; only a program that compiles imports its class.
        compiled = module.__dict__["forward"] if "_orig_mod" in module._modules else None
        self._replace(module, "forward", ModuleForward(module, run, compiled), compiled)

    def _replace(
        self, module: nn.Module, attribute: str, forward: Callable[..., Any], before: Callable[..., Any] | None = None
    ) -> None:
        if module.__dict__.get(attribute) is not before:
            self.undo()
            raise ValueError(
                f"the forward of a {type(module).__name__} is already replaced: expected its class's own; undo "
                "whatever replaced it, or choose an action for other blocks"
            )
        setattr(module, attribute, forward)
        self._replaced.append((module, attribute, before))


def recompute(model: nn.Module) -> PatchedModel:
    """Recompute every block of ``model`` in backward, each from its own input."""
    return PatchedModel(model, dict.fromkeys((block.name for block in blocks_of(model)), "recompute"))


def _check(blocks: Mapping[str, ModuleBlock], actions: Mapping[str, Action]) -> None:
    """Raise ValueError unless these blocks can have these actions; what is outside all blocks can only be kept."""
    known, before = ", ".join(blocks) or "none: it has no repeated blocks", "keep"
    for name, action in actions.items():
        if action not in ACTIONS:
            raise ValueError(f"action of block {name!r} is {action!r}: expected one of {', '.join(ACTIONS)}")
        if action != "keep" and name not in blocks:
            raise ValueError(f"no block is called {name!r}: expected one of blocks_of(model), which are {known}")
    for name, block in blocks.items():
        action = actions.get(name, "keep")
        if action == "join" and not (block.joins and before != "keep"):
            raise ValueError(f"block {name!r} cannot join the one before it: expected that to be recomputed too")
        before = action
