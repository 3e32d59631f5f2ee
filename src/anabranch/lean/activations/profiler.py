"""Activations of a live model kept, recomputed, or a mix chosen from what its own first steps show.

Those steps need little memory: what each block saves, and how long it computes, is measured one block at a time.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Never, Self

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten

from anabranch.lean.activations.blocks import END, REST, ModuleBlock, blocks_of
from anabranch.lean.activations.recompute import BlockRange, PatchedModel, no_side_effects, recompute
from anabranch.lean.activations.solver import Action, BlockCosts, BudgetError
from anabranch.lean.options import Mode
from anabranch.observe.clock import clock_for
from anabranch.observe.step_timer import StepObserver, StepTimer, tensors_in
from anabranch.planning.footprint import CONVOLUTION_WORKSPACE

log = logging.getLogger("anabranch")

PROFILED_STEPS = 2  # the first also warms up

ChoiceMessage = dict[str, Any]  # a choice, or why there is none yet or at all, as a JSON document
Agree = Callable[[ChoiceMessage], ChoiceMessage]
Choosing = Callable[[Sequence[BlockCosts]], ChoiceMessage]

KEEPS_STATE = (
    "if it keeps something for later, such as a cache of keys and values, it cannot be recomputed. Switch that off (in "
    "transformers: use_cache=False), or use Activations(mode='keep')"
)
# Gradients as large as the largest activation that exist at once: an operation's own and its input's.
WORK_TENSORS = 2


class SavedBytes:
    """The bytes of what autograd saves, each storage once; parameters and buffers of ``modules`` do not count."""

    def __init__(self, *modules: nn.Module) -> None:
        self.by_storage: dict[StorageWeakRef, int] = {}  # weak, so that no other storage gets the same address
        held = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
        self._persistent = {StorageWeakRef(tensor.untyped_storage()) for tensor in held}

    def count(self, tensor: torch.Tensor) -> int:
        """Count the storage of a tensor that autograd saves; returns its bytes, or 0 if it was counted before."""
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage in self._persistent or storage in self.by_storage:
            return 0
        self.by_storage[storage] = nbytes = tensor.untyped_storage().nbytes()
        return nbytes


@dataclass
class Saved:
    """What autograd saves in a part of a forward: all bytes, and the largest tensor.

    convolved_nbytes   the tensors of its largest convolution
    """

    nbytes: int = 0
    largest_nbytes: int = 0
    convolved_nbytes: int = 0

    def add(self, other: "Saved") -> None:
        """Include another part."""
        self.nbytes += other.nbytes
        self.largest_nbytes = max(self.largest_nbytes, other.largest_nbytes)
        self.convolved_nbytes = max(self.convolved_nbytes, other.convolved_nbytes)


@dataclass
class BlockProfile:
    """Measurements of one block in one step, over all its runs so far; ``saved`` without its inputs."""

    block: ModuleBlock
    runs: list[tuple[object, object]] = field(default_factory=list)  # clock marks at the start and the end of each run
    saved: Saved = field(default_factory=Saved)
    input_nbytes: int = 0
    saved_output_nbytes: int = 0  # of the last run
    recomputes: bool = True


class BlockProfiler(StepObserver):
    """Measures the blocks of a live model while it trains, without ever keeping the activations of two blocks.

    Every block is recomputed. Before that it runs once more, only to be measured: what autograd wants to save in that
    run is counted and dropped. Random numbers, statistics and buffers are as without it. If a step has several forwards
    before its backward, all are counted.

    convolution_workspace   what a convolution needs for itself, times the bytes of its tensors; None: as on the device
    """

    def __init__(self, model: nn.Module, convolution_workspace: float | None = None) -> None:
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ValueError("the model has no parameters: expected one to train, on the device that it computes on")
        self.steps = 0  # whose backward is over
        self._device = parameter.device
        self._clock = clock_for(self._device)
        self._model = model
        self._backward_end: object | None = None
        self._previous: tuple[BlockProfile, set[StorageWeakRef]] | None = None  # the block before, and its output
        self._part = Saved()  # since a block began or ended
        self._new_step()
        usual = CONVOLUTION_WORKSPACE if self._device.type == "cuda" else 0.0
        self._convolution_workspace = usual if convolution_workspace is None else convolution_workspace
        actions: dict[str, Action] = {block.name: "recompute" for block in blocks_of(model)}
        self._patched = PatchedModel(model, actions, self._run_profiled)
        if not self._patched.patches(model):  # else nothing is outside
            self._patched.patch_forward(model, self._run_outside)
        self._attached = ExitStack()
        self._attached.callback(model.register_forward_pre_hook(self._forward_begins).remove)
        for part in model.modules() if self._convolution_workspace else ():
            if isinstance(part, nn.modules.conv._ConvNd):
                self._attached.callback(part.register_forward_hook(self._convolved, with_kwargs=True).remove)
        timer = StepTimer(self._clock)
        timer.observers.append(self)
        self._attached.enter_context(timer.attached(model))

    def __deepcopy__(self, memo: object) -> Self:
        """A copied model, which computes without gradients, is not profiled."""
        return self

    def undo(self) -> None:
        """Leave the model as it was."""
        self._patched.undo()
        self._attached.close()

    def costs(self) -> list[BlockCosts]:
        """Return the costs measured in the last step, in the order of forward; what is outside all blocks comes first.

        What follows the last block is differentiated first, while everything is on the device: it comes last, as
        ``END``.
        """
        self._clock.settle()
        marks = [mark for _, mark in self._gradients] + [self._backward_end]
        backward_s: dict[str, float] = {}  # with the recomputation
        for number, (name, _) in enumerate(self._gradients):
            backward_s[name] = backward_s.get(name, 0.0) + self._clock.elapsed_s(marks[number], marks[number + 1])
        rest, end = (
            BlockCosts(name, 0.0, 0.0, saved.nbytes, 0, recomputes=False, work_nbytes=self._work_nbytes(saved))
            for name, saved in ((REST, self._rest), (END, self._end))
        )
        profiles = self._profiles.items()
        return [rest, *(self._costs_of(profile, backward_s.get(name, 0.0)) for name, profile in profiles), end]

    def _costs_of(self, profile: BlockProfile, backward_s: float) -> BlockCosts:
        forward_s = sum(self._clock.elapsed_s(*run) for run in profile.runs)
        return BlockCosts(
            profile.block.name,
            forward_s,
            max(backward_s - forward_s, 0.0),
            profile.saved.nbytes,
            profile.input_nbytes,
            profile.block.joins and len(profile.runs) == 1,
            profile.recomputes,
            self._work_nbytes(profile.saved),
            runs=len(profile.runs),
        )

    def _work_nbytes(self, saved: Saved) -> int:
        return WORK_TENSORS * saved.largest_nbytes + int(self._convolution_workspace * saved.convolved_nbytes)

    def _convolved(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: torch.Tensor
    ) -> None:
        """Note the tensors of a convolution's backward: input and weight, with gradients, and the output's gradient.

        The weight is not asked for, since a parametrized one would be computed again.
        """
        weights = [parameter for name, parameter in module.named_parameters() if not name.endswith("bias")]
        given = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
        self._part.add(Saved(convolved_nbytes=output.nbytes + 2 * sum(tensor.nbytes for tensor in (*given, *weights))))

    def _run_outside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's own forward, and count what it saves outside its blocks."""
        # Of nested hooks torch calls the innermost only: inside the user's own, ours would take their place.
        if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return function(*args, **kwargs)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nbytes = self._saved.count(tensor)
            self._part.add(Saved(nbytes, nbytes))
            return tensor.detach()  # the tensor itself would make a cycle with its graph

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return function(*args, **kwargs)

    def _run_profiled(
        self, blocks: BlockRange, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a block twice: once to measure it, once for its result."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        self._rest.add(self._part)
        block = blocks.blocks[0]
        profile = self._measured_run(block, function, args, kwargs)
        blocks.action = "recompute" if profile.recomputes else "keep"
        self._part = Saved()
        try:
            output = blocks.run(function, args, kwargs)
        except RuntimeError as error:
            error.add_note(f"block {block.name!r} was run twice, to measure it: {KEEPS_STATE}")
            raise
        profile.saved.add(Saved(convolved_nbytes=self._part.convolved_nbytes))
        self._part = Saved()
        self._block_ran(profile, output)
        return output

    def _measured_run(
        self, block: ModuleBlock, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> BlockProfile:
        """Run a block only to measure it; its output is dropped."""
        inputs = {StorageWeakRef(tensor.untyped_storage()): tensor for tensor in tensors_in((args, kwargs))}
        versions = [tensor._version for tensor in inputs.values()]

        def is_used(packed: object) -> Never:  # noqa: ARG001 - nothing of this run is differentiated
            raise RuntimeError(
                f"block {block.name!r} was run twice, and something of its first run is used: {KEEPS_STATE}"
            )

        own_args, own_kwargs = tree_unflatten(*tree_flatten((args, dict(kwargs))))  # lists and dicts of its own
        fork = torch.random.fork_rng([self._device] if self._device.type == "cuda" else [])
        with fork, no_side_effects(block.modules) as buffers:
            saved = SavedBytes(*block.modules)
            start = self._clock.mark()
            with saved_tensors_hooks(saved.count, is_used):
                output = function(*own_args, **own_kwargs)
            end = self._clock.mark()
            recomputes = buffers.changed() is None
        if versions != [tensor._version for tensor in inputs.values()]:
            raise ValueError(
                f"block {block.name!r} changes its input in place, so it cannot be recomputed from it: expected an "
                "input that stays as it is; make its first operation one that is not in place"
            )
        input_nbytes = sum(tensor.untyped_storage().nbytes() for tensor in inputs.values())
        if self._previous is not None and not self._previous[1].isdisjoint(inputs):
            before = self._previous[0]  # what it has saved of its output is counted once, as the input of this block
            before.saved.nbytes -= min(before.saved_output_nbytes, input_nbytes)
        outputs = {StorageWeakRef(tensor.untyped_storage()): tensor for tensor in tensors_in(output)}
        inner_nbytes = {storage: nbytes for storage, nbytes in saved.by_storage.items() if storage not in inputs}
        output_nbytes = [tensor.untyped_storage().nbytes() for tensor in outputs.values()]
        profile = self._profiles.setdefault(block.name, BlockProfile(block))
        profile.runs.append((start, end))
        profile.saved.add(Saved(sum(inner_nbytes.values()), max([0, *saved.by_storage.values(), *output_nbytes])))
        profile.input_nbytes += input_nbytes
        profile.saved_output_nbytes = sum(nbytes for storage, nbytes in inner_nbytes.items() if storage in outputs)
        profile.recomputes &= recomputes
        return profile

    def _block_ran(self, profile: BlockProfile, output: Any) -> None:
        """Note a run that was for the result."""
        returned = tensors_in(output)
        self._previous = (profile, {StorageWeakRef(tensor.untyped_storage()) for tensor in returned})

        def first_gradient_is_ready(gradient: torch.Tensor) -> None:  # noqa: ARG001
            handle.remove()  # a second backward through the same graph does not count
            self._gradients.append((profile.block.name, self._clock.mark()))
            self._backward_begins()

        differentiated = [tensor for tensor in returned if tensor.grad_fn is not None]
        handle = register_multi_grad_hook(differentiated, first_gradient_is_ready, mode="any")

    def _new_step(self) -> None:
        self._in_backward = False
        self._profiles: dict[str, BlockProfile] = {}
        self._gradients: list[tuple[str, object]] = []  # blocks and clock marks in the order of backward
        self._saved = SavedBytes(self._model)  # by the model's own forward; of recomputed blocks their inputs
        self._rest, self._end = Saved(), Saved()  # outside all blocks, before the end of the last one and after it

    @_disable_dynamo
    def _forward_begins(self, module: nn.Module, args: object) -> None:  # noqa: ARG002
        if not torch.is_grad_enabled():
            return
        if self._in_backward:  # the profiles are of another step
            self._new_step()
        self._previous = None
        self._part = Saved()

    def on_forward_end(self, averaged: bool) -> Callable[[], None]:  # noqa: ARG002
        (self._rest if self._previous is None else self._end).add(self._part)  # a model without blocks has no end
        self._part = Saved()
        return self._backward_begins  # blocks may get no gradient

    def _backward_begins(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        self._backward_end = self._clock.mark()
        self.steps += 1


class ManagedActivations:
    """A model whose activations are managed by a mode until ``undo()``.

    In mode "auto" the first steps are profiled, with as little memory as possible. The wrapper calls ``choose()``
    before each forward, on all ranks, until one is ``agreed``, which all ranks follow; it is empty before.
    """

    def __init__(self, model: nn.Module, mode: Mode) -> None:
        self.agreed: ChoiceMessage = {}
        self._model = model
        self._patched = recompute(model) if mode == "recompute" else None
        self._profiler = BlockProfiler(model) if mode == "auto" else None

    def undo(self) -> None:
        """Leave the model as it was."""
        for patches in (self._patched, self._profiler):
            if patches is not None:
                patches.undo()
        self._patched = self._profiler = None

    def choose(self, choosing: Choosing, agree: Agree = dict) -> None:
        """Choose the mix if enough steps were profiled.

        ``choosing`` returns what this rank would choose, by the costs of its blocks. ``agree`` turns it into the choice
        of all ranks, which must recompute alike where a block communicates, as SyncBatchNorm does. Raises BudgetError,
        in every call, if no mix keeps within the budget.
        """
        if self._profiler is None:
            return
        enough = self._profiler.steps >= PROFILED_STEPS
        agreed = agree(_own_choice(self._profiler, choosing) if enough else {"wait": True})
        if "wait" in agreed:
            return
        if "error" in agreed:
            raise BudgetError(agreed["error"])
        self.agreed = agreed
        self._profiler.undo()
        self._profiler = None
        self._patched = PatchedModel(self._model, agreed["actions"])


def _own_choice(profiler: BlockProfiler, choosing: Choosing) -> ChoiceMessage:
    """Return this rank's choice, or why none is possible: ranks must agree on that, too, or one would wait."""
    try:
        return choosing(profiler.costs())
    except BudgetError as error:
        return {"error": str(error)}
    except Exception as error:
        log.exception("anabranch: choosing which activations are recomputed has failed")
        return {"error": f"choosing which activations are recomputed failed: {type(error).__name__}: {error}"}
