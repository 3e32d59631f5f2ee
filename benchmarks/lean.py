"""What Lean's memory is worth, beside dense with torch's ways to reuse memory and beside naive sparse training.

    anabranch lab --hosts 4 --rate 10gbit --backend nccl -- python -m benchmarks.lean gpt2-medium resnet152
    anabranch lab --hosts 2 --rate unshaped --backend nccl -- python -m benchmarks.lean resnet152:128 gpt2:8

Prints a Markdown table for each model. With a batch all systems train at it, with as much memory as they take. Without
one no rank may have more than ``--limit-gib``, and each system trains at its own largest batch, which every rank finds
alone, under the allocator's limit, in messages of the sizes that all of them would send: where the line through its
peaks meets the limit less a margin, or less if that was too much. What is put into host memory is limited too, since
the ranks of a lab share it.
"""

import argparse
import gc
import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.activations import checkpointed
from torch import nn
from torch.autograd.graph import save_on_cpu

import anabranch as ab
from anabranch.bench import memory
from anabranch.bench.memory import Subject, of_zoo, sparse_plan
from anabranch.memory.mix import Mode
from anabranch.memory.options import Residuals
from anabranch.memory.probe import Loss
from anabranch.runtime.zoo import SEQUENCES as SEQUENCE_MODELS
from anabranch.runtime.zoo import built

DEVICE = torch.device("cuda", 0)
GIB = 1 << 30
DENSITY = 0.01
MARGIN = 0.92  # of the limit: what the line through two peaks does not say, and what the allocator cannot use
GROWTH = 4  # from one batch to the next at most: peaks need not grow from the start
CLOSE = 0.95  # of the largest batch
BUCKETS = 12  # few, as sparse exchanges like it
ENOUGH_S = 6.0  # of timed steps, where the network is slow
WARM, WARM_MIX, TIMED = 2, 4, 3  # steps; Lean chooses its mix after two
IMAGES, SEQUENCES = 8, 1  # samples to begin with

Step = Callable[[], None]


