"""The two messages of a quantised exchange, alone on the network: by which collective, on how many communicators?

    anabranch lab --hosts 4 --rate 25gbit --backend nccl -- python3 -m benchmarks.messages --mib 24 96

A bucket of so many MiB of float32 values travels in int8: every rank sends each other one a region, and its owner sends
the sum to all. Ways to do it, in turns; prints Markdown with the rate at which a rank sends:

one        all-to-all, then all-gather, on one communicator: what the library does
direct     all-to-all twice: the owner sends its region to each rank by itself, not around a ring
two        each half of the bucket on a communicator of its own, both at once
half       the halves one after the other on one communicator

``--ctas 1 2 0``: communicators that run on so many multiprocessors; 0 for NCCL's own number.
"""

import argparse
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from anabranch.exchange.interface import all_gather, issued
from anabranch.observe.environment import lab_note
from anabranch.planning.prices import quantised_phases

MIB = 1 << 20
ROUNDS = 9
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


class Half:
    """The messages of one bucket, or of a half of it, on one group; sent from a stream of its own."""

    def __init__(self, numel: int, group: Any) -> None:
        ranks = dist.get_world_size()
        nbytes = int(quantised_phases("int8", numel, ranks)[0].nbytes)
        self._group = group
        self._stream = torch.cuda.Stream(DEVICE) if CUDA else None
        self._all, self._got = (torch.zeros(ranks * nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        self._own = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
        self.sent_nbytes = 2 * (ranks - 1) * nbytes

    def send(self, direct: bool) -> None:
        """Issue both messages; ``wait`` waits for them."""
        with torch.cuda.stream(self._stream):
            dist.all_to_all_single(self._got, self._all, group=self._group)
            if direct:
                dist.all_to_all_single(self._all, self._own.repeat(dist.get_world_size()), group=self._group)
            else:
                issued(all_gather(self._all, self._own, self._group)).wait()

    def wait(self) -> None:
        """Until all that was issued is done."""
        if self._stream is not None:
            self._stream.synchronize()


def sent(parts: Sequence[Half], direct: bool) -> None:
    """Send all parts, and wait."""
    for part in parts:
        part.send(direct)
    for part in parts:
        part.wait()


def timed(action: Callable[[], None]) -> float:
    """Seconds on the slowest rank."""
    dist.barrier()
    if CUDA:
        torch.cuda.synchronize()
    begun = perf_counter()
    action()
    took = torch.tensor(perf_counter() - begun, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def group_of(ctas: int) -> Any:
    """A group of all ranks whose messages run on so many multiprocessors."""
    if not CUDA:
        return dist.new_group()
    options = dist.ProcessGroupNCCL.Options()
    if ctas:
        options.config.max_ctas = ctas
    return dist.new_group(backend="nccl", pg_options=options)


def main() -> None:
    """Time all ways in turns, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[6, 24, 96])
    parser.add_argument("--ctas", type=int, nargs="+", default=[1, 2, 0])
    given = parser.parse_args()
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=DEVICE if CUDA else None)
    ways: dict[tuple[int, int, str], tuple[list[Half], Callable[[], None]]] = {}
    groups = {ctas: (group_of(ctas), group_of(ctas)) for ctas in (given.ctas if CUDA else [0])}
    for mib, (ctas, (first, second)) in product(given.mib, groups.items()):
        numel = mib * MIB // 4
        whole, halves = [Half(numel, first)], [Half(numel // 2, first), Half(numel // 2, first)]
        both = [Half(numel // 2, first), Half(numel // 2, second)]
        for name, parts, direct in (
            ("one", whole, False),
            ("direct", whole, True),
            ("two", both, False),
            ("two, direct", both, True),
            ("half", halves, False),
        ):
            ways[mib, ctas, name] = parts, partial(sent, parts, direct)
    took: dict[tuple[int, int, str], list[float]] = {key: [] for key in ways}
    for _ in range(ROUNDS + 1):
        for key, (_, action) in ways.items():
            took[key].append(timed(action))
    if dist.get_rank() == 0:
        device = torch.cuda.get_device_name() if CUDA else "CPU"
        print(f"{datetime.now(UTC).date()}, {device}, torch {torch.__version__}, {lab_note() or 'no lab'}, "
              f"{dist.get_world_size()} ranks, medians of {ROUNDS} turns.\n")  # fmt: skip
        print("| MiB of float32 | multiprocessors | way | ms | from – to | Gbit/s sent by a rank |")
        print("|---:|---:|---|---:|---:|---:|")
        for (mib, ctas, name), (parts, _) in ways.items():
            seconds = took[mib, ctas, name][1:]  # the first makes connections
            rate = 8e-9 * sum(part.sent_nbytes for part in parts) / median(seconds)
            span = f"{1e3 * min(seconds):.2f} – {1e3 * max(seconds):.2f}"
            print(f"| {mib} | {ctas or 'its own'} | {name} | {1e3 * median(seconds):.2f} | {span} | {rate:.1f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
