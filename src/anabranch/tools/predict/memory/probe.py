"""Finds what a training step holds in memory by running it on tensors without data, and tracking every storage.

torch's meta device runs the model's own Python and torch's own autograd, which frees what it saved as it does on a GPU;
only the numbers are missing. So the memory of a 30 GiB step is known in a second, on a machine without a GPU. The same
on real tensors (``device="cpu"``) is the twin in the tests.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anabranch.exchange.compression import may_be_sparse
from anabranch.lean.optimizer_memory import next_step_nbytes, state_nbytes
from anabranch.lean.options import OptimizerFactory
from anabranch.planning.footprint import (
    CONVOLUTION_WORKSPACE,
    MemoryUse,
    OptimizerMemory,
    ReadyGradient,
    StepProfile,
    allocated_nbytes,
)
from anabranch.tools.predict.memory.autocast import autocast_to_bfloat16

META = torch.device("meta")
# Models ask about values that tensors without data do not have: whether a mask hides nothing, whether there is a NaN.
ANSWERS = {torch.ops.aten.all: True, torch.ops.aten.any: False}

FLASH_DTYPES = (torch.float16, torch.bfloat16)

Loss = Callable[[nn.Module], torch.Tensor]
Build = Callable[[torch.device], tuple[nn.Module, Loss]]


class AllocationEvent(NamedTuple):
    """One of three: a storage allocated (+) or freed (−), a gradient ready, or the workspace of one operation."""

    nbytes: int
    storage: int = -1
    gradient: str = ""


class StorageTracker(TorchDispatchMode):
    """While active, records when storages on ``device`` are allocated and freed."""

    def __init__(self, device: torch.device, convolution_workspace: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[AllocationEvent] = []
        self._device_type = device.type
        self._convolution_workspace = convolution_workspace
        self._numbers: dict[int, int] = {}  # of live storages, by address
        self._answers: dict[int, bool] = {}  # to questions about values, by the number of the storage that asks
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self.number_of(tensor)  # a tensor such as the batch may be older than this tracker
        if func is torch.ops.aten._local_scalar_dense.default and self.number_of(args[0]) in self._answers:
            return self._answers[self.number_of(args[0])]
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self.number_of(tensor)
        if func.overloadpacket in ANSWERS and result.is_meta:
            self._answers[self.number_of(result)] = ANSWERS[func.overloadpacket]
        if self._convolution_workspace and "convolution" in func.name():
            touched_nbytes = sum(tensor.nbytes for tensor in _tensors((args, result)))
            self.events.append(AllocationEvent(int(self._convolution_workspace * touched_nbytes)))
        return result

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the tensor's storage, which is recorded if it is new; −1 on another device."""
        if tensor.device.type != self._device_type:
            return -1
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            number = self._count
            nbytes = allocated_nbytes(storage.nbytes())
            self._count += 1
            self._numbers[address] = number
            self.events.append(AllocationEvent(nbytes, number))
            weakref.finalize(storage, self._freed, address, number, nbytes).atexit = False
        return self._numbers[address]

    def _freed(self, address: int, number: int, nbytes: int) -> None:
        self._numbers.pop(address, None)
        self.events.append(AllocationEvent(-nbytes, number))


