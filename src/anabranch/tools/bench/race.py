"""The race: contestants take turns on the same ranks, so that whatever slows the machine slows all of them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from anabranch.tools.bench.contestants import Contestant

COUNTERS = Path("/proc/net/dev")  # of this network namespace: in a lab, that of this rank's host


class Turn(NamedTuple):
    """One turn of one contestant: mean step on the slowest rank, and bytes per step sent by the busiest rank's host."""

    name: str
    seconds: float
    sent_nbytes: float


def race(
    contestants: Sequence[Contestant], iters: int, batches: int, warmup: int, device: torch.device
) -> Iterator[Turn]:
    """Yields every turn when it is over, ``iters`` turns of each contestant. Collective.

    A turn is the mean over ``batches`` steps, after at least ``warmup`` uncounted ones. Every round begins with another
    contestant, and every second one goes the other way round, so that none always follows the same one.
    """
    for number in range(iters):
        first = number * len(contestants) // iters
        in_turn = [*contestants[first:], *contestants[:first]]
        for contestant in in_turn if number % 2 == 0 else [in_turn[0], *reversed(in_turn[1:])]:
            with contestant.enter() as step:
                for _ in range(max(warmup, contestant.warmup)):
                    step()
                yield Turn(contestant.name, *_means(step, batches, device))


def _means(step: Callable[[], None], batches: int, device: torch.device) -> tuple[float, float]:
    """Seconds and sent bytes per step, each the maximum over the ranks."""
    _synchronize(device)
    dist.barrier()
    _synchronize(device)
    before_nbytes, begun_s = sent_nbytes(), perf_counter()
    for _ in range(batches):
        step()
    _synchronize(device)
    took = [perf_counter() - begun_s, float(sent_nbytes() - before_nbytes)]
    means = torch.tensor(took, dtype=torch.float64, device=device) / batches
    dist.all_reduce(means, op=dist.ReduceOp.MAX)
    seconds, nbytes = means.tolist()
    return seconds, nbytes


def sent_nbytes() -> int:
    """Bytes that this host's network interfaces have sent, loopback excluded; 0 where the system has no such count."""
    try:
        lines = COUNTERS.read_text().splitlines()[2:]  # two lines of headings
    except OSError:
        return 0
    cards = dict(line.split(":", 1) for line in lines)
    return sum(int(counts.split()[8]) for name, counts in cards.items() if name.strip() != "lo")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
