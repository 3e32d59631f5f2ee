"""A Network measured on live ranks: the cost of each collective by size, and how simultaneous messages slow each other.

All ranks run the same schedule. Rank 0 times the first call of each size and tells the others how often to repeat it,
so that the whole stays within a budget. Every rank returns the network that rank 0 measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from anabranch.exchange.agreement import agree_on, wire_device
from anabranch.exchange.dense import dense
from anabranch.exchange.interface import Collective, Group, Steps, issued
from anabranch.exchange.interface import all_gather as issue_all_gather
from anabranch.exchange.lanes import NodeGroups
from anabranch.exchange.two_level import INSIDE, stage_probes
from anabranch.observe.clock import Clock, clock_for
from anabranch.observe.environment import machine_facts, network_note
from anabranch.values.checks import Scalar
from anabranch.values.curve import Curve
from anabranch.values.kinds.names import is_two_level
from anabranch.values.network import ALL_GATHER, REDUCE_SCATTER, Contention, InsideNodes, Network

SMALLEST_NBYTES = 1 << 10
LARGEST_NBYTES = 64 << 20
BUDGET_S = 4.0
REPEATS = (3, 40)  # fewest, most
JUST_DENSE: Mapping[str, Collective] = {"dense": dense}
POOR_SPREAD = 0.5  # an interquartile range of half the median: a plan made from it is a guess
REMEASURE_ABOVE = 1.05  # times what its parts cost: a size that costs more is measured again; less is noise
FLOAT_NBYTES = 4
WARM_UP = "warm_up_s"  # in the meta of a measured network: seconds that connections and kernels took


def all_gather(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:  # noqa: ARG001 (nothing is averaged)
    """Every rank's share of the buffer to all ranks, in place; the whole buffer is the message, as in nccl-tests."""
    yield issued(issue_all_gather(buffer, _own_share(buffer, group), group))


def reduce_scatter(buffer: torch.Tensor, group: Group, divisor: float) -> Steps:  # noqa: ARG001
    """The sum of every rank's copy of this rank's share, in place; the whole buffer is the message."""
    # torch 2.13 renamed the operation and warns about the old name.
    operation = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    yield issued(operation(_own_share(buffer, group), buffer, group=group, async_op=True))


# Not for plans, which average gradients: for planning sharded training, and to compare with nccl-tests.
SHARDED: Mapping[str, Collective] = {ALL_GATHER: all_gather, REDUCE_SCATTER: reduce_scatter}


