"""The race: contestants take turns on the same ranks, again and again, so that what slows the machine slows all."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from anabranch.bench.contestants import Contestant

COUNTERS = Path("/proc/net/dev")  # of this network namespace: in a lab, of this rank's host


class Turn(NamedTuple):
    """Of one contestant: what a step took on the slowest rank, and what it made the busiest rank's host send."""

    name: str
    seconds: float
    sent_nbytes: float


def race(
    contestants: Sequence[Contestant], iters: int, batches: int, warmup: int, device: torch.device
) -> Iterator[Turn]:
    """Each turn as it comes, ``iters`` of each contestant.

    A turn is a mean over ``batches`` steps after ``warmup`` that are not counted. Every round begins with another
    contestant, so that nobody always follows the same one. Collective.
    """
    for number in range(iters):
        first = number * len(contestants) // iters
        for contestant in [*contestants[first:], *contestants[:first]]:
            with contestant.enter() as step:
                for _ in range(max(warmup, contestant.warmup)):
                    step()
                yield Turn(contestant.name, *_means(step, batches, device))


def _means(step: Callable[[], None], batches: int, device: torch.device) -> tuple[float, float]:
    """Seconds and bytes of a step, each on the rank that has most of them."""
    _settle(device)
    dist.barrier()
    _settle(device)
    before_nbytes, begun_s = sent_nbytes(), perf_counter()
    for _ in range(batches):
        step()
    _settle(device)
    took = [perf_counter() - begun_s, float(sent_nbytes() - before_nbytes)]
    means = torch.tensor(took, dtype=torch.float64, device=device) / batches
    dist.all_reduce(means, op=dist.ReduceOp.MAX)
    seconds, nbytes = means.tolist()
    return seconds, nbytes


def sent_nbytes() -> int:
    """All that the network cards of this host have sent, as Linux counts it; 0 where it does not tell."""
    try:
        lines = COUNTERS.read_text().splitlines()[2:]  # two lines of headings
    except OSError:
        return 0
    cards = dict(line.split(":", 1) for line in lines)
    return sum(int(counts.split()[8]) for name, counts in cards.items() if name.strip() != "lo")


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
