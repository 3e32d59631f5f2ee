"""Network from a live process group: what each collective costs by size, and how simultaneous ones slow each other.

All ranks run the same schedule: rank 0 times the first call of each size and tells the others how often to repeat it,
so that the whole stays within a budget. The result is rank 0's on every rank.
"""

import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from anabranch.checks import Scalar
from anabranch.comm.agree import Group, agree_on, wire_device
from anabranch.comm.dense import dense
from anabranch.comm.exchange import Collective, Steps
from anabranch.lab.emulation.settings import describe
from anabranch.network import Contention, Network
from anabranch.observe.clock import Clock, clock_for

SMALLEST_NBYTES = 1 << 10
LARGEST_NBYTES = 64 << 20
BUDGET_S = 4.0
REPEATS = (5, 40)  # fewest, most
JUST_DENSE: Mapping[str, Collective] = {"dense": dense}
POOR_SPREAD = 0.5  # an interquartile range of half the median: a plan made from it is a guess


def measure(
    lanes: Sequence[Group],
    device: torch.device,
    largest_nbytes: int = LARGEST_NBYTES,
    budget_s: float = BUDGET_S,
    collectives: Mapping[str, Collective] = JUST_DENSE,
) -> Network:
    """The network among the ranks of ``lanes`` (process groups of the same ranks; the first is the main one).

    ``collectives`` are those to time, by the names that plans give them; "dense" must be among them. Takes about
    ``budget_s`` seconds, unless five messages of each size need longer. Collective: every rank must call
    it with the same arguments at the same point.
    """
    if largest_nbytes < 2 * SMALLEST_NBYTES:
        largest_nbytes = 2 * SMALLEST_NBYTES
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}: expected more than zero seconds")
    stopwatch = _Stopwatch(lanes[0], clock_for(device))
    sizes = _sizes(largest_nbytes)
    share_s = budget_s / (len(collectives) * len(sizes) + 2 * (len(lanes) > 1))
    curves = {
        name: [_point(stopwatch, collective, nbytes, lanes[0], device, share_s) for nbytes in sizes]
        for name, collective in collectives.items()
    }
    contention = Contention()
    if len(lanes) > 1:
        start_s = curves["dense"][0][1]
        probe_nbytes = int(stopwatch.as_rank_0(_probe_nbytes(curves["dense"])))
        slowdowns = _slowdowns(stopwatch, lanes, device, probe_nbytes, start_s, share_s)
        contention = Contention(tuple(slowdowns))
    facts = _facts(lanes[0], device, curves["dense"], budget_s)
    network = Network.measured(dist.get_world_size(lanes[0]), curves, contention=contention, meta=facts)
    return agree_on(Network, network, lanes[0])


def drive(steps: Steps) -> None:
    """Run a collective to its end from here; on CUDA, order it on the current stream."""
    for work in steps:
        work.wait()


class _Stopwatch:
    """Times an action that all ranks take together, equally often on each."""

    def __init__(self, group: Group, clock: Clock) -> None:
        self._group, self._clock = group, clock

    def repeat(self, action: Callable[[], None], budget_s: float) -> list[float]:
        """Seconds of each repetition on this rank, after two that are not counted (connections, caches)."""
        action()
        once_s = max(self._times(action, 1)[0], 1e-7)
        fewest, most = REPEATS
        return self._times(action, int(min(max(self.as_rank_0(budget_s / once_s), fewest), most)))

    def as_rank_0(self, number: float) -> float:
        """Rank 0's number: whatever ranks do together must not depend on what each has measured."""
        told = torch.tensor([number], dtype=torch.float64, device=wire_device(self._group))
        dist.broadcast(told, group_src=0, group=self._group)
        return float(told.item())

    def _times(self, action: Callable[[], None], count: int) -> list[float]:
        marks = []
        for _ in range(count):
            start = self._clock.mark()
            action()
            marks.append((start, self._clock.mark()))
        self._clock.settle()
        return [self._clock.between(start, end) for start, end in marks]


def _point(
    stopwatch: _Stopwatch, collective: Collective, nbytes: int, group: Group, device: torch.device, budget_s: float
) -> tuple[int, float, float]:
    buffer = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    divisor = dist.get_world_size(group)  # so that ones stay ones, however often they are averaged
    seconds = stopwatch.repeat(lambda: drive(collective(buffer, group, divisor)), budget_s)
    return nbytes, _median(seconds), float(np.subtract(*np.percentile(seconds, [75, 25])))


def _slowdowns(
    stopwatch: _Stopwatch, lanes: Sequence[Group], device: torch.device, nbytes: int, start_s: float, budget_s: float
) -> list[float]:
    """How much longer each of k simultaneous messages transfers than one alone, for k = 1 … len(lanes)."""
    buffers = [torch.ones(nbytes // 4, dtype=torch.float32, device=device) for _ in lanes]

    def together(count: int) -> None:
        pairs = zip(buffers[:count], lanes[:count], strict=True)
        for work in [next(dense(buffer, lane, dist.get_world_size(lane))) for buffer, lane in pairs]:
            work.wait()

    seconds = {k: _median(stopwatch.repeat(partial(together, k), budget_s)) for k in (1, *_probes(len(lanes)))}
    alone_s = max(seconds[1] - start_s, 1e-9)
    known = {k: max(1.0, (s - start_s) / alone_s) for k, s in seconds.items()}
    known[1] = 1.0
    table = np.interp(range(1, len(lanes) + 1), list(known), list(known.values()))
    return [float(slowdown) for slowdown in np.maximum.accumulate(table)]


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(np.array(seconds)))


def _probes(lanes: int) -> list[int]:
    """Numbers of simultaneous messages to try: 2, 4, 8 … and all of them."""
    return sorted({2**power for power in range(1, lanes.bit_length()) if 2**power <= lanes} | {lanes})


def _probe_nbytes(points: Sequence[tuple[int, float, float]]) -> int:
    """A size whose transfer outweighs its start-up clearly: the first that costs ten start-ups, or the largest."""
    return next((nbytes for nbytes, seconds, _ in points if seconds > 10 * points[0][1]), points[-1][0])


def _sizes(largest_nbytes: int) -> list[int]:
    """Powers of two in between, closer where the curve bends, and the largest itself."""
    sizes = []
    nbytes, largest_nbytes = SMALLEST_NBYTES, largest_nbytes // 4 * 4  # whole float32 elements
    while nbytes < largest_nbytes:
        sizes.append(nbytes)
        nbytes *= 2 if nbytes < 4 << 20 else 4
    return [*sizes, largest_nbytes]


def _facts(
    group: Group, device: torch.device, points: Sequence[tuple[int, float, float]], budget_s: float
) -> Mapping[str, Scalar]:
    facts: dict[str, Scalar] = {
        "source": "measured",
        "date": datetime.now(UTC).date().isoformat(),
        "backend": dist.get_backend(group),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}",
        "budget_s": budget_s,
    }
    if (emulated := describe()) and "gloo" in dist.get_backend(group):
        facts["emulated"] = emulated
    relative = float(np.median([spread / seconds for _, seconds, spread in points if seconds]))
    facts["median_relative_spread"] = relative
    if relative > POOR_SPREAD and dist.get_rank(group) == 0:
        warnings.warn(
            f"the network's costs vary by {relative:.0%} between repetitions, as they do where ranks share few cores: "
            "plans made from them are uncertain; measure on a quieter machine, or for longer (anabranch measure "
            "--budget-s 60)",
            stacklevel=3,
        )
    return facts
