"""What the passes of a quantised exchange take on this GPU, beside a copy: prints a Markdown report.

    python benchmarks/quantising.py
    python benchmarks/quantising.py --device cpu --numel 100000     # a rehearsal, with torch operations

Four ranks: each quantises all values, adds up a quarter of them as their owner, and reads all averages.
"""

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median
from time import perf_counter

import torch

from anabranch.exchange.quantised.exchange import steps_for
from anabranch.exchange.quantised.torch_steps import Kept
from anabranch.values.kinds.formats import FORMATS, BlockFormat

RANKS = 4
TIMES = 20
# Kind, and whether rounding errors are kept.
EXCHANGES = [("bf16", False), ("int8", False), ("int4", True), ("int4", False)]


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--numel", type=int, default=110_000_000)
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"# Passes of a quantised exchange, {options.numel:,} float32 values\n")
    print(f"{datetime.now(UTC).date()}, {name}, torch {torch.__version__}; median of {TIMES}, in ms.\n")
    values = torch.randn(options.numel, device=options.device)
    other = torch.empty_like(values)
    print(f"A copy of these values takes {timed(lambda: other.copy_(values), options.device):.3f}.\n")
    print("| kind | residual | quantise | sum and quantise | dequantise | all |")
    print("|---|---|---:|---:|---:|---:|")
    for kind, keeps in EXCHANGES:
        took = passes(values.clone(), FORMATS[kind], keeps)
        said = ["yes" if keeps else "no"]
        print(f"| {kind} | " + " | ".join([*said, *(f"{ms:.3f}" for ms in (*took, sum(took)))]) + " |", flush=True)


def passes(buffer: torch.Tensor, form: BlockFormat, keeps: bool) -> tuple[float, float, float]:
    """Milliseconds of the three passes."""
    run = steps_for(buffer)
    residual = torch.randn_like(buffer) if keeps else None
    sent = run.quantise(buffer, residual, RANKS, form)
    received = sent[:1].expand(RANKS, -1).contiguous()  # as if all ranks had sent alike
    message, error = run.reduce(received, RANKS, form, keeps)
    gathered = message.expand(RANKS, -1).contiguous()
    kept = Kept(residual, sent, error, 0, RANKS) if residual is not None and error is not None else None
    device = buffer.device.type
    return (
        timed(lambda: run.quantise(buffer, residual, RANKS, form), device),
        timed(lambda: run.reduce(received, RANKS, form, keeps), device),
        timed(lambda: run.finish(gathered, buffer, form, kept), device),
    )


def timed(done: Callable[[], object], device: str) -> float:
    """Median milliseconds, on the device."""
    times = []
    for number in range(TIMES + 3):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)  # while the device waits, the host gets ahead: launches are not what is timed
            start.record()
            done()
            end.record()
            torch.cuda.synchronize()
            took = float(start.elapsed_time(end))
        else:
            begun = perf_counter()
            done()
            took = 1e3 * (perf_counter() - begun)
        if number >= 3:
            times.append(took)
    return median(times)


if __name__ == "__main__":
    main()