def measure(
    lanes: Sequence[Group],
    device: torch.device,
    largest_nbytes: int = LARGEST_NBYTES,
    budget_s: float = BUDGET_S,
    collectives: Mapping[str, Collective] = JUST_DENSE,
    growth: int = 2,
    contending: Group | None = None,
    nodes: NodeGroups | None = None,
) -> Network:
    """The network among the ranks of ``lanes`` (process groups of the same ranks; the first is the main one).

    ``collectives`` are those to time, by the names that plans give them; "dense" must be among them, and those of
    ``SHARDED`` may be. Each size is ``growth`` times the last. Takes about ``budget_s`` seconds, by rank 0's argument,
    or as long as a few messages of each size need; at most twice as long, where sizes are measured again. Collective:
    every rank must call it with the same other arguments at the same point.

    ``contending``: a group of this rank and of ranks that measure networks of their own at the same time, over the same
    links. They start every message together, as they will in training, so that each gets its share of the links. The
    two kinds of groups must form a grid, as those of a mesh do.

    ``nodes``: groups on which ``collectives`` are measured on two levels, too. All ranks start these messages together.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}: expected more than zero seconds")
    if nodes is not None:
        averaging = {name: collective for name, collective in collectives.items() if name not in SHARDED}
        collectives = {**collectives, **stage_probes(averaging, nodes)}
    stopwatch = Stopwatch(lanes[0], clock_for(device), contending)
    together = Stopwatch(lanes[0], clock_for(device), lanes[0])
    budget_s = stopwatch.as_rank_0(budget_s)
    world_size = dist.get_world_size(lanes[0])
    sizes = message_sizes(max(largest_nbytes, 2 * SMALLEST_NBYTES), growth)
    began_s = perf_counter()
    _warm_up(collectives, lanes, device, sizes if device.type == "cuda" else ())
    warm_up_s = perf_counter() - began_s
    share_s = budget_s / (len(collectives) * len(sizes) + 2 * (len(lanes) > 1))
    curves = {
        name: _points(
            watch,
            whole_shares(sizes, world_size) if name in SHARDED else sizes,
            partial(_point, watch, collective, lanes[0], device, share_s),
        )
        for name, collective in collectives.items()
        for watch in [together if name in INSIDE or is_two_level(name) else stopwatch]
    }
    contention = Contention()
    if len(lanes) > 1:
        start_s = curves["dense"][0][1]
        probe_nbytes = int(stopwatch.as_rank_0(contention_nbytes(curves["dense"])))
        contention = Contention(tuple(slowdowns(stopwatch, lanes, device, probe_nbytes, start_s, share_s)))
    facts = {**measurement_facts(lanes[0], device, curves["dense"], budget_s), WARM_UP: warm_up_s}
    inside = None
    if nodes is not None:
        scatter, gather = (Curve.through(curves.pop(stage)) for stage in INSIDE)
        inside = InsideNodes(nodes.scatter.size(), scatter, gather)
    network = replace(Network.measured(world_size, curves, contention=contention, meta=facts), inside=inside)
    return agree_on(Network, network, lanes[0])


def drive(steps: Steps) -> None:
    """Run a collective to its end from here; on CUDA, order it on the current stream."""
    for work in steps:
        work.wait()


class Stopwatch:
    """Times an action that all ranks take together, equally often on each; ranks of ``contending`` start together."""

    def __init__(self, group: Group, clock: Clock, contending: Group | None = None) -> None:
        self._groups = [group] if contending is None else [group, contending]
        self._contending = contending
        self._clock = clock

    def repeat(self, action: Callable[[], None], budget_s: float) -> list[float]:
        """Seconds of each repetition on this rank, after a first one that does not count (connections, caches).

        If that one alone takes longer than ``budget_s``, it counts: first-time costs are a small part of it. One more
        follows, unless it took longer than twice the budget.
        """
        began_s = perf_counter()
        first_s = max(self._times(action, 1)[0], 1e-7)
        waited_s = perf_counter() - began_s if self._contending is not None else 0.0  # for all ranks to start together
        affordable = self.as_rank_0(budget_s / max(first_s, waited_s))
        if affordable < 1:
            return [first_s, *self._times(action, int(affordable > 1 / 2))]
        fewest, most = REPEATS
        return self._times(action, int(min(max(affordable, fewest), most)))

    def as_rank_0(self, number: float) -> float:
        """Rank 0's number: what ranks do together must not depend on what each has measured."""
        for group in self._groups:
            sent = torch.tensor([number], dtype=torch.float64, device=wire_device(group))
            dist.broadcast(sent, group_src=0, group=group)
            number = float(sent.item())
        return number

    def _times(self, action: Callable[[], None], count: int) -> list[float]:
        marks = []
        for _ in range(count):
            if self._contending is not None:
                self._clock.settle()
                dist.barrier(self._contending)
            start = self._clock.mark()
            action()
            marks.append((start, self._clock.mark()))
        self._clock.settle()
        return [self._clock.elapsed_s(start, end) for start, end in marks]


def message_sizes(largest_nbytes: int, growth: int = 2) -> list[int]:
    """Sizes to measure: each ``growth`` times the last, closer where the curve bends, and the largest itself."""
    sizes = []
    nbytes = SMALLEST_NBYTES
    largest_nbytes = largest_nbytes // FLOAT_NBYTES * FLOAT_NBYTES
    while nbytes < largest_nbytes:
        sizes.append(nbytes)
        nbytes *= growth if nbytes < 4 << 20 else 4
    return [*sizes, largest_nbytes]


