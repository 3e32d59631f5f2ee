"""Contestants under torch.compile, each with a backend of its own, and the steps in which torch compiles them.

torch keeps compiled graphs by the code of a model's forward and by their backend. Models of one class that share a
backend share graphs: DDP would run those of the model alone, which are not cut, and nothing would overlap.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.tools.bench.contestants import DDP_OPTIONS, Contestant
from anabranch.tools.bench.workload import Workload
from anabranch.tools.bench.zoo import Step
from anabranch.tools.report.documents import BASELINE, COMPILED, COMPUTE

BACKEND = "inductor"
MOST_CONTESTANTS = 256  # under torch.compile in one process; torch's own limit is 8 for one function


@dataclass(eq=False)
class CountingBackend:
    """torch's default backend; counts the graphs that it is given; ``steps_s``: the steps in which it was given any."""

    graphs: int = 0
    steps_s: list[float] = field(default_factory=list)

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
        return compiled


def compiled_name(name: str) -> str:
    """The name of a contestant's compiled twin."""
    return f"{name}{COMPILED}"


def compiled_step(step: Step, wrapped: nn.Module, backend: CountingBackend) -> Step:
    """The step, always through this module, compiled; those in which torch compiles are timed.

    The whole step counts: torch traces before it calls the backend, and compiles backward when that first runs.
    """
    called = cast(nn.Module, torch.compile(wrapped, backend=backend))

    def run(_: nn.Module) -> None:
        before, began_s = backend.graphs, perf_counter()
        step(called)
        if backend.graphs > before:
            backend.steps_s.append(perf_counter() - began_s)

    return run


def start_compiler(device: torch.device) -> None:
    """Compile something small, so that the first contestant does not pay for starting the compiler.

    From now on torch compiles every contestant. By default it runs the ninth one of a class without compiling it, and
    DDP's own forward is a function that all wrappers of all models share.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_CONTESTANTS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, MOST_CONTESTANTS)
    torch.compile(lambda x: x + 1, backend=BACKEND)(torch.zeros(1, device=device))


def compiled_references(workload: Workload, backends: Mapping[str, CountingBackend]) -> list[Contestant]:
    """Computing alone and stock DDP, compiled; each keeps its model between its turns."""
    found = []
    for name in (COMPUTE, BASELINE):
        model, step = workload.build()
        wrapped = model if name == COMPUTE else DistributedDataParallel(model, **DDP_OPTIONS)
        run = compiled_step(step, wrapped, backends[compiled_name(name)])
        found.append(Contestant.ready(compiled_name(name), partial(run, wrapped)))
    return found
