"""Clipping by the global norm under Lean: updates held until it is known, against updates applied and corrected.

Also the peak of memory with rounded residuals, beside the same.

    python benchmarks/lean_clipping.py --layers 8 --width 2048 --steps 15

Every way runs in processes of its own, which train the same model on the same data: two Gloo ranks, or with
``--device cuda`` one rank. Applying and correcting is exact for SGD without momentum and weight decay only: the weights
before the step are kept, and weights = old + coefficient · (new − old) once the norm is known. Any optimizer with a
state would need that state's old values, too.
"""

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab

CLIP, DENSITY, WARM = 0.01, 0.01, 3
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}
WAYS = [
    ("SGD", "DDP, clip_grad_norm_"), ("SGD", "Lean, unclipped"), ("SGD", "Lean, norm only"), ("SGD", "Lean, held"),
    ("SGD", "Lean, corrected"), ("AdamW", "DDP, clip_grad_norm_"), ("AdamW", "Lean, unclipped"),
    ("AdamW", "Lean, held"), ("AdamW", "Lean sparse, unclipped"), ("AdamW", "Lean sparse, held"),
    ("AdamW", "Lean sparse, residuals bf16"), ("AdamW", "Lean sparse, residuals int8"),
]  # fmt: skip


def build(arguments: argparse.Namespace) -> tuple[nn.Module, ab.Plan, ab.Plan]:
    """The model, and plans of a bucket per layer, dense and sparse."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(arguments.layers):
        layers += [nn.Linear(arguments.width, arguments.width, bias=False), nn.GELU()]
    model = nn.Sequential(*layers).to(arguments.device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=(2 / arguments.width) ** 0.5)  # so that gradients do not vanish
    names = [name for name, _ in reversed(list(model.named_parameters()))]
    dense, sparse = (
        ab.Plan(tuple(ab.Bucket((name,), collective=kind) for name in names)) for kind in ("dense", f"oktopk:{DENSITY}")
    )
    return model, dense, sparse


def stepper(way: str, optimizer: str, model: nn.Module, plans: tuple[ab.Plan, ab.Plan]) -> Callable[[Any], None]:
    """One step of this way: forward, backward, clipping and update."""
    make = OPTIMIZERS[optimizer]
    if way.startswith("DDP"):
        ddp, stepped = DistributedDataParallel(model), make(model.parameters())

        def with_ddp(inputs: torch.Tensor) -> None:
            ddp(inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
            stepped.step()
            stepped.zero_grad()

        return with_ddp
    clip = {"held": CLIP, "norm only": math.inf, "corrected": math.inf}.get(way.partition(", ")[2])
    options: dict[str, Any] = {"plan": plans[0]}
    if "sparse" in way:
        options = {"plan": plans[1], "compress": ab.OkTopk(density=DENSITY, warmup_steps=0)}
    how: Any = way.partition("residuals ")[2] or "in place"
    memory = ab.Lean(make, residuals=how, clip_norm=clip)
    lean: Any = ab.DataParallel(model, profile_steps=0, memory=memory, **options)

    def with_lean(inputs: torch.Tensor) -> None:
        before = [parameter.detach().clone() for parameter in model.parameters()] if "corrected" in way else []
        lean(inputs).square().mean().backward()
        if before:
            coefficient = torch.clamp(CLIP / (lean.grad_norm + 1e-6), max=1.0)
            with torch.no_grad():
                for parameter, old in zip(model.parameters(), before, strict=True):
                    parameter.sub_(old).mul_(coefficient).add_(old)

    return with_lean


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory


def peak_mib(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def run(rank: int, ranks: int, optimizer: str, way: str, arguments: argparse.Namespace, folder: str) -> None:
    """Train on one rank; rank 0 writes its peak of memory, its median step and its weights."""
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    model, *plans = build(arguments)
    step = stepper(way, optimizer, model, (plans[0], plans[1]))
    times = []
    for index in range(WARM + arguments.steps):
        if index == WARM:
            reset_peak(arguments.device)
        generator = torch.Generator().manual_seed(10 * index + rank)
        inputs = torch.randn(arguments.batch, arguments.width, generator=generator).to(arguments.device)
        dist.barrier()
        begun = perf_counter()
        step(inputs)
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter() - begun)
    peak = peak_mib(arguments.device)
    if rank == 0:
        weights = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
        answer = {"peak": peak, "times": times[WARM:], "weights": weights}
        torch.save(answer, f"{folder}/answer.pt")
    dist.barrier()
    os._exit(0)  # nothing is to be torn down


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), help="this one only")
    arguments = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that memory of tensors is given back when they are freed
    gradients = 4 * arguments.layers * arguments.width**2 / 2**20
    ways = [way for way in WAYS if arguments.optimizer in (None, way[0])]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {way: [] for way in ways}
    ranks = 1 if arguments.device == "cuda" else 2
    for _ in range(arguments.rounds):
        for optimizer, way in ways:
            with tempfile.TemporaryDirectory() as folder:
                spawn(run, (ranks, optimizer, way, arguments, folder), nprocs=ranks)
                found[optimizer, way].append(torch.load(f"{folder}/answer.pt", weights_only=True))
    print(f"{ranks} ranks on {arguments.device}, all gradients {gradients:.0f} MiB, batch {arguments.batch}")
    print("| optimizer | way | peak, MiB | step, ms | weights differ from DDP's by |")
    print("|---|---|---:|---:|---:|")
    for (optimizer, way), answers in found.items():
        step_s = statistics.median(time for answer in answers for time in answer["times"])
        peak = statistics.median(answer["peak"] for answer in answers)
        oracle = found[optimizer, "DDP, clip_grad_norm_"][0]["weights"]
        off = float((answers[0]["weights"] - oracle).abs().max())
        print(f"| {optimizer} | {way} | {peak:.0f} | {1e3 * step_s:.0f} | {off:.1e} |")


if __name__ == "__main__":
    main()
