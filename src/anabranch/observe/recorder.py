"""Trace from a live model: when each gradient is ready, seen by hooks that never wait for the device."""

import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from anabranch.checks import Scalar
from anabranch.ddp.reducer import tensors_in
from anabranch.observe.clock import clock_for
from anabranch.trace import TensorSpec, Trace


def record(
    model: nn.Module,
    step: Callable[[], object],
    steps: int = 20,
    warmup: int = 5,
    meta: Mapping[str, Scalar] | None = None,
) -> Trace:
    """The trace of ``model`` over ``steps`` calls of ``step``, after ``warmup`` calls that are not counted.

    ``step`` runs one forward and one backward of ``model``; what else it does (optimizer, data) is not in the trace.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps is {steps} and warmup {warmup}: expected at least 1 and 0")
    for _ in range(warmup):
        step()
    with Recorder(dict(model.named_parameters()), model) as recorder:
        for _ in range(steps):
            step()
    return recorder.trace(meta)


@dataclass(slots=True)
class _Step:
    """Marks of one forward and backward; gradients in the order in which their hooks fired."""

    forward: object
    backward: object | None = None
    ready: dict[str, object] = field(default_factory=dict)


class Recorder:
    """Watches forward and backward while it is entered, one mark per gradient and step.

    Forward lasts from the module's call to the first gradient of its output, so it includes the loss. A step without
    backward is not counted. With ``module`` it watches every call of that module; without, its owner calls
    ``forward_begins`` and ``forward_ended``. Sees gradients as this rank has computed them, before they are averaged.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], module: nn.Module | None = None) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        if not self._parameters:
            raise ValueError("no parameter requires a gradient: nothing to record")
        self._module = module
        self._device = next(iter(self._parameters.values())).device
        self._clock = clock_for(self._device)
        self._input = ""  # shape and dtype of the module's first tensor, which tells the batch
        self._steps: list[_Step] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._marker(name)))
        if self._module is not None:
            self._handles += [
                self._module.register_forward_pre_hook(self._called, with_kwargs=True),
                self._module.register_forward_hook(lambda _module, _args, output: self.forward_ended(output)),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def steps(self) -> int:
        """How many forward and backward passes have been seen."""
        return len(self._whole())

    def trace(self, meta: Mapping[str, Scalar] | None = None) -> Trace:
        """The median step, with the interquartile range of each instant; waits for the device once.

        A gradient that some step did not produce counts as ready when that step's backward ended.
        """
        self._clock.settle()
        steps = self._whole()
        if not steps:
            raise ValueError(
                "no step was recorded: run forward and backward of the module while the recorder is entered"
            )
        ready = np.array([self._ready_s(step) for step in steps])
        forward = [self._clock.between(step.forward, step.backward) for step in steps]
        # Host order breaks ties: a weight and its bias are often ready at the same instant.
        names = [*steps[-1].ready, *(name for name in self._parameters if name not in steps[-1].ready)]
        columns = {name: index for index, name in enumerate(self._parameters)}
        median = np.median(ready, axis=0)
        spread = np.subtract(*np.percentile(ready, [75, 25], axis=0))
        tensors = []
        for name in sorted(names, key=lambda name: median[columns[name]]):
            parameter, column = self._parameters[name], columns[name]
            dtype = str(parameter.dtype).removeprefix("torch.")
            tensors.append(
                TensorSpec(
                    name, parameter.numel(), parameter.element_size(), float(median[column]), dtype,
                    float(spread[column]),
                )
            )  # fmt: skip
        facts = {**_facts(self._device), **self._order_facts(steps), "steps": len(steps), **(meta or {})}
        if self._input:
            facts["input"] = self._input
        facts["forward_spread_s"] = float(np.subtract(*np.percentile(forward, [75, 25])))
        return Trace(tuple(tensors), float(np.median(forward)), facts)

    def _whole(self) -> list[_Step]:
        return [step for step in self._steps if step.ready and step.backward is not None]

    def _ready_s(self, step: _Step) -> list[float]:
        seconds = {name: max(0.0, self._clock.between(step.backward, mark)) for name, mark in step.ready.items()}
        last_s = max(seconds.values())
        return [seconds.get(name, last_s) for name in self._parameters]

    def _order_facts(self, steps: list[_Step]) -> dict[str, Scalar]:
        """What to know about gradients that came in another order, or not at all, in some steps."""
        facts: dict[str, Scalar] = {}
        first = list(steps[0].ready)
        for step in steps[1:]:
            order = list(step.ready)
            if order != first:
                name = next((a for a, b in zip(first, order, strict=False) if a != b), (first + order)[-1])
                facts["order_changed_at"] = name
                warnings.warn(
                    f"gradients became ready in another order from step to step, first at {name}: "
                    "a plan made from this trace may wait for gradients that come late",
                    stacklevel=3,
                )
                break
        if unused := [name for name in self._parameters if any(name not in step.ready for step in steps)]:
            facts["without_gradient"] = f"{unused[0]}" + (f" and {len(unused) - 1} more" if len(unused) > 1 else "")
        return facts

    def _called(self, module: nn.Module, args: object, kwargs: object) -> None:  # noqa: ARG002
        if not self._input and (tensors := tensors_in([args, kwargs])):
            self._input = f"{'x'.join(map(str, tensors[0].shape))} {str(tensors[0].dtype).removeprefix('torch.')}"
        self.forward_begins()

    def forward_begins(self) -> None:
        """A forward begins; the step before it counts only if it had a backward."""
        if self._steps and not self._steps[-1].ready:
            self._steps.pop()
        self._steps.append(_Step(self._clock.mark()))

    def forward_ended(self, output: object) -> None:
        """A forward has returned ``output``."""
        if not self._steps:
            return
        step = self._steps[-1]

        def backward_begins(gradient: torch.Tensor) -> None:  # noqa: ARG001
            if step.backward is None:
                step.backward = self._clock.mark()

        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]  # leaves keep their hooks
        for tensor in tensors:
            tensor.register_hook(backward_begins)
        if not tensors:  # an output we cannot look into: the end of forward is the best we know
            step.backward = self._clock.mark()

    def _marker(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:  # noqa: ARG001
            if self._steps and name not in self._steps[-1].ready:
                self._steps[-1].ready[name] = self._clock.mark()

        return ready


def _facts(device: torch.device) -> dict[str, Scalar]:
    """Where and with what something was measured."""
    facts: dict[str, Scalar] = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"CPU {platform.machine()}, {torch.get_num_threads()} threads",
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["matmul_tf32"] = torch.backends.cuda.matmul.allow_tf32
        facts["cudnn_tf32"] = torch.backends.cudnn.allow_tf32
    return facts
