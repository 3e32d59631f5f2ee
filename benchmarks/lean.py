"""What Lean's memory is worth, beside DDP, dense with torch's ways to reuse memory, and naive sparse training.

    anabranch lab --hosts 4 --rate 10gbit --backend nccl -- python -m benchmarks.lean gpt2-medium resnet152
    anabranch lab --hosts 2 --rate unshaped --backend nccl -- python -m benchmarks.lean resnet152:128 gpt2:8

Beside the measured peak is the predicted one, where activations are kept or recomputed.

Prints a Markdown table for each model. With a batch all systems train at it, with as much memory as they take; only
those that choose within a limit are told ``--limit-gib``. Without one no rank may have more than that, and each system
trains at its own largest batch, which every rank finds alone, under the allocator's limit (naive sparse in messages of
the sizes that all would send): where the line through its peaks meets the limit less a margin, or less if that was too
much. A mix of Lean's, and what Lean chooses within the limit, trains between its other batches. What is put into host
memory is limited too, since the ranks of a lab share it.
"""

import argparse
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

import torch
import torch.distributed as dist
from benchmarks.activations import checkpointed
from benchmarks.lean_batches import BUCKETS, CLOSE, DEVICE, MARGIN, TIMED, Case, Step, System, largest, timed
from torch import nn
from torch.autograd.graph import save_on_cpu

import anabranch as ab
from anabranch.activations.policy import Mode
from anabranch.activations.recompute import recompute
from anabranch.bench import trainings
from anabranch.bench.memory import compressed_plan, zoo_build
from anabranch.bench.trainings import TrainingSetup
from anabranch.estimate import account
from anabranch.estimate.account import DDP, LEAN, LEAN_BF16, LEAN_DENSE, LEAN_HOST, LEAN_INT8, WAYS, Setting
from anabranch.estimate.probe import Loss, probe

GIB = 1 << 30
DENSITY = 0.01


