"""What a benchmark trains: a well-known model with a synthetic batch, or the replay of a trace.

A replayed model has real sizes and real autograd, and a backward that takes the recorded time by sleeping. On a machine
without a GPU, computation would compete with communication for a few cores. Sleeping does not: a real network can be
tested with the recorded backward pass of an accelerator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter, sleep
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from anabranch.tools.bench import zoo
from anabranch.values.trace import Trace

# A trace has no shapes. Gradients up to the length of a vocabulary, such as biases and norms, are taken for vectors.
LONGEST_VECTOR = 1 << 15
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True, slots=True)
class Workload:
    """A model to train. ``build`` makes a new one, with its step, which takes the model or a wrapper around it.

    ``batch`` is the number of images or sequences (``unit``) per rank and step.
    """

    name: str
    batch: int
    unit: str
    device: torch.device
    build: Callable[[], tuple[nn.Module, zoo.Step]]


def zoo_workload(text: str, device: torch.device) -> Workload:
    """A model of torchvision or transformers by name, with a batch of its own where the text has one: "gpt2:4"."""
    name, _, own = text.partition(":")
    zoo.check_model(name)
    if own and not (own.isascii() and own.isdigit() and int(own)):
        raise ValueError(f"--model is {text!r}: expected a batch from 1 on after the colon, such as {name}:8")
    unit, default_batch = ("img", zoo.IMAGES[name]) if name in zoo.IMAGES else ("seq", zoo.SEQUENCES[name][0])
    batch = int(own or default_batch)
    return Workload(name, batch, unit, device, partial(zoo.model_and_step, name, device, None, batch))


def replay_workload(name: str, trace: Trace, slower: float = 1.0) -> Workload:
    """A trace replayed on the CPU, ``slower`` times as slowly as it was recorded."""
    replayed = trace.scaled(slower)
    recorded_batch = trace.meta.get("batch", 1)
    batch = recorded_batch if isinstance(recorded_batch, int) else 1

    def build() -> tuple[nn.Module, zoo.Step]:
        def step(called: nn.Module) -> None:
            called.zero_grad(set_to_none=True)
            called().backward()

        return ReplayedModel(replayed), step

    label = f"{name} (replayed" + (f", {slower:g} times slower)" if slower != 1 else ")")
    return Workload(label, batch, "img" if "sequence_length" not in trace.meta else "seq", torch.device("cpu"), build)


class ReplayedModel(nn.Module):
    """One parameter per gradient of ``trace``, with its name and size; the values mean nothing.

    ``forward()`` sleeps for the trace's forward time and returns a scalar. In its backward every gradient appears at
    its recorded time after the start of backward, or as soon after it as the host can make it; values are fixed noise.
    """

    def __init__(self, trace: Trace, seed: int = 0) -> None:
        super().__init__()
        self._forward_s = trace.forward_s
        self._backward_begun_s = 0.0
        longest = max(tensor.numel for tensor in trace.tensors)
        noise = torch.randn(longest, generator=torch.Generator().manual_seed(seed))
        self._layers: list[tuple[nn.Parameter, torch.Tensor, float]] = []
        # Models list their parameters in forward order, and DDP's first buckets go by it.
        for tensor in reversed(trace.tensors):
            if tensor.itemsize not in DTYPES:
                raise ValueError(
                    f"the gradient {tensor.name} has elements of {tensor.itemsize} bytes: expected one of "
                    f"{', '.join(map(str, DTYPES))}"
                )
            gradient = noise[: tensor.numel].to(DTYPES[tensor.itemsize])
            if tensor.numel > LONGEST_VECTOR:
                gradient = gradient[:, None]
            parameter = nn.Parameter(torch.zeros_like(gradient))
            _register(self, tensor.name, parameter)
            self._layers.append((parameter, gradient, tensor.ready_s))

    def forward(self) -> torch.Tensor:
        """A scalar whose backward replays the recorded one."""
        begun_s = perf_counter()
        carried = torch.zeros(())
        for parameter, gradient, ready_s in self._layers:
            carried = _Layer.apply(carried, parameter, gradient, ready_s, self)  # type: ignore[no-untyped-call]
        carried.register_hook(self._begin_backward)
        _sleep_until(begun_s + self._forward_s)
        return carried

    def _begin_backward(self, _: torch.Tensor) -> None:
        self._backward_begun_s = perf_counter()


class _Layer(torch.autograd.Function):
    """The identity in forward; in backward it sleeps until the recorded time and returns the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        carried: torch.Tensor,
        parameter: torch.Tensor,  # noqa: ARG004 (autograd sees it: its gradient is made here)
        gradient: torch.Tensor,
        ready_s: float,
        model: ReplayedModel,
    ) -> torch.Tensor:
        ctx.gradient, ctx.ready_s, ctx.model = gradient, ready_s, model
        return carried.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, carried: torch.Tensor) -> tuple[Any, ...]:
        made = ctx.gradient.clone()  # before it sleeps: the recorded time includes making it
        _sleep_until(ctx.model._backward_begun_s + ctx.ready_s)
        return carried, made, None, None, None


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name, making the modules on the way."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)


def _sleep_until(instant_s: float) -> None:
    while (left_s := instant_s - perf_counter()) > 0:
        sleep(left_s)
