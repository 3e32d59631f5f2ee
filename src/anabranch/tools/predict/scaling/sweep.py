"""The same training step at many world sizes, on a network and at the lower and upper end of its costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import NamedTuple

from anabranch.planning.simulator import finish_s, slowest_ranks
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
Runner = Callable[[Trace, Trace, Sequence[Network]], Ran]  # the quiet trace, the real one, the networks
Pricing = Callable[[Network], Network]
ErrorOf = Callable[[Trace, Plan], float]


@dataclass(frozen=True, slots=True)
class Compute:
    """How compute time depends on the batch and on the ranks.

    fixed_share         share of the recorded time that does not depend on the batch: b times the recorded batch takes
                        fixed_share + (1 − fixed_share)·b times as long
    jitter              each piece of work takes exp(jitter·z) times as long, z standard normal
    stragglers          how many ranks compute ``straggler_factor`` times as long
    seed                of the jitter
    """

    fixed_share: float = 0.0
    jitter: float = 0.0
    stragglers: int = 0
    straggler_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.fixed_share <= 1:
            raise ValueError(f"fixed_share is {self.fixed_share}: expected 0 to 1, a share of the recorded time")

    def factor(self, batch: float) -> float:
        """Compute time of ``batch`` times the recorded batch, as a multiple of the recorded compute time."""
        if not (isfinite(batch) and batch > 0):
            raise ValueError(f"batch is {batch} times the recorded one: expected a finite number above zero")
        return self.fixed_share + (1 - self.fixed_share) * batch


STEADY = Compute()


def sweep(
    trace: Trace,
    network: Network,
    world_sizes: Sequence[int],
    planners: Mapping[str, Planner],
    *,
    network_name: str = "",
    scaling: Basis = "weak",
    compute: Compute = STEADY,
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

    Plans are made for ``network`` from the trace without jitter and stragglers, as a planner would see it. The same
    plan then runs with jitter and stragglers, on ``network`` and on each of ``around``: the shortest and the longest of
    these steps are the band. ``pricing`` adds the costs of further collectives to a network of any world size.
    ``runners`` are strategies that have no plan of buckets; their points come behind those of the planners.
    ``error_of`` says how lossy a plan is; without it, points do not say that.
    """
    if scaling not in ("weak", "strong"):
        raise ValueError(f"scaling is {scaling!r}: expected 'weak' or 'strong'")
    alone_s = trace.forward_s + trace.backward_s
    slowest = {}
    if compute.jitter or compute.stragglers:
        slowest = slowest_ranks(
            trace, world_sizes, compute.jitter, compute.stragglers, compute.straggler_factor, compute.seed
        )
    strategies = {name: partial(_planned, planner, error_of) for name, planner in planners.items()} | dict(
        runners or {}
    )
    for world_size in world_sizes:
        networks = [_priced(other.at(world_size), pricing) for other in (network, *around)]
        scaled: dict[float, tuple[Trace, Trace]] = {}
        for name, run in strategies.items():
            total = (batches or {}).get(name, 1.0)  # of all ranks (strong) or of each (weak), in recorded batches
            factor = compute.factor(total / world_size if scaling == "strong" else total)
            if factor not in scaled:
                scaled[factor] = (trace.scaled(factor), slowest.get(world_size, trace).scaled(factor))
            quiet, real = scaled[factor]
            buckets, lanes, steps, error = run(quiet, real, networks)
            done = total if scaling == "strong" else total * world_size  # recorded batches per step, by all ranks
            speedup = done * alone_s / steps[0] if steps[0] else float(world_size)
            samples = done * recorded_batch / steps[0] if recorded_batch and steps[0] else None
            yield ScalePoint(
                network_name, name, world_size, buckets, lanes, steps[0], min(steps), max(steps),
                steps[0] - real.forward_s - real.backward_s, speedup, speedup / world_size, samples, error,
            )  # fmt: skip


def _planned(planner: Planner, error_of: ErrorOf | None, quiet: Trace, real: Trace, networks: Sequence[Network]) -> Ran:
    plan = planner(quiet, networks[0])
    steps_s = [real.forward_s + finish_s(real, plan, at) for at in networks]
    return Ran(len(plan), plan.lanes, steps_s, None if error_of is None else error_of(quiet, plan))


def _priced(network: Network, pricing: Pricing | None) -> Network:
    return network if pricing is None else pricing(network)


def recorded_batch(trace: Trace) -> int | None:
    """The samples per rank for which the trace was recorded, from its meta; None if the meta does not say."""
    batch = trace.meta.get("batch")
    return batch if isinstance(batch, int) and batch > 0 else None
