"""What ``Lean(within=...)`` would choose for a model, without a GPU.

The blocks are profiled as in a training, on tensors without data. How long they take follows from what they compute and
touch, at the speeds of an assumed device.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from anabranch.exchange.compression import may_be_sparse
from anabranch.lean.activations.profiler import PROFILED_STEPS, BlockProfiler
from anabranch.lean.activations.solver import BlockCosts
from anabranch.lean.memory_budget import Held, WithinChoice, choose_within, gradients_of
from anabranch.lean.options import OptimizerFactory
from anabranch.observe.clock import HostClock
from anabranch.planning.memory import CONVOLUTION_WORKSPACE, Footprint, Setting, TrainingMode, allocated_nbytes
from anabranch.tools.predict.memory.autocast import autocast_to_bfloat16
from anabranch.tools.predict.memory.probe import META, Build, StorageTracker, optimizer_memory, saving_as_on_gpu


class Device(NamedTuple):
    """Speeds of a device: operations a second in 32 and in 16 bits, bytes a second in its memory."""

    fp32_per_s: float = 50e12
    half_per_s: float = 400e12
    memory_nbytes_per_s: float = 3e12

    def __str__(self) -> str:
        return (
            f"{self.fp32_per_s / 1e12:g} TFLOP/s in fp32, {self.half_per_s / 1e12:g} in 16 bits, "
            f"{self.memory_nbytes_per_s / 1e12:g} TB/s of memory"
        )


ASSUMED = Device()  # an H100 or H200 in practice


class AssumedClock(TorchDispatchMode, HostClock):
    """While active, a clock that goes on by what each operation would take: its arithmetic, or its bytes if longer."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._now_s = 0.0

    def mark(self) -> float:
        return self._now_s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:  # touches nothing
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        count = flop_registry.get(func.overloadpacket)
        operations = 0 if count is None else count(*args, **kwargs, out_val=result)
        half = bool(tensors) and tensors[0].itemsize <= 2
        rate = self._device.half_per_s if half else self._device.fp32_per_s
        touched_nbytes = sum(tensor.nbytes for tensor in tensors)
        self._now_s += max(operations / rate, touched_nbytes / self._device.memory_nbytes_per_s)
        return result


class Profiled(NamedTuple):
    """A model, and the costs of its blocks on a device."""

    model: nn.Module
    blocks: Sequence[BlockCosts]
    device: Device


def chosen_within(
    profiled: Profiled, optimizer: OptimizerFactory, exchange: tuple[TrainingMode, Setting], budget_nbytes: int
) -> tuple[WithinChoice, Footprint]:
    """What Lean would choose within the budget, and its peak; BudgetError if nothing fits."""
    model, blocks, device = profiled
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    trained: Mapping[str, nn.Parameter] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    held = Held(
        sum(allocated_nbytes(tensor.nbytes) for tensor in tensors.values()),
        optimizer_memory(model, optimizer),
        gradients_of(model, trained, may_be_sparse),
        [exchange],
    )
    storages = held.storages(blocks, device.memory_nbytes_per_s)
    found = choose_within(blocks, storages, budget_nbytes)
    storage = next(storage for storage in storages if storage.residuals == found.residuals)
    return found, storage.peak(blocks, found.actions)


def profile(build: Build, *, half: bool = False, device: Device = ASSUMED) -> Profiled:
    """Profile the blocks of what ``build(device)`` returns; ``half``: forward runs as under autocast to bfloat16."""
    with ExitStack() as stack:
        stack.enter_context(META)
        stack.enter_context(saving_as_on_gpu())
        cast_weights = stack.enter_context(autocast_to_bfloat16()) if half else None
        model, loss = build(META)
        stack.enter_context(StorageTracker(META))  # answers what models ask about values
        clock = AssumedClock(device)
        profiler = BlockProfiler(model, CONVOLUTION_WORKSPACE, clock)
        stack.enter_context(clock)
        for _ in range(PROFILED_STEPS):
            value = loss(model)
            if cast_weights is not None:
                cast_weights.forget()
            value.backward()
            model.zero_grad()
        costs = profiler.costs()
        profiler.undo()
    return Profiled(model, costs, device)
