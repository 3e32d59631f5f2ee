"""Contestants under torch.compile, each with a backend of its own, which counts the seconds of compiling.

torch keeps compiled graphs by the code of a model's forward and by their backend. Models of one class that share a
backend share graphs: DDP would run those of the model alone, which are not cut, and nothing would overlap.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.bench.contestants import DDP_OPTIONS, Contestant, unwrapped
from anabranch.bench.workload import Workload
from anabranch.bench.zoo import Step
from anabranch.report.documents import BASELINE, COMPUTE

BACKEND = "inductor"


@dataclass(eq=False)
class TimedBackend:
    """torch's default backend; ``seconds`` is what compiling has taken so far."""

    seconds: float = 0.0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        began_s = perf_counter()
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
        self.seconds += perf_counter() - began_s
        return compiled


def compiled_name(name: str) -> str:
    """The name of a contestant's compiled twin."""
    return f"{name}, compiled"


def compiled_step(step: Step, wrapped: nn.Module, backend: TimedBackend) -> Step:
    """The step, always through this module, compiled."""
    called = cast(nn.Module, torch.compile(wrapped, backend=backend))

    def run(_: nn.Module) -> None:
        step(called)

    return run


def compiled_references(workload: Workload, backends: Mapping[str, TimedBackend]) -> list[Contestant]:
    """Computing alone and stock DDP, compiled; each keeps its model between its turns."""
    found = []
    for name in (COMPUTE, BASELINE):
        model, step = workload.build()
        wrapped = DistributedDataParallel(model, **DDP_OPTIONS) if name == BASELINE else model
        run = compiled_step(step, wrapped, backends[compiled_name(name)])
        found.append(Contestant(compiled_name(name), partial(unwrapped, partial(run, wrapped))))
    return found


def compile_seconds(backends: Mapping[str, TimedBackend]) -> str:
    """What compiling each contestant took on this rank, in words."""
    return "; ".join(f"{name} {backend.seconds:.1f} s" for name, backend in backends.items())
