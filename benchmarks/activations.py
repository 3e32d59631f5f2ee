"""What activations cost: peak memory and time of a step, kept, recomputed or a mix; prints Markdown.

python benchmarks/activations.py [model] [batch]          (resnet152 128; needs an NVIDIA GPU and torchvision)
"""

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from statistics import median, quantiles

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from anabranch.lean.activations.blocks import blocks_of
from anabranch.lean.activations.profiler import ManagedActivations
from anabranch.lean.activations.solver import choose
from anabranch.lean.options import Mode
from anabranch.tools.bench.zoo import model_and_step

WARM, ROUNDS = 6, 10  # the mix is chosen after two steps
GIB = 1 << 30
BUDGETS_GIB = (2, 3, 4, 6, 9)


@dataclass
class Result:
    """What a variant has shown."""

    peak_nbytes: int
    seconds: list[float]
    note: str = ""


Prepare = Callable[[nn.Module], ManagedActivations | None]


def main() -> None:
    """Run the variants one after the other, each on a fresh model, and print a table."""
    name = sys.argv[1] if len(sys.argv) > 1 else "resnet152"
    batch = int(sys.argv[2]) if len(sys.argv) > 2 else 128
    device = torch.device("cuda", 0)
    print(f"\n{datetime.now(UTC).date()}, {torch.cuda.get_device_name(device)}, torch {torch.__version__}.")
    print(f"{name}, batch {batch}, SGD with momentum, fp32; medians of {ROUNDS} steps after {WARM}.")
    print("\n| activations | peak GiB | ms a step | interquartile | |\n|---|---|---|---|---|")
    variants: dict[str, tuple[Prepare, Callable[[], AbstractContextManager[object]]]] = {
        "kept": (managed("keep"), nullcontext),
        "torch's checkpoint, per block": (checkpointed, nullcontext),
        "torch's save_on_cpu(pin_memory=True)": (managed("keep"), lambda: save_on_cpu(pin_memory=True)),
        "recomputed": (managed("recompute"), nullcontext),
    }
    for budget in BUDGETS_GIB:
        variants[f"mix within {budget} GiB"] = (managed("auto", budget * GIB), nullcontext)
    for title, (prepare, around) in variants.items():
        try:
            show(title, measured(name, batch, device, prepare, around))
        except (ValueError, torch.OutOfMemoryError) as error:
            print(f"| {title} | | | | {str(error).splitlines()[0]} |", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def managed(mode: Mode, budget_nbytes: int | None = None) -> Prepare:
    """Ours; in mode "auto" every forward begins with a choice, until there is one."""

    def prepare(model: nn.Module) -> ManagedActivations:
        ours = ManagedActivations(model, mode)
        if budget_nbytes is not None:
            model.register_forward_pre_hook(
                lambda *_: ours.choose(lambda blocks: choose(blocks, budget_nbytes)._asdict()), prepend=True
            )
        return ours

    return prepare


def checkpointed(model: nn.Module) -> None:
    """Torch's own, around every block that has a matrix."""
    for block in blocks_of(model):
        for part in block.modules:
            if not any(parameter.dim() > 1 for parameter in part.parameters()):
                continue  # cheap, and perhaps in place
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def measured(
    name: str,
    batch: int,
    device: torch.device,
    prepare: Prepare,
    around: Callable[[], AbstractContextManager[object]],
) -> Result:
    """Peak of all steps but the first two, and the seconds of the later ones, by the device's clock."""
    torch.manual_seed(0)
    model, step = model_and_step(name, device, batch=batch)
    ours = prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    marks: list[torch.cuda.Event] = []
    for turn in range(WARM + ROUNDS):
        if turn == WARM - 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        with around():
            step(model)
        optimizer.step()
    marks.append(torch.cuda.Event(enable_timing=True))
    marks[-1].record()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 for a, b in zip(marks[WARM:-1], marks[WARM + 1 :], strict=True)]
    peak = torch.cuda.max_memory_allocated(device)
    note = noted(ours)
    if ours is not None:
        ours.undo()
    return Result(peak, seconds, note)


def noted(ours: ManagedActivations | None) -> str:
    """What was chosen."""
    if ours is None:
        return ""
    words = []
    if ours.agreed:
        taken = list(ours.agreed["actions"].values())
        words.append(", ".join(f"{taken.count(action)} {action}" for action in dict.fromkeys(taken)))
        forecast = ours.agreed["forecast"]
        words.append(f"predicted {forecast.peak_nbytes / GIB:.2f} GiB, +{forecast.extra_s * 1e3:.0f} ms")
    return "; ".join(words)


def show(title: str, result: Result) -> None:
    """One line of the table."""
    low, _, high = quantiles(result.seconds, n=4)
    peak, middle = result.peak_nbytes / GIB, median(result.seconds) * 1e3
    print(f"| {title} | {peak:.2f} | {middle:.1f} | {(high - low) * 1e3:.1f} | {result.note} |", flush=True)


if __name__ == "__main__":
    main()