def trained(
    case: Case,
    training: Callable[..., Generator[None, None, None]],
    prepare: Callable[[nn.Module], object] = lambda _: None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[Step, Step]:
    """A way to train of ``bench.trainings``, in the precision of the case."""
    model, loss = case.model_and_loss()
    prepare(model)

    def within(wrapped: nn.Module) -> torch.Tensor:
        with around(), case.precision:
            return loss(wrapped)

    running = training(TrainingSetup(model, within, case.optimizer, dist.get_world_size(), DENSITY, group=case.group))
    return partial(next, running), running.close


def plan_of(case: Case, way: str) -> ab.Plan:
    """The buckets that Lean exchanges in this mode."""
    return compressed_plan(zoo_build(case.name, 1), way, DENSITY, sum(case.sizes) // case.buckets)


def lean(case: Case, mode: Mode, way: str = LEAN) -> tuple[Step, Step]:
    """Ours."""
    budget_nbytes = case.budget_nbytes if mode == "auto" else None
    activations = ab.Activations(mode, budget_nbytes, host_nbytes=case.host_nbytes)

    def training(setup: TrainingSetup) -> Generator[None, None, None]:
        return trainings.lean(setup._replace(plan=plan_of(case, way)), WAYS[way], activations)

    return trained(case, training)


def within(case: Case, way: str) -> tuple[Step, Step]:
    """Ours, which chooses within the case's budget."""

    def training(setup: TrainingSetup) -> Generator[None, None, None]:
        planned = setup._replace(plan=plan_of(case, way))
        return trainings.lean(planned, WAYS[way], within_nbytes=case.budget_nbytes)

    return trained(case, training)


MIX = "Lean, a mix, residuals on the host"
REUSE_CHECKPOINT, REUSE_HOST, NAIVE = "dense, torch's checkpoint", "dense, torch's save_on_cpu", "naive sparse"
STOCK, WITHIN, WITHIN_DENSE = "DDP", "Lean, within the limit", "Lean, dense, within the limit"
PLAIN = partial(trained, training=trainings.ddp)
SYSTEMS: dict[str, System] = {
    STOCK: PLAIN,
    REUSE_CHECKPOINT: partial(trained, training=trainings.ddp, prepare=checkpointed),
    REUSE_HOST: partial(trained, training=trainings.ddp, around=partial(save_on_cpu, pin_memory=True)),
    NAIVE: partial(trained, training=trainings.naive),
    "Lean, dense": partial(lean, mode="keep", way=LEAN_DENSE),
    "Lean, dense, recomputed": partial(lean, mode="recompute", way=LEAN_DENSE),
    "Lean, activations kept": partial(lean, mode="keep"),
    "Lean, residuals bf16": partial(lean, mode="keep", way=LEAN_BF16),
    "Lean, residuals int8": partial(lean, mode="keep", way=LEAN_INT8),
    "Lean, recomputed": partial(lean, mode="recompute"),
    "Lean, recomputed, residuals bf16": partial(lean, mode="recompute", way=LEAN_BF16),
    "Lean, recomputed, residuals on the host": partial(lean, mode="recompute", way=LEAN_HOST),
    MIX: partial(lean, mode="auto", way=LEAN_HOST),
    WITHIN: partial(within, way=LEAN),
    WITHIN_DENSE: partial(within, way=LEAN_DENSE),
}
PREDICTED: dict[str, tuple[str, bool]] = {  # the mode of the account, and whether activations are recomputed
    STOCK: (DDP, False),
    NAIVE: (account.NAIVE, False),
    **{
        name: (made.keywords.get("way", LEAN), made.keywords["mode"] == "recompute")
        for name, made in SYSTEMS.items()
        if isinstance(made, partial) and made.func is lean and made.keywords["mode"] != "auto"
    },
}
COLUMNS = (
    "system", "batch a rank", "peak GiB", "predicted", "more than DDP", "of n", "less than naive", "ms a step",
    "from – to", "samples/s", "× the better reuse",
)  # fmt: skip
BUDGETS_GIB = (0.75, 1, 1.5, 2, 3, 4, 6)  # the leanest that a mix can be


@dataclass
class Row:
    """What a system has shown."""

    system: str
    batch: int = 0
    peak_nbytes: int = 0
    seconds: list[float] = field(default_factory=list)
    note: str = ""
    predicted_nbytes: int | None = None

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
    parser.add_argument("--steps", type=int, default=TIMED, help="to time, where they are short")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="bf16: by autocast")
    parser.add_argument("--buckets", type=int, default=BUCKETS, help="of Lean's plans: more need less memory")
    parser.add_argument("--network", default="", help="what to call it")
    parser.add_argument("--at", nargs="*", default=[], metavar="SYSTEM=BATCH", help="a batch that is known to fit")
    parser.add_argument("--without", nargs="*", default=[], metavar="SYSTEM", help="to leave out, by their names")
    given = parser.parse_args()
    known = {system: int(batch) for system, _, batch in (text.rpartition("=") for text in given.at)}
    if unknown := (known.keys() | set(given.without)) - SYSTEMS.keys():
        parser.error(f"no system is called {', '.join(unknown)}: expected some of {', '.join(SYSTEMS)}")
    systems = {name: make for name, make in SYSTEMS.items() if name not in given.without}
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    world = dist.group.WORLD
    assert world is not None
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    total = torch.cuda.get_device_properties(0).total_memory
    show(f"\n{datetime.now(UTC).date()}, {dist.get_world_size()} ranks, {given.network}; ")
    show(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; density {DENSITY:g};")
    show(f"up to {given.steps} steps each; in {given.precision}; Lean in {given.buckets} buckets.")
    host_nbytes, limit_nbytes = int(given.host_gib * GIB), int(given.limit_gib * GIB)
    for setup in given.models:
        name, _, batch = setup.partition(":")
        torch.cuda.set_per_process_memory_fraction(1.0 if batch else limit_nbytes / total)
        show(f"\n## {name}, " + ("equal batches" if batch else f"{given.limit_gib:g} GiB a rank") + "\n")
        half = given.precision == "bf16"
        case = Case(name, int(batch or 0), world, 0 if batch else limit_nbytes, host_nbytes, half, steps=given.steps)
        case = replace(case, buckets=given.buckets)
        tabulate(equal(case, systems, limit_nbytes) if batch else rows(case, systems, alone, known), sum(case.sizes))
    dist.destroy_process_group()


def tabulate(found: Iterator[Row], weights_nbytes: int) -> None:
    """Print rows as they come; "of n": the difference to DDP over the bytes of all weights."""
    show("| " + " | ".join(COLUMNS) + " | |")
    show("|---|" + "---:|" * (len(COLUMNS) - 1) + "---|")
    rates: dict[str, float] = {}
    naive_nbytes = ddp_nbytes = 0
    for row in found:
        rates[row.system] = row.rate
        naive_nbytes = row.peak_nbytes if row.system == NAIVE else naive_nbytes
        ddp_nbytes = row.peak_nbytes if row.system == STOCK else ddp_nbytes
        more_nbytes = row.peak_nbytes - ddp_nbytes if ddp_nbytes and row.peak_nbytes else None
        more = (
            ["", ""] if more_nbytes is None else [f"{more_nbytes / GIB:+.2f}", f"{more_nbytes / weights_nbytes:+.2f}"]
        )
        said = "" if row.predicted_nbytes is None else f"{row.predicted_nbytes / GIB:.2f}"
        best = max(rates.get(REUSE_CHECKPOINT, 0.0), rates.get(REUSE_HOST, 0.0))
        times = f"{row.rate / best:.2f}" if best else ""
        less = f"{1 - row.peak_nbytes / naive_nbytes:.0%}" if naive_nbytes and row.peak_nbytes else ""
        ms = f"{sum(row.seconds) / len(row.seconds) * 1e3:.0f}" if row.seconds else ""
        spread = f"{min(row.seconds) * 1e3:.0f} – {max(row.seconds) * 1e3:.0f} of {len(row.seconds)}" if ms else ""
        cells = [
            row.batch,
            f"{row.peak_nbytes / GIB:.2f}",
            said,
            *more,
            less,
            ms,
            spread,
            f"{row.rate:.1f}",
            times,
            row.note,
        ]
        show(f"| {row.system} | " + " | ".join(map(str, cells)) + " |")


def rows(
    case: Case, systems: Mapping[str, System], alone: dist.ProcessGroup, known: Mapping[str, int]
) -> Iterator[Row]:
    """One system after the other, each at its largest batch, where that is not known."""
    batches = dict(known)
    for system, make in systems.items():
        own = replace(case, dense=system in (STOCK, REUSE_CHECKPOINT, REUSE_HOST))
        if system == MIX:
            own = replace(own, budget_nbytes=int(MARGIN * case.limit_nbytes) - still_nbytes(case))
        if system in (WITHIN, WITHIN_DENSE):
            own = replace(own, budget_nbytes=case.limit_nbytes)
        if system in known:
            batch = known[system]
        elif system in (MIX, WITHIN, WITHIN_DENSE):  # larger than what can be kept, and with room to keep something
            ours = [found for name, found in batches.items() if name.startswith("Lean") and found] or [1]
            batch = round((min(ours) * max(ours)) ** 0.5)
        else:
            batch = largest(make, replace(own, group=alone), PLAIN if system == REUSE_HOST else None)
        batches[system] = batch
        yield Row(system, note="does not fit") if batch == 0 else seen(make, system, replace(own, batch=batch))


def equal(case: Case, systems: Mapping[str, System], limit_nbytes: int) -> Iterator[Row]:
    """One system after the other, at the same batch; only those that choose within the limit know of it."""
    for system, make in systems.items():
        own_nbytes = limit_nbytes if system in (WITHIN, WITHIN_DENSE) else None
        for budget_nbytes in [int(gib * GIB) for gib in BUDGETS_GIB] if system == MIX else [own_nbytes]:
            row = seen(make, system, replace(case, budget_nbytes=budget_nbytes))
            if row.seconds:
                break
        yield row


def seen(make: System, system: str, case: Case) -> Row:
    """What it shows, or why it cannot run."""
    try:
        peak_nbytes, seconds = timed(make, case)
        said = predicted_nbytes(case, *PREDICTED[system]) if system in PREDICTED else None
        return Row(system, case.batch, peak_nbytes, seconds, predicted_nbytes=said)
    except ValueError as error:  # on every rank alike
        return Row(system, case.batch, note=str(error).partition(". ")[0][:120])
    except torch.OutOfMemoryError as error:  # with messages under way: nothing that follows could be trusted
        again = f"go on with --without what is done and --at '{system}={int(CLOSE * case.batch) or 1}'"
        raise SystemExit(f"{system}, batch {case.batch}: {str(error).partition('. ')[0]}; {again}") from None


def predicted_nbytes(case: Case, mode: str, recomputed: bool) -> int:
    """The peak that ``anabranch memory`` predicts."""

    def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """One that needs as little beside its state as a fused one."""
        if case.speaks:
            return torch.optim.AdamW(parameters, foreach=False)
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=False)

    def build(device: torch.device) -> tuple[nn.Module, Loss]:
        model, loss = zoo_build(case.name, case.batch)(device)
        if recomputed:
            recompute(model)
        return model, loss

    buckets = [bucket.names for bucket in plan_of(case, mode).buckets] if mode in WAYS else None
    setting = Setting(ranks=dist.get_world_size(), density=DENSITY, buckets=buckets)
    return account.predict(probe(build, optimizer, half=case.half), mode, setting).nbytes


def still_nbytes(case: Case) -> int:
    """What Lean has on the device all the time where residuals are on the host."""
    states = 2 if case.speaks else 1
    largest_bucket = max(case.sizes) + sum(case.sizes) // case.buckets
    return (1 + states) * sum(case.sizes) + 4 * largest_bucket  # two slots for gradients, two for the residual


def show(line: str) -> None:
    """On rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
