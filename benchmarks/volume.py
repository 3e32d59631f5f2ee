"""Bytes sent and received per rank on virtual ranks, Ok-Topk beside the baselines; prints a Markdown report."""

import gc
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from math import ceil, log2
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from benchmarks.rival_exchanges import RIVALS, ExchangeFunction
from benchmarks.virtual import VirtualWorld

import anabranch as ab
from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse.exact_exchange import exact_exchange
from anabranch.exchange.sparse.fixed_exchange import fixed_exchange
from anabranch.values.kinds.formats import ENTRY_NBYTES
from anabranch.values.kinds.options import OkTopk

PERIODS = OkTopk()  # its defaults: exact thresholds every 32 steps, new regions every 64
OURS: dict[str, ExchangeFunction] = {
    "exact": exact_exchange,
    "fixed": fixed_exchange,
    "fixed, bf16": partial(fixed_exchange, options=OkTopk(wire="bf16")),
    "fixed, int8": partial(fixed_exchange, options=OkTopk(wire="int8")),
}
NBYTES = dict.fromkeys(OURS, ENTRY_NBYTES["fp32"]) | {"fixed, bf16": 4, "fixed, int8": 3}  # of an entry
REFRESHES = {"threshold": PERIODS.threshold_period, "regions": PERIODS.region_period}
LAYERS = 50


class Size(NamedTuple):
    """A vector of n elements on so many ranks, of which each step sends k; and how many steps to run."""

    ranks: int
    numel: int
    k: int
    steps: int

    def bound(self, name: str) -> float:
        """Bytes of 3k(P−1)/P entries, in units of k."""
        return 3 * NBYTES[name] * (self.ranks - 1) / self.ranks


class Count(NamedTuple):
    """In units of k bytes: what each rank sent and received in each step, and what refreshes add to the average step.

    ``path``: phases follow each other, so in time their busiest ranks' larger sides add up; of the worst step.
    """

    sent: np.ndarray
    received: np.ndarray
    path: float
    messages: float
    refreshes: float

    @property
    def busiest(self) -> float:
        """The most that any rank sent or received in any step."""
        return float(max(self.sent.max(), self.received.max()))

    @property
    def imbalance(self) -> float:
        """The busiest rank's larger side over the mean, in the worst step."""
        each = np.maximum(self.sent, self.received)
        return float((each.max(axis=1) / each.mean(axis=1)).max())


Counts = Sequence[tuple[Size, dict[str, Count]]]

SIZES = [*(Size(2**bits, 200_000, 2_000, 5) for bits in range(1, 9)), Size(2048, 32_768, 16_384, 2)]
# Eight values per owner and rank part layers badly; how it is in buckets of a more usual size.
LARGER = [Size(ranks, 2_000_000, 20_000, 3) for ranks in (128, 256)]
BIG_RANKS = 256
NOT_THERE = ("topk", "gaussian", "dsa")  # beyond: P lists on each of P virtual ranks need too much memory, or time


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)  # many small operations: threads would wait for each other more than they work
    begun_s = perf_counter()
    print("# Bytes per rank: Ok-Topk beside the baselines, counted\n")
    versions = f"torch {torch.__version__}, anabranch {ab.__version__}"
    print(f"{datetime.now(UTC).date()}, virtual ranks in one process (`benchmarks/volume.py`), {versions}.")
    print(about(), flush=True)
    ours, baselines = [], []
    for size in SIZES:
        known = [name for name in RIVALS if size.ranks <= BIG_RANKS or name not in NOT_THERE]
        ours.append((size, {name: counted(exchange, size) for name, exchange in OURS.items()}))
        baselines.append((size, {name: counted(RIVALS[name], size) for name in known}))
        print(f"P = {size.ranks} after {perf_counter() - begun_s:.0f} s", file=sys.stderr, flush=True)
    larger = [(size, {"exact": counted(exact_exchange, size)}) for size in LARGER]
    for title, table in (
        ("Ok-Topk", [*our_table(ours), *verdict(ours)]),
        ("Ok-Topk on a larger vector", our_table(larger)),
        ("What refreshes add", refresh_table(ours)),
        ("Baselines: counted, and by their formulas", baseline_table(ours, baselines)),
    ):
        print(f"\n## {title}\n\n" + "\n".join(table))


def about() -> str:
    """What was counted, and on what."""
    few, many = SIZES[0], SIZES[-1]
    return (
        f"Gradients are heavy-tailed and correlated: {LAYERS} layers of very different size, log-normal within, half "
        "as much signal that all ranks share as noise of their own; with error feedback, over "
        f"{few.steps} steps, of which the first, which refreshes everything, is counted apart. "
        f"k is 1 % of {few.numel:,} elements; on {many.ranks} ranks, in {many.steps} steps, half of {many.numel:,}: "
        "that many virtual ranks have room for small vectors only, and k must be several P, as in real buckets.\n\n"
        "**All numbers are in units of k bytes.** Bound: 3(P−1)/P entries of 8 bytes, 4 as bf16, 3 as int8. "
        "Max: the most that any rank sent (received) in any step; "
        "mean: over ranks and steps. Imbalance: the busiest rank's larger side over the mean, in the worst step. "
        "Counts and heads of messages are included. An all-to-all goes directly, an all-gather once around the ring, "
        "an all-reduce twice."
    )


