"""The race: contestants take turns on the same ranks, again and again, so that what slows the machine slows all."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch
import torch.distributed as dist

from anabranch.bench.contestants import Contestant


def race(
    contestants: Sequence[Contestant], iters: int, batches: int, warmup: int, device: torch.device
) -> Iterator[tuple[str, float]]:
    """(name, seconds a step) of each turn, ``iters`` turns of each, as they come.

    A turn is a mean over ``batches`` steps after ``warmup`` that are not counted, on the slowest rank. Every round
    begins with another contestant, so that nobody always follows the same one. Collective.
    """
    for number in range(iters):
        first = number * len(contestants) // iters
        for contestant in [*contestants[first:], *contestants[:first]]:
            with contestant.enter() as step:
                for _ in range(max(warmup, contestant.warmup)):
                    step()
                yield contestant.name, _mean_s(step, batches, device)


def _mean_s(step: Callable[[], None], batches: int, device: torch.device) -> float:
    _settle(device)
    dist.barrier()
    _settle(device)
    begun_s = perf_counter()
    for _ in range(batches):
        step()
    _settle(device)
    mean = torch.tensor((perf_counter() - begun_s) / batches, dtype=torch.float64, device=device)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return mean.item()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
