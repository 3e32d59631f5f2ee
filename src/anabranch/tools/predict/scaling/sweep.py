"""The same training step at many world sizes, on a network and at the lower and upper end of its costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from anabranch.planning.simulator import finish_s
from anabranch.tools.predict.scaling.result import Basis, ScalePoint
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace


class Ran(NamedTuple):
    """What a strategy did at one world size: its buckets and lanes, its step on each of the networks, and its error."""

    buckets: int
    lanes: int
    steps_s: list[float]
    error: float | None = None


Planner = Callable[[Trace, Network], Plan]
Runner = Callable[[Trace, Sequence[Network]], Ran]
Pricing = Callable[[Network], Network]
ErrorOf = Callable[[Trace, Plan], float]


def sweep(
    trace: Trace,
    network: Network,
    world_sizes: Sequence[int],
    planners: Mapping[str, Planner],
    *,
    network_name: str = "",
    scaling: Basis = "weak",
    around: Sequence[Network] = (),
    batches: Mapping[str, float] | None = None,
    recorded_batch: int | None = None,
    pricing: Pricing | None = None,
    runners: Mapping[str, Runner] | None = None,
    error_of: ErrorOf | None = None,
) -> Iterator[ScalePoint]:
    """Every planner at every world size, on ``network`` carried to that size; a point as soon as it is known.

    Weak scaling keeps the batch per rank. Strong scaling keeps the global batch, of which each of N ranks computes 1/N.
    ``batches`` is that batch by planner, as a multiple of the recorded batch; 1 for planners it does not name.

    Computing takes time in proportion to the batch. A plan is made for ``network``, and also runs on each of
    ``around``: the shortest and the longest of these steps are the band. ``pricing`` adds the costs of further
    collectives to a network of any world size. ``runners`` are strategies that have no plan of buckets; their points
    come behind those of the planners. ``error_of`` says how lossy a plan is; without it, points do not say that.
    """
    if scaling not in ("weak", "strong"):
        raise ValueError(f"scaling is {scaling!r}: expected 'weak' or 'strong'")
    alone_s, scaled = trace.forward_s + trace.backward_s, cache(trace.scaled)
    planned = {name: partial(_planned, planner, error_of) for name, planner in planners.items()}
    strategies: dict[str, Runner] = {**planned, **(runners or {})}
    for world_size in world_sizes:
        networks = [other.at(world_size) for other in (network, *around)]
        if pricing is not None:
            networks = [pricing(other) for other in networks]
        for name, run in strategies.items():
            total = (batches or {}).get(name, 1.0)  # of all ranks (strong) or of each (weak), in recorded batches
            here = scaled(total / world_size if scaling == "strong" else total)
            buckets, lanes, steps, error = run(here, networks)
            done = total if scaling == "strong" else total * world_size  # recorded batches per step, by all ranks
            speedup = done * alone_s / steps[0] if steps[0] else float(world_size)
            samples = done * recorded_batch / steps[0] if recorded_batch and steps[0] else None
            yield ScalePoint(
                network_name, name, world_size, buckets, lanes, steps[0], min(steps), max(steps),
                steps[0] - here.forward_s - here.backward_s, speedup, speedup / world_size, samples, error,
            )  # fmt: skip


def _planned(planner: Planner, error_of: ErrorOf | None, trace: Trace, networks: Sequence[Network]) -> Ran:
    plan = planner(trace, networks[0])
    steps_s = [trace.forward_s + finish_s(trace, plan, at) for at in networks]
    return Ran(len(plan), plan.lanes, steps_s, None if error_of is None else error_of(trace, plan))


def recorded_batch(trace: Trace) -> int | None:
    """The samples per rank for which the trace was recorded, from its meta; None if the meta does not say."""
    batch = trace.meta.get("batch")
    return batch if isinstance(batch, int) and batch > 0 else None
