"""What a step holds, found by running it on tensors without data: every storage is seen to come and go.

torch's meta device runs the model's own Python and torch's own autograd, which lets go of what it saved as it does on a
GPU; only the numbers are missing. So a 30 GiB step is known in a second, on a machine that has no GPU. The same on
real tensors (``device="cpu"``) is the twin in the tests.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anabranch.estimate.gpu_like import gpu_like
from anabranch.estimate.profile import Arrival, Moment, OptimizerCost, Profile, blocks

META = torch.device("meta")
# What cuDNN takes for itself, times the bytes of a convolution's tensors: it turns them to its own layout and back.
CONVOLUTION_WORKSPACE = 1.0
# Models ask about values that tensors without data do not have: whether a mask hides nothing, whether there is a NaN.
ANSWERS = {torch.ops.aten.all: True, torch.ops.aten.any: False}

Loss = Callable[[nn.Module], torch.Tensor]
Build = Callable[[torch.device], tuple[nn.Module, Loss]]
Factory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Event(NamedTuple):
    """A storage that came (+) or went (−), by number; or a gradient that arrived; or a workspace, for a moment."""

    nbytes: int
    storage: int = -1
    arrived: str = ""


class StorageTracker(TorchDispatchMode):
    """While active, notes when storages on ``device`` come and go."""

    def __init__(self, device: torch.device, convolution_workspace: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._device, self._workspace = device.type, convolution_workspace
        self._numbers: dict[int, int] = {}  # of the storages that live, by their address
        self._answers: dict[int, bool] = {}  # to questions that were asked of no data, by their storage's number
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self.number(tensor)  # the batch is older than this mode
        if func is torch.ops.aten._local_scalar_dense.default and self.number(args[0]) in self._answers:
            return self._answers[self.number(args[0])]
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self.number(tensor)
        if func.overloadpacket in ANSWERS and result.is_meta:
            self._answers[self.number(result)] = ANSWERS[func.overloadpacket]
        if self._workspace and "convolution" in func.name():
            touched = sum(tensor.nbytes for tensor in _tensors((args, result)))
            self.events.append(Event(int(self._workspace * touched)))
        return result

    def number(self, tensor: torch.Tensor) -> int:
        """Of the tensor's storage, which is noted if it is new; −1 on another device."""
        if tensor.device.type != self._device:
            return -1
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            nbytes, number = blocks(storage.nbytes()), self._count
            self._count += 1
            self._numbers[address] = number
            self.events.append(Event(nbytes, number))
            weakref.finalize(storage, self._gone, address, number, nbytes).atexit = False
        return self._numbers[address]

    def _gone(self, address: int, number: int, nbytes: int) -> None:
        self._numbers.pop(address, None)
        self.events.append(Event(-nbytes, number))


def probe(
    build: Build,
    optimizer: Factory | None = None,
    *,
    device: torch.device = META,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    offload: bool = False,
    convolution_workspace: float = CONVOLUTION_WORKSPACE,
) -> Profile:
    """The profile of one forward and backward of what ``build(device)`` returns: a model, and the loss as a function
    of it. ``optimizer`` makes an optimizer for parameters; ``foreach`` must be given where a GPU's default is wanted.

    Forward runs inside ``around()``, where activations may be kept otherwise. ``offload``: they live in host memory
    between forward and backward. On the meta device operations are taken to be a GPU's.
    """
    if offload and device.type != "meta":
        raise ValueError(f"offload is asked for on {device}: expected the meta device, where it costs no copies")
    with ExitStack() as stack:
        if device.type == "meta":
            stack.enter_context(device)
            stack.enter_context(gpu_like())
        model, loss = build(device)
        lives = stack.enter_context(StorageTracker(device, convolution_workspace))
        weights = {lives.number(tensor) for tensor in (*model.parameters(), *model.buffers())}
        gradients: set[int] = set()
        handles = _hooked(model, lives, gradients)
        with around(), _on_host(model, device) if offload else nullcontext():
            value = loss(model)
        value.backward()
        del value
        for handle in handles:
            handle.remove()
    kinds = {**dict.fromkeys(gradients, "gradients"), **dict.fromkeys(weights, "weights")}
    arrivals, after = _arrivals(lives.events, kinds, dict(model.named_parameters()))
    nbytes = sum(event.nbytes for event in lives.events if event.nbytes > 0 and event.storage in weights)
    return Profile(nbytes, arrivals, after, optimizer_cost(model, optimizer))


def _arrivals(
    events: Sequence[Event], kinds: Mapping[int, str], parameters: Mapping[str, nn.Parameter]
) -> tuple[tuple[Arrival, ...], Moment]:
    """The gradients in their order with the moments between them, and the moment at the end."""
    live = {"activations": 0, "gradients": 0, "weights": 0}
    found: dict[str, Arrival] = {}
    highest = Moment(0)
    for event in events:
        if event.storage >= 0:
            live[kinds.get(event.storage, "activations")] += event.nbytes
        workspace = event.nbytes if event.storage < 0 else 0
        now = Moment(live["activations"], live["gradients"], workspace)
        highest = max(highest, now, key=lambda moment: moment.nbytes)
        if event.arrived:
            parameter = parameters[event.arrived]
            nbytes = blocks(parameter.numel() * parameter.element_size())
            sparse = parameter.dim() >= 2 and parameter.dtype == torch.float32
            # A gradient that comes in several parts is all there with the last.
            found.pop(event.arrived, None)
            found[event.arrived] = Arrival(event.arrived, parameter.numel(), nbytes, highest, now, sparse)
            highest = now
    return tuple(found.values()), Moment(live["activations"], live["gradients"])


def optimizer_cost(model: nn.Module, optimizer: Factory | None) -> OptimizerCost:
    """What an optimizer of the model's parameters keeps, and what a step needs beyond that, once it has its state."""
    if optimizer is None:
        return OptimizerCost()
    trained = [
        nn.Parameter(torch.empty_like(parameter, device=META))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    with StorageTracker(META) as lives:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
            lives.number(parameter)
        before = sum(event.nbytes for event in lives.events)
        stepping = optimizer(trained)
        stepping.step()
        state = sum(event.nbytes for event in lives.events) - before
        begun = len(lives.events)
        stepping.step()
        levels = list(_levels(lives.events[begun:]))
    return OptimizerCost(state, max(levels, default=0))


def _levels(events: Sequence[Event]) -> Iterator[int]:
    level = 0
    for event in events:
        level += event.nbytes
        yield level


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _hooked(model: nn.Module, lives: StorageTracker, gradients: set[int]) -> list[Any]:
    """Hooks that note each gradient as it comes, and let it go."""

    def arrived(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradients.add(lives.number(parameter.grad))
        lives.events.append(Event(0, arrived=name))
        parameter.grad = None

    return [
        parameter.register_post_accumulate_grad_hook(partial(arrived, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _on_host(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """Saved tensors leave the device and come back when they are needed; weights stay."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.device.type != device.type or tensor.untyped_storage()._cdata in weights:
            return tensor
        return (tensor.shape, tensor.stride(), tensor.dtype)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        shape, stride, dtype = packed
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
