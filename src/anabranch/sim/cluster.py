"""A whole cluster: the same step at many world sizes, with ranks that are not all equally fast."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from anabranch.checks import check_positive
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.sim.iteration import finish_s
from anabranch.trace import Trace

Planner = Callable[[Trace, Network], Plan]
Pricing = Callable[[Network], Network]
Scaling = Literal["weak", "strong"]

MAX_JITTER = 3.0  # ranks that differ twentyfold; beyond, nothing is being modelled any more


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """One planner at one world size.

    ``speedup`` is throughput against one rank working alone on the same trace; ``efficiency`` is speedup/world_size.
    """

    world_size: int
    planner: str
    buckets: int
    lanes: int
    iteration_s: float
    exposed_s: float
    speedup: float
    efficiency: float


def sweep(
    trace: Trace,
    network: Network,
    world_sizes: Iterable[int],
    planners: Mapping[str, Planner],
    *,
    scaling: Scaling = "weak",
    jitter: float = 0.0,
    stragglers: int = 0,
    straggler_factor: float = 1.0,
    seed: int = 0,
    pricing: Pricing | None = None,
) -> Iterator[ScalePoint]:
    """Every planner at every world size, on ``network`` carried to that size.

    ``pricing`` adds what the carried network cannot know: the costs of further collectives at its size.

    Weak scaling keeps the batch per rank, so the trace as it is. Strong scaling keeps the global batch: each of N ranks
    computes 1/N of it, and computing time is taken to be proportional to the batch. Plans are made from the quiet
    trace, as a planner would see it, and run with jitter and stragglers (``slowest_rank``).
    """
    if scaling not in ("weak", "strong"):
        raise ValueError(f"scaling is {scaling!r}: expected 'weak' or 'strong'")
    alone_s = trace.forward_s + trace.backward_s
    for world_size in world_sizes:
        here = network.at(world_size)
        here = here if pricing is None else pricing(here)
        quiet = trace.scaled(1 / world_size) if scaling == "strong" else trace
        real = quiet
        if jitter or stragglers:
            real = slowest_rank(quiet, world_size, jitter, stragglers, straggler_factor, seed)
        share = 1 if scaling == "weak" else 1 / world_size  # of the work in ``trace``, done by each rank
        for name, planner in planners.items():
            plan = planner(quiet, here)
            done_s = finish_s(real, plan, here)
            iteration_s = real.forward_s + done_s
            speedup = world_size * share * alone_s / iteration_s if iteration_s else float(world_size)
            yield ScalePoint(
                world_size, name, len(plan), plan.lanes, iteration_s, done_s - real.backward_s,
                speedup, speedup / world_size,
            )  # fmt: skip


def slowest_rank(
    trace: Trace,
    world_size: int,
    jitter: float,
    stragglers: int = 0,
    straggler_factor: float = 1.0,
    seed: int = 0,
) -> Trace:
    """The trace that a collective sees when ranks differ: each gradient is ready when the last rank has it.

    Each piece of each rank's computation takes exp(jitter·z) times as long, z standard normal; the first ``stragglers``
    ranks compute ``straggler_factor`` times as long besides. The same seed gives the same trace.
    """
    if not 0 <= jitter <= MAX_JITTER:
        raise ValueError(
            f"jitter is {jitter}: expected 0 to {MAX_JITTER:g}, the spread of the logarithm of computing time"
        )
    check_positive("straggler_factor", straggler_factor)
    if not 0 <= stragglers <= world_size:
        raise ValueError(f"stragglers is {stragglers}: expected 0 to {world_size}, the world size")
    rng = np.random.default_rng(seed)
    ready = np.array([tensor.ready_s for tensor in trace.tensors])
    pieces = np.diff(ready, prepend=0.0)
    latest = np.zeros_like(ready)
    forward_s = 0.0
    for rank in range(world_size):  # rank by rank: 2048 ranks of 10,000 tensors must not need gigabytes
        factor = straggler_factor if rank < stragglers else 1.0
        z = rng.standard_normal(len(pieces) + 1)
        forward = trace.forward_s * factor * float(np.exp(jitter * z[0]))
        arrived = forward + np.cumsum(pieces * factor * np.exp(jitter * z[1:]))
        latest = np.maximum(latest, arrived)
        forward_s = max(forward_s, forward)
    # The step starts when all ranks start forward; backward's origin is when the last rank begins it.
    shifted = np.maximum(0.0, latest - forward_s)
    tensors = tuple(replace(t, ready_s=float(s)) for t, s in zip(trace.tensors, shifted, strict=True))
    return replace(trace, tensors=tensors, forward_s=forward_s)