def probe(
    build: Build,
    optimizer: OptimizerFactory | None = None,
    *,
    device: torch.device = META,
    half: bool = False,
    convolution_workspace: float = CONVOLUTION_WORKSPACE,
) -> StepProfile:
    """Profile one forward and backward of what ``build(device)`` returns: a model, and its loss as a function of it.

    ``optimizer`` makes an optimizer for parameters; give it ``foreach`` where a GPU's default is wanted. ``half``:
    forward runs as under autocast to bfloat16. On the meta device, operations save what they save on a GPU.
    """
    with ExitStack() as stack:
        if device.type == "meta":
            stack.enter_context(device)
            stack.enter_context(saving_as_on_gpu())
        end_forward = stack.enter_context(autocast_to_bfloat16()) if half else lambda: None
        model, loss = build(device)
        tracker = stack.enter_context(StorageTracker(device, convolution_workspace))
        weights = {tracker.number_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        gradients: set[int] = set()
        handles = _record_gradients(model, tracker, gradients)
        value = loss(model)
        end_forward()
        value.backward()
        del value
        for handle in handles:
            handle.remove()
    kinds = {**dict.fromkeys(gradients, "gradients"), **dict.fromkeys(weights, "weights")}
    ready, after_backward = _ready_gradients(tracker.events, kinds, dict(model.named_parameters()))
    weights_nbytes = sum(event.nbytes for event in tracker.events if event.nbytes > 0 and event.storage in weights)
    optimizer_nbytes = optimizer_memory(model, optimizer)
    return StepProfile(weights_nbytes, ready, after_backward, optimizer_nbytes)


def _ready_gradients(
    events: Sequence[AllocationEvent], kinds: Mapping[int, str], parameters: Mapping[str, nn.Parameter]
) -> tuple[tuple[ReadyGradient, ...], MemoryUse]:
    """Return the gradients in the order in which they were ready, and memory in use at the end."""
    live = {"activations": 0, "gradients": 0, "weights": 0}
    found: dict[str, ReadyGradient] = {}
    peak = MemoryUse(0)
    for event in events:
        if event.storage >= 0:
            live[kinds.get(event.storage, "activations")] += event.nbytes
        workspace = event.nbytes if event.storage < 0 else 0
        now = MemoryUse(live["activations"], live["gradients"], workspace)
        peak = max(peak, now, key=lambda use: use.nbytes)
        if event.gradient:
            parameter = parameters[event.gradient]
            nbytes = allocated_nbytes(parameter.numel() * parameter.element_size())
            sparse = may_be_sparse(parameter)
            found.pop(event.gradient, None)  # a gradient that comes in several parts is ready with the last one
            found[event.gradient] = ReadyGradient(event.gradient, parameter.numel(), nbytes, peak, now, sparse)
            peak = now
    return tuple(found.values()), MemoryUse(live["activations"], live["gradients"])


def optimizer_memory(model: nn.Module, optimizer: OptimizerFactory | None) -> OptimizerMemory:
    """Return what an optimizer of the model's parameters keeps, and the workspace of a step once it has state."""
    if optimizer is None:
        return OptimizerMemory()
    trained = [
        nn.Parameter(torch.empty_like(parameter, device=META))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    made = optimizer(trained)
    made.step()
    return OptimizerMemory(state_nbytes(made), next_step_nbytes(made))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _record_gradients(model: nn.Module, tracker: StorageTracker, gradients: set[int]) -> list[Any]:
    """Hook every parameter: record its gradient when it is ready, and free it."""

    def ready(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradients.add(tracker.number_of(parameter.grad))
        tracker.events.append(AllocationEvent(0, gradient=name))
        parameter.grad = None

    return [
        parameter.register_post_accumulate_grad_hook(partial(ready, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


# ------------------------------------------------------------------------------- operations that save less on a GPU


def saving_as_on_gpu() -> AbstractContextManager[Any]:
    """While open, ``torch.nn.functional``'s dropout and attention save what they save on a GPU; on meta tensors only.

    Below autograd nothing shows for which device a model is meant. On a GPU, dropout saves a mask of one byte per
    element, elsewhere one of four. Attention saves its inputs and outputs, elsewhere with dropout all probabilities.
    Where several queries share a key (``enable_gqa``), of torch's fused kernels only FlashAttention can be used, which
    knows numbers of 16 bits and no mask: all else is computed step by step, and saves all probabilities on a GPU, too.
    """
    return patch.multiple(functional, dropout=_dropout, scaled_dot_product_attention=_attention)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:  # noqa: ARG001
    if not training or p == 0:
        return input
    result: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return result


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    operations: Any = torch.ops.aten
    result: torch.Tensor
    if not enable_gqa or key.shape[-3] == query.shape[-3]:
        mask = attn_mask
        if mask is not None:
            mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype) if mask.dtype == torch.bool else mask
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
        efficient = operations._scaled_dot_product_efficient_attention
        result = efficient(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]
    elif query.dtype in FLASH_DTYPES and attn_mask is None:
        result = operations._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    else:
        step_by_step = operations._scaled_dot_product_attention_math
        result = step_by_step(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)[0]
    return result