@dataclass
class Case:
    """A model to train at a batch, on the ranks of a group, within a limit; ``half``: in bfloat16 if it speaks."""

    name: str
    batch: int
    group: dist.ProcessGroup
    limit_nbytes: int
    host_nbytes: int
    half: bool
    system: str = ""
    budget_nbytes: int | None = None  # for a mix of what is done with activations

    @property
    def sizes(self) -> list[int]:
        """Bytes of its parameters."""
        return [parameter.nbytes for parameter in built(self.name, torch.device("meta"), 1)[0].parameters()]

    @property
    def speaks(self) -> bool:
        """Whether it is a language model."""
        return self.name in SEQUENCE_MODELS

    @property
    def optimizer(self) -> Callable[[Any], torch.optim.Optimizer]:
        """As people train such a model."""
        if self.speaks:
            return partial(torch.optim.AdamW, lr=1e-4, fused=True)
        return partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True)

    @property
    def precision(self) -> AbstractContextManager[object]:
        """Images in TF32, as cuDNN does by itself."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.half and self.speaks)

    def built(self) -> tuple[nn.Module, Loss]:
        """The model and its loss."""
        return built(self.name, DEVICE, self.batch)


System = Callable[[Case], tuple[Step, Callable[[], None]]]


def trained(
    case: Case,
    training: Callable[..., Generator[None, None, None]],
    prepare: Callable[[nn.Module], object] = lambda _: None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[Step, Step]:
    """A way to train of ``bench.memory``, in the precision of the case."""
    model, loss = case.built()
    prepare(model)

    def within(wrapped: nn.Module) -> torch.Tensor:
        with around(), case.precision:
            return loss(wrapped)

    running = training(Subject(model, within, case.optimizer, dist.get_world_size(), DENSITY, group=case.group))
    return partial(next, running), running.close


def lean(case: Case, mode: Mode, residuals: Residuals = "in place") -> tuple[Step, Step]:
    """Ours."""
    activations = ab.Activations(mode, case.budget_nbytes, host_nbytes=case.host_nbytes)

    def training(subject: Subject) -> Generator[None, None, None]:
        numel = sum(parameter.numel() for parameter in subject.model.parameters())
        plan = sparse_plan(of_zoo(case.name, 1), DENSITY, 4 * numel // BUCKETS)
        return memory.lean(subject._replace(plan=plan), residuals, activations)

    return trained(case, training)


MIX = "Lean, a mix, residuals on the host"
REUSE_CHECKPOINT, REUSE_HOST, NAIVE = "dense, torch's checkpoint", "dense, torch's save_on_cpu", "naive sparse"
SYSTEMS: dict[str, System] = {
    REUSE_CHECKPOINT: partial(trained, training=memory.ddp, prepare=checkpointed),
    REUSE_HOST: partial(trained, training=memory.ddp, around=partial(save_on_cpu, pin_memory=True)),
    NAIVE: partial(trained, training=memory.naive),
    "Lean, activations kept": partial(lean, mode="keep"),
    "Lean, recomputed": partial(lean, mode="recompute"),
    "Lean, recomputed, residuals on the host": partial(lean, mode="recompute", residuals="host"),
    MIX: partial(lean, mode="auto", residuals="host"),
}
BUDGETS_GIB = (0.75, 1, 1.5, 2, 3, 4, 6)  # the leanest that a mix can be


@dataclass
class Row:
    """What a system has shown."""

    system: str
    batch: int = 0
    peak_nbytes: int = 0
    seconds: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def rate(self) -> float:
        """Samples per second of all ranks."""
        return self.batch * dist.get_world_size() * len(self.seconds) / sum(self.seconds) if self.seconds else 0.0


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--limit-gib", type=float, default=16.0)
    parser.add_argument("--host-gib", type=float, default=20.0, help="per rank")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of language models")
    parser.add_argument("--network", default="", help="what to call it")
    parser.add_argument("--at", nargs="*", default=[], metavar="SYSTEM=BATCH", help="a batch that is known to fit")
    parser.add_argument("--without", nargs="*", default=[], metavar="SYSTEM", help="to leave out, by their names")
    given = parser.parse_args()
    for name in given.without:
        del SYSTEMS[name]
    known = {system: int(batch) for system, _, batch in (text.rpartition("=") for text in given.at)}
    if unknown := known.keys() - SYSTEMS.keys():
        parser.error(f"--at names {', '.join(unknown)}: expected some of {', '.join(SYSTEMS)}")
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    world = dist.group.WORLD
    assert world is not None
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    total = torch.cuda.get_device_properties(0).total_memory
    show(f"\n{datetime.now(UTC).date()}, {dist.get_world_size()} ranks, {given.network}; ")
    show(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; density {DENSITY:g}; {TIMED} steps each;")
    show(f"language models in {given.precision}.")
    host_nbytes, limit_nbytes = int(given.host_gib * GIB), int(given.limit_gib * GIB)
    for subject in given.models:
        name, _, batch = subject.partition(":")
        torch.cuda.set_per_process_memory_fraction(1.0 if batch else limit_nbytes / total)
        show(f"\n## {name}, " + ("equal batches" if batch else f"{given.limit_gib:g} GiB a rank") + "\n")
        half = given.precision == "bf16"
        case = Case(name, int(batch or 0), world, 0 if batch else limit_nbytes, host_nbytes, half)
        tabulate(equal(case) if batch else rows(case, alone, known))
    dist.destroy_process_group()


def tabulate(found: Iterator[Row]) -> None:
    """Print rows as they come."""
    show("| system | batch a rank | peak GiB | less than naive | ms a step | samples/s | × the better reuse | |")
    show("|---|---:|---:|---:|---:|---:|---:|---|")
    rates: dict[str, float] = {}
    naive_nbytes = 0
    for row in found:
        rates[row.system] = row.rate
        naive_nbytes = row.peak_nbytes if row.system == NAIVE else naive_nbytes
        best = max(rates.get(REUSE_CHECKPOINT, 0.0), rates.get(REUSE_HOST, 0.0))
        times = f"{row.rate / best:.2f}" if best else ""
        less = f"{1 - row.peak_nbytes / naive_nbytes:.0%}" if naive_nbytes and row.peak_nbytes else ""
        ms = f"{sum(row.seconds) / len(row.seconds) * 1e3:.0f}" if row.seconds else ""
        cells = [row.batch, f"{row.peak_nbytes / GIB:.2f}", less, ms, f"{row.rate:.1f}", times, row.note]
        show(f"| {row.system} | " + " | ".join(map(str, cells)) + " |")


def rows(case: Case, alone: dist.ProcessGroup, known: Mapping[str, int]) -> Iterator[Row]:
    """One system after the other, each at its largest batch, where that is not known."""
    batches = dict(known)
    for system, make in SYSTEMS.items():
        own = replace(case, system=system)
        if system == MIX:  # larger than what can be kept, and with room to keep something
            ours = [found for name, found in batches.items() if name.startswith("Lean") and found] or [1]
            own.batch = round((min(ours) * max(ours)) ** 0.5)
            own.budget_nbytes = int(MARGIN * case.limit_nbytes) - still_nbytes(case)
        if system in known:
            own.batch = known[system]
        elif system != MIX:
            host_nbytes = case.host_nbytes if system == REUSE_HOST else None
            own.batch = largest(make, replace(own, group=alone), host_nbytes)
        batches[system] = own.batch
        yield Row(system, note="does not fit") if own.batch == 0 else seen(system, own)


def equal(case: Case) -> Iterator[Row]:
    """One system after the other, at the same batch and without a limit."""
    for system in SYSTEMS:
        for budget_gib in BUDGETS_GIB if system == MIX else (None,):
            budget_nbytes = None if budget_gib is None else int(budget_gib * GIB)
            row = seen(system, replace(case, budget_nbytes=budget_nbytes))
            if row.seconds:
                break
        yield row


def seen(system: str, case: Case) -> Row:
    """What it shows, or why it cannot run."""
    try:
        peak_nbytes, seconds = timed(SYSTEMS[system], case)
        return Row(system, case.batch, peak_nbytes, seconds)
    except ValueError as error:  # on every rank alike
        return Row(system, case.batch, note=str(error).partition(". ")[0][:120])
    except torch.OutOfMemoryError as error:  # with messages under way: nothing that follows could be trusted
        again = f"go on with --without what is done and --at '{system}={int(CLOSE * case.batch) or 1}'"
        raise SystemExit(f"{system}, batch {case.batch}: {str(error).partition('. ')[0]}; {again}") from None


def still_nbytes(case: Case) -> int:
    """What Lean has on the device all the time where residuals are on the host."""
    states = 2 if case.speaks else 1
    largest_bucket = max(case.sizes) + sum(case.sizes) // BUCKETS
    return (1 + states) * sum(case.sizes) + 2 * largest_bucket


def largest(make: System, case: Case, host_nbytes: int | None) -> int:
    """The batch of a system that fills the limit, the same on every rank; 0 where none fits."""
    batch = SEQUENCES if case.speaks else IMAGES
    room = math.inf if host_nbytes is None else host_nbytes / kept_nbytes(replace(case, batch=batch))
    failed = math.inf
    known: list[tuple[int, int]] = []
    while (known[-1][0] if known else 0) < CLOSE * batch:
        fits, nbytes = known[-1] if known else (0, 0)
        peak_nbytes = fitting(make, replace(case, batch=batch))
        if not peak_nbytes:
            failed, batch = batch, (fits + batch) // 2
            continue
        known.append((batch, peak_nbytes))
        each_nbytes = max((peak_nbytes - nbytes) / (batch - fits), 1.0)  # from two batches on
        further = (MARGIN * case.limit_nbytes - peak_nbytes) / each_nbytes if fits else batch
        batch = int(min(batch + further, GROWTH * batch, (batch + failed) / 2, room))
    return known[-1][0] if known else 0


def fitting(make: System, case: Case) -> int:
    """What each rank needs, found on each alone, the most of them; 0 if some rank had not enough.

    DDP lays its buckets out anew while NCCL still has the old ones, so there is one gradient more for a moment, which
    is seen by chance where nothing is sent. So its later steps are looked at, and that is added.
    """
    twice = sum(case.sizes) if "dense" in case.system else 0
    try:
        peak_nbytes = timed(make, case, steps=1)[0] + twice
    except torch.OutOfMemoryError as error:
        print(f"rank {dist.get_rank()}, batch {case.batch}: {str(error)[:400]}", file=sys.stderr, flush=True)
        peak_nbytes = 2 * case.limit_nbytes
    agreed = torch.tensor([peak_nbytes], device=DEVICE)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return int(agreed) if agreed <= case.limit_nbytes else 0


def kept_nbytes(case: Case) -> float:
    """What a sample leaves on the device where nothing is reused."""
    plain = partial(trained, training=memory.ddp)
    one, two = (fitting(plain, replace(case, batch=number * case.batch)) for number in (1, 2))
    return max((two - one) / case.batch, 1.0)


def timed(make: System, case: Case, steps: int | None = None) -> tuple[int, list[float]]:
    """The allocator's peak, and the seconds of the later steps; with ``steps`` only the peak of so many later ones."""
    tidy()
    step, close = make(case)
    try:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM if case.budget_nbytes is None else WARM_MIX):
            step()
        torch.cuda.synchronize()
        if steps is not None:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(steps or 0):
            step()
        seconds = []
        for _ in range(TIMED if steps is None else 0):
            dist.barrier(device_ids=[0])
            begun = perf_counter()
            step()
            torch.cuda.synchronize()
            slowest = torch.tensor([perf_counter() - begun], device=DEVICE)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds.append(float(slowest))
            if sum(seconds) > ENOUGH_S:
                break
        return int(torch.cuda.max_memory_allocated()), seconds
    finally:
        close()


def tidy() -> None:
    """So that the next one finds all memory free."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


def show(line: str) -> None:
    """On rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
