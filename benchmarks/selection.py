"""What selection takes on this GPU, kernel by kernel, against torch.topk and a copy: prints a Markdown report."""

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import product
from statistics import median

import torch
import triton
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse import triton_exchange
from anabranch.exchange.sparse.triton_exchange import TritonStep
from anabranch.values.kinds.formats import ENTRY_NBYTES, Sizes
from anabranch.values.kinds.names import Wire
from anabranch.values.kinds.options import OkTopk

RANKS, DENSITY, DIVISOR, LIMIT = 4, 0.01, 4.0, 1e38


def main() -> None:
    """Print the report."""
    name, versions = torch.cuda.get_device_name(), f"torch {torch.__version__}, Triton {triton.__version__}"
    print(f"# Selection of {DENSITY:.0%}\n\n{datetime.now(UTC).date()}, {name}, {versions}; median of 20, in µs.\n")
    print("| elements | wire | copy | topk(abs) | blank | threshold | offer | threshold + offer | reduce | end |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for numel, wire in [*product((25_000_000, 110_000_000), ENTRY_NBYTES), (340_000_000, "fp32")]:
        print(f"| {numel:,} | {wire} | " + " | ".join(f"{took:.0f}" for took in row(numel, wire)) + " |", flush=True)
    print("\n## Offer of 110 M, by block and warps\n\n| block | warps | µs | TB/s |\n|---|---|---|---|")
    gradient, state = bucket(110_000_000)
    for block, warps in product((2048, 4096, 8192, 16384), (4, 8, 16)):
        triton_exchange.BLOCK, triton_exchange.WARPS = block, warps
        took = timed(TritonStep.offer, lambda: begun(gradient, state))
        print(f"| {block} | {warps} | {took:.0f} | {8 * 110 / took:.2f} |", flush=True)


def bucket(numel: int) -> tuple[torch.Tensor, BucketState]:
    """Heavy-tailed gradients and residuals, and the threshold for them."""
    size = (1.5 * torch.randn(numel, device="cuda")).exp_()
    gradient, residual = size * torch.randn(numel, device="cuda"), size * torch.randn(numel, device="cuda")
    state = BucketState.of(residual, RANKS)
    begun(gradient, state).local_threshold()
    return gradient, state


def begun(gradient: torch.Tensor, state: BucketState, wire: Wire = "fp32") -> TritonStep:
    """A rank's step, with blank messages."""
    sizes = Sizes.of(len(gradient), RANKS, DENSITY, OkTopk(wire=wire))
    return TritonStep(gradient, state, VirtualWorld(RANKS).comms[0], sizes)


def row(numel: int, wire: Wire) -> list[float]:
    """The times of one size."""
    gradient, state = bucket(numel)
    other, work = torch.empty_like(gradient), begun(gradient, state, wire)
    work.offer()
    received = work.sent[:1].expand(RANKS, -1).contiguous()  # as if all ranks offered alike
    work.reduce(received, LIMIT)
    everyone = work.part.expand(RANKS, -1).contiguous()

    def select(work: TritonStep) -> None:
        work.local_threshold()
        work.offer()

    def blank() -> TritonStep:
        return begun(gradient, state, wire)

    return [
        timed(lambda _: other.copy_(gradient), blank),
        timed(lambda work: torch.topk(gradient.abs(), work.sizes.k, sorted=False), blank),
        timed(lambda _: blank(), blank),
        *(timed(done, blank) for done in (TritonStep.local_threshold, TritonStep.offer, select)),
        timed(lambda work: work.reduce(received, LIMIT), blank),
        timed(lambda _: work.finish(everyone, DIVISOR), blank),
    ]


def timed(done: Callable[[TritonStep], object], blank: Callable[[], TritonStep]) -> float:
    """Median µs of 20 on the device, each with blank messages."""
    times = []
    for number in range(23):
        work = blank()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # while the device waits, the host gets ahead: launches are not what is timed
        start.record()
        done(work)
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(1000 * float(start.elapsed_time(end)))
    return median(times)


if __name__ == "__main__":
    main()