def whole_shares(sizes: Sequence[int], world_size: int) -> list[int]:
    """The sizes rounded down to a whole number of elements per rank, at least one, each size once."""
    share_nbytes = FLOAT_NBYTES * world_size
    return list(dict.fromkeys(max(1, nbytes // share_nbytes) * share_nbytes for nbytes in sizes))


def slowdowns(
    stopwatch: Stopwatch, lanes: Sequence[Group], device: torch.device, nbytes: int, start_s: float, budget_s: float
) -> list[float]:
    """How much longer each of k simultaneous messages transfers than one alone, for k = 1 … len(lanes)."""
    buffers = [torch.ones(nbytes // FLOAT_NBYTES, dtype=torch.float32, device=device) for _ in lanes]

    def together(count: int) -> None:
        pairs = zip(buffers[:count], lanes[:count], strict=True)
        for work in [next(dense(buffer, lane, dist.get_world_size(lane))) for buffer, lane in pairs]:
            work.wait()

    seconds = {k: median(stopwatch.repeat(partial(together, k), budget_s)) for k in (1, *lane_counts(len(lanes)))}
    alone_s = max(seconds[1] - start_s, 1e-9)
    known = {k: max(1.0, (s - start_s) / alone_s) for k, s in seconds.items()}
    known[1] = 1.0
    table = np.interp(range(1, len(lanes) + 1), list(known), list(known.values()))
    return [float(slowdown) for slowdown in np.maximum.accumulate(table)]


def lane_counts(lanes: int) -> list[int]:
    """Numbers of simultaneous messages to try: 2, 4, 8 … and all of them."""
    return sorted({2**power for power in range(1, lanes.bit_length()) if 2**power <= lanes} | {lanes})


def contention_nbytes(points: Sequence[tuple[int, float, float]]) -> int:
    """A size whose transfer takes much longer than its start-up: the first that costs ten start-ups, or the largest."""
    return next((nbytes for nbytes, seconds, _ in points if seconds > 10 * points[0][1]), points[-1][0])


def measurement_facts(
    group: Group, device: torch.device, points: Sequence[tuple[int, float, float]], budget_s: float
) -> Mapping[str, Scalar]:
    """The meta of a measured network."""
    backend = dist.get_backend(group)
    facts = {**machine_facts(device), "source": "measured", "backend": backend, "budget_s": budget_s}
    if (note := network_note()) and "gloo" in backend:
        facts["emulated"] = note
    relative = [spread / seconds for _, seconds, spread in points if seconds]
    return {**facts, "median_relative_spread": float(np.median(relative))}


def noise_note(network: Network) -> str:
    """A sentence if the costs of a measured network vary too much to plan with; else empty."""
    spread = network.meta.get("median_relative_spread")
    if not isinstance(spread, float) or spread <= POOR_SPREAD:
        return ""
    return (
        f"the network's costs vary by {spread:.0%} between repetitions, as they do where ranks share few cores: "
        "plans made from them are uncertain; measure on a quieter machine, or for longer (anabranch measure "
        "--budget-s 60)"
    )


def _warm_up(
    collectives: Mapping[str, Collective], lanes: Sequence[Group], device: torch.device, sizes: Sequence[int]
) -> None:
    """Send a small message of each kind, and one on each lane: connections are made and kernels built at first use.

    A GPU builds kernels, for seconds, also where the size calls for another one, so ``sizes`` are sent once, too:
    otherwise such a second would be taken for the price of that size.
    """
    divisor = dist.get_world_size(lanes[0])
    small = SMALLEST_NBYTES * FLOAT_NBYTES * divisor
    for nbytes in (small, *(whole_shares(sizes, divisor))):
        buffer = torch.ones(nbytes // FLOAT_NBYTES, dtype=torch.float32, device=device)
        for collective in collectives.values():
            drive(collective(buffer, lanes[0], divisor))
    for lane in lanes:
        drive(dense(buffer, lane, divisor))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _points(
    stopwatch: Stopwatch, sizes: Sequence[int], point: Callable[[int], tuple[int, float, float]]
) -> list[tuple[int, float, float]]:
    """A point for each size. One that costs more than the same bytes in messages of the size before is measured again.

    Not if it is hardly more: where bytes are all that counts, noise alone decides which of the two costs more.

    The cheaper measurement counts: most likely something held up the machine for all repetitions of one. If nothing
    did, the planner still learns that such messages do not pay.
    """
    found: list[tuple[int, float, float]] = []
    for nbytes in sizes:
        measured = point(nbytes)
        in_parts_s = found[-1][1] * nbytes / found[-1][0] if found else measured[1]
        if stopwatch.as_rank_0(measured[1] > REMEASURE_ABOVE * in_parts_s):
            measured = min(measured, point(nbytes), key=itemgetter(1))
        found.append(measured)
    return found


def _point(
    stopwatch: Stopwatch, collective: Collective, group: Group, device: torch.device, budget_s: float, nbytes: int
) -> tuple[int, float, float]:
    """(nbytes, median seconds, interquartile range) of one size."""
    buffer = torch.ones(nbytes // FLOAT_NBYTES, dtype=torch.float32, device=device)
    divisor = dist.get_world_size(group)  # so that ones stay ones, however often they are averaged
    seconds = stopwatch.repeat(lambda: drive(collective(buffer, group, divisor)), budget_s)
    return nbytes, median(seconds), float(np.subtract(*np.percentile(seconds, [75, 25])))


def _own_share(buffer: torch.Tensor, group: Group) -> torch.Tensor:
    numel = buffer.numel() // dist.get_world_size(group)
    return buffer.narrow(0, dist.get_rank(group) * numel, numel)