def gradients(size: Size) -> Iterator[list[torch.Tensor]]:
    """Step after step, one gradient per rank."""
    shape, chance = torch.Generator().manual_seed(size.numel), torch.Generator().manual_seed(size.ranks)
    layers = torch.randn(LAYERS, generator=shape).repeat_interleave(-(-size.numel // LAYERS))[: size.numel]
    magnitude = (layers + 1.5 * torch.randn(size.numel, generator=shape)).exp()
    while True:
        signal = 0.5 * torch.randn(size.numel, generator=chance)
        yield [(torch.randn(size.numel, generator=chance).add_(signal)).mul_(magnitude) for _ in range(size.ranks)]


def counted(exchange: ExchangeFunction, size: Size) -> Count:
    """Some steps of all ranks, every byte counted."""
    world = VirtualWorld(size.ranks)
    states = [BucketState.of(torch.zeros(size.numel), size.ranks) for _ in range(size.ranks)]
    sent, received, path, refreshes, messages = [], [], 0.0, 0.0, 0.0
    for number, given in zip(range(size.steps), gradients(size), strict=False):
        world.byte_counts.clear()
        world.run([
            exchange(gradient, state, comm, float(size.ranks), size.k / size.numel)
            for gradient, state, comm in zip(given, states, world.comms, strict=True)
        ])  # fmt: skip
        seen = world.byte_counts
        if number == 0:
            refreshes = sum(seen.volume([phase]) / REFRESHES[phase] for phase in seen.phases if phase in REFRESHES)
            continue
        sent.append(seen.sent() / size.k)
        received.append(seen.received() / size.k)
        path = max(path, sum(seen.volume([phase]) for phase in seen.phases) / size.k)
        messages = max(messages, float(seen.messages().max()))
    del states, given, world
    gc.collect()  # works and their buffers refer to each other
    return Count(np.array(sent), np.array(received), path, messages, refreshes / size.k)


def our_table(counts: Counts) -> Iterator[str]:
    """A row per size and way."""
    yield "| P | k | way | bound | sent: max | mean | received: max | mean | max / bound | imbalance | messages |"
    yield "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for size, ways in counts:
        for name, count in ways.items():
            cells = [count.sent.max(), count.sent.mean(), count.received.max(), count.received.mean()]
            nbytes = " | ".join(f"{cell:.2f}" for cell in cells)
            share = f"{count.busiest / size.bound(name):.0%}"
            yield (
                f"| {size.ranks} | {size.k:,} | {name} | {size.bound(name):.2f} | {nbytes} | {share} "
                f"| {count.imbalance:.2f} | {count.messages:.0f} |"
            )


def verdict(counts: Counts) -> Iterator[str]:
    """What is over the bound, and why."""
    sent: list[str] = []
    received: list[str] = []
    for size, ways in counts:
        for name, count in ways.items():
            share = count.busiest / size.bound(name)
            if share > 1:
                over = sent if count.sent.max() > size.bound(name) else received
                over.append(f"{name} on {size.ranks} ranks ({share:.0%})")
    if received:
        yield f"\n**Over the bound in what the busiest owner receives: {', '.join(received)}.** Regions are"
        yield "the mean of what ranks propose; a rank with few values per owner proposes roughly, and where layers of"
        yield "very different size meet, the mean of rough proposals divides them unevenly. No rank sends too much."
    if sent:
        yield f"\n**Over the bound in what each rank sends: {', '.join(sent)}.** A message has few"
        yield "entries there, so that its counts, its scales and what fills up its words weigh as much as some of them."


def refresh_table(counts: Counts) -> Iterator[str]:
    """What is sent every few steps, spread over them."""
    yield (
        f"Exact thresholds every {PERIODS.threshold_period} steps (exact exchange alone: every owner's sums go to "
        f"everyone) and new regions every {PERIODS.region_period}, spread over all steps:\n"
    )
    yield "| P | " + " | ".join(OURS) + " |"
    yield "|---:" * (len(OURS) + 1) + "|"
    for size, ways in counts:
        yield f"| {size.ranks} | " + " | ".join(f"{count.refreshes:.3f}" for count in ways.values()) + " |"


def baseline_table(ours: Counts, baselines: Counts) -> Iterator[str]:
    """What each takes in time."""
    yield "Phase by phase the busiest rank's larger side, added up, of the worst step; in brackets the formula.\n"
    yield (
        "| P | Ok-Topk exact | fixed | dense [8n(P−1)/P] | top-k all-gather [8k(P−1)] | gTopk [16k log₂P] "
        "| TopkDSA [16k(P−1)/P … (8k+4n)(P−1)/P] | Gaussian [8k(P−1)] |"
    )
    yield "|---:" * 8 + "|"
    for (size, own), (_, others) in zip(ours, baselines, strict=True):
        cells = [f"**{own[name].path:.2f}**" for name in ("exact", "fixed")]
        cells += [f"{_path(others, name)} [{text}]" for name, text in formulas(size).items()]
        yield f"| {size.ranks} | " + " | ".join(cells) + " |"


def formulas(size: Size) -> dict[str, str]:
    """Of algorithms.md §4.2, in bytes, in units of k."""
    ranks, dense = size.ranks, size.numel / size.k
    part = (ranks - 1) / ranks
    return {
        "dense": f"{8 * dense * part:.0f}",
        "topk": f"{8 * (ranks - 1)}",
        "gtopk": f"{16 * ceil(log2(ranks))}",
        "dsa": f"{16 * part:.2f} … {(8 + 4 * dense) * part:.0f}",
        "gaussian": f"{8 * (ranks - 1)}",
    }


def _path(counts: dict[str, Count], name: str) -> str:
    return f"{counts[name].path:.2f}" if name in counts else "–"


if __name__ == "__main__":
    main()
