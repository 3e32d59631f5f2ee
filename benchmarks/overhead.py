"""What wrapping costs: the same step bare, under DDP and under DataParallel, interleaved in one run; prints Markdown.

python -m torch.distributed.run --standalone --nproc-per-node N benchmarks/overhead.py     (N = 1, 2, ...)
"""

import platform
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median, quantiles
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.ddp.reducer import built_by_ddp, reduced_parameters
from anabranch.observe.clock import clock_for
from anabranch.observe.recorder import Recorder
from anabranch.observe.step_timer import StepTimer

ROUNDS = 60
DEPTH = 8


def main() -> None:
    """Build the variants, time them in turn, print a table on rank 0."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    variants: dict[str, nn.Module] = {"bare torch": model(device), "DDP": DistributedDataParallel(model(device))}
    recorded = DistributedDataParallel(model(device))
    variants["DDP, every gradient recorded"] = recorded
    timer = StepTimer(clock_for(device))
    recorder = Recorder(timer, dict(recorded.named_parameters()))
    if ranks == 1:
        variants["DataParallel"] = ab.DataParallel(model(device))
    else:
        variants["DataParallel before its plan"] = ab.DataParallel(model(device), profile_steps=0)
        step(variants["DDP"], device)()
        step(variants["DDP"], device)()
        variants["DataParallel, DDP's layout as its plan"] = ab.DataParallel(
            model(device), plan=stock_plan(variants["DDP"])
        )
    with recorder, timer.attached(recorded):
        times = interleaved({name: step(variant, device) for name, variant in variants.items()})
    if dist.get_rank() == 0:
        report(times, "bare torch" if ranks == 1 else "DDP", ranks, device)
    for variant in variants.values():
        if isinstance(variant, ab.DataParallel):
            variant.close()
    dist.destroy_process_group()


def size(device: torch.device) -> tuple[int, int]:
    """Width and batch that make a step of some tens of milliseconds."""
    return (4096, 4096) if device.type == "cuda" else (512, 256)


def model(device: torch.device) -> nn.Module:
    """A plain network of 34 tensors: 2 million parameters on a CPU, 134 million on a GPU."""
    torch.manual_seed(0)
    width, _ = size(device)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 10)).to(device)


def step(network: nn.Module, device: torch.device) -> Callable[[], None]:
    """One forward and backward on fixed data."""
    width, batch = size(device)
    inputs = torch.randn(batch, width, device=device)
    labels = torch.randint(10, (batch,), device=device)

    def run() -> None:
        network.zero_grad(set_to_none=True)
        cross_entropy(network(inputs), labels).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def stock_plan(ddp: nn.Module) -> ab.Plan:
    """DDP's own layout as a plan."""
    assert isinstance(ddp, DistributedDataParallel)
    names = list(reduced_parameters(ddp))
    layout = built_by_ddp(ddp)
    assert layout is not None, "DDP has rebuilt its buckets in its second step"
    return ab.Plan(tuple(ab.Bucket(tuple(names[i] for i in bucket)) for bucket in layout))


def interleaved(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Seconds of each variant's steps, all taking turns so that what else the machine does hits them alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 20):
        for name, run in steps.items():
            dist.barrier()
            start = perf_counter()
            run()
            if turn >= 20:  # layouts have settled
                times[name].append(perf_counter() - start)
    return times


def report(times: dict[str, list[float]], base: str, ranks: int, device: torch.device) -> None:
    """Medians, spreads and ratios, each turn's ratio to the base taken before the median."""
    where = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}, 1 thread a rank"
    )
    print(f"\n{datetime.now(UTC).date()}, {ranks} rank(s), {where}, torch {torch.__version__}.")
    print(f"{ROUNDS} steps of each, taking turns.\n")
    print(f"| variant | ms, median | interquartile | ratio to {base}, median [quartiles] |\n|---|---|---|---|")
    for name, seconds in times.items():
        low, _, high = quantiles(seconds, n=4)
        ratios = [a / b for a, b in zip(seconds, times[base], strict=True)]
        r_low, _, r_high = quantiles(ratios, n=4)
        ratio = f"{median(ratios):.3f} [{r_low:.3f}, {r_high:.3f}]"
        print(f"| {name} | {median(seconds) * 1e3:.2f} | {(high - low) * 1e3:.2f} | {ratio} |")


if __name__ == "__main__":
    main()
