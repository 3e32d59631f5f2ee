"""What Lean's memory is worth, beside DDP, DDP with torch's checkpointing, and naive sparse training.

    anabranch lab --hosts 4 --rate unshaped --backend nccl -- python -m benchmarks.lean qwen2.5-0.5b:4 resnet152:64
    anabranch lab --hosts 4 --rate 10gbit --backend nccl -- python -m benchmarks.lean qwen2.5-0.5b --limit-gib 16
    python -m benchmarks.lean qwen2.5-0.5b --limit-gib 16 --predict --predictions rows.json      (no GPU, no ranks)

A model with a batch (``resnet152:64``): all ways train at that batch, with as much memory as they take. Without one: no
rank may have more than ``--limit-gib``, and each way trains at its own largest batch by prediction, or as ``--at``
says; where that was too much, at a tenth less, twice. What chooses within the limit trains at the batch of the fastest
of Lean's other ways.

Rows are printed as they come: a row that fails is noted, and the others go on (``restarting.py``). The last column says
how long a row took, with its start, so that one can plan the time on a GPU. What ``--predictions`` does not know is
predicted beside the rows.

"peak GiB" is that of the steps behind the first ones: in its second step DDP lays its buckets out anew, while NCCL may
still have the old ones, and Lean within a budget has not chosen yet.
"""

import argparse
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from benchmarks import trainings
from benchmarks.activations import checkpointed
from benchmarks.lean_batches import (
    BF16,
    DENSITY,
    DEVICE,
    ON_GPU,
    PRECISIONS,
    Case,
    Training,
    barrier,
    plan_of,
    predicted_batch,
    predicted_nbytes,
    timed,
)
from benchmarks.restarting import board, group_store, joined, supervised, why, worker_place, working
from benchmarks.trainings import TrainingSetup
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined] # not exported to type checkers

import anabranch as ab
from anabranch.lean.options import Mode
from anabranch.tools.predict.memory.training_modes import (
    DDP,
    LEAN,
    LEAN_BF16,
    LEAN_DENSE,
    LEAN_INT8,
    NAIVE,
    OUR_MODES,
)

GIB = 1 << 30
SHRUNK = 0.9  # of a batch that was out of memory
TRIES = 3


class Way(NamedTuple):
    """A way to train: a row of the table.

    mode         of the account
    recomputed   whether activations are
    within       what Lean's budget is: the limit, or a share of what naive sparse training needs; "" if it has none
    """

    title: str
    training: Training
    mode: str
    recomputed: bool = False
    within: Literal["", "limit", "share"] = ""


def setup_of(case: Case, prepare: Callable[[nn.Module], object] = lambda _: None) -> TrainingSetup:
    """What is trained."""
    model, loss = case.model_and_loss()
    prepare(model)
    return TrainingSetup(model, loss, case.optimizer, case.ranks, DENSITY)


def by_ddp(case: Case) -> Generator[None, None, None]:
    """Stock DDP."""
    return trainings.ddp(setup_of(case))


def by_checkpointing(case: Case) -> Generator[None, None, None]:
    """Stock DDP, with torch's checkpointing around every block."""
    return trainings.ddp(setup_of(case, checkpointed))


def by_naive(case: Case) -> Generator[None, None, None]:
    """Sparse training as published codes do it."""
    return trainings.naive(setup_of(case))


def by_lean(case: Case, mode: str, activations: Mode = "keep") -> Generator[None, None, None]:
    """Ours; with a budget it chooses how residuals are stored and where activations are."""
    setup = setup_of(case)._replace(plan=plan_of(case, mode))
    if case.budget_nbytes is not None:
        return trainings.lean(setup, OUR_MODES[mode], within_nbytes=case.budget_nbytes)
    return trainings.lean(setup, OUR_MODES[mode], ab.Activations(activations))


def lean(title: str, mode: str, recomputed: bool = False, within: Literal["", "limit", "share"] = "") -> Way:
    """A row of ours."""
    made = partial(by_lean, mode=mode, activations="recompute" if recomputed else "keep")
    return Way(title, made, mode, recomputed, within)


SYSTEMS: Mapping[str, Way] = {
    "ddp": Way("DDP", by_ddp, DDP),
    "checkpoint": Way("DDP, torch's checkpointing", by_checkpointing, DDP, recomputed=True),
    "naive": Way("naive sparse", by_naive, NAIVE),
    "lean": lean("Lean, in place", LEAN),
    "bf16": lean("Lean, residuals bf16", LEAN_BF16),
    "int8": lean("Lean, residuals int8", LEAN_INT8),
    "dense": lean("Lean, dense", LEAN_DENSE),
    "recomputed": lean("Lean, recomputed", LEAN, recomputed=True),
    "recomputed-bf16": lean("Lean, recomputed, residuals bf16", LEAN_BF16, recomputed=True),
    "recomputed-int8": lean("Lean, recomputed, residuals int8", LEAN_INT8, recomputed=True),
    "recomputed-dense": lean("Lean, dense, recomputed", LEAN_DENSE, recomputed=True),
    "within": lean("Lean, within the limit", LEAN, within="limit"),
    "within-dense": lean("Lean, dense, within the limit", LEAN_DENSE, within="limit"),
    "share": lean("Lean, within a share of naive sparse", LEAN, within="share"),
}
# What the figures of Lean need, the most wanted first.
AT_EQUAL_BATCHES = ("ddp", "naive", "lean", "bf16", "dense", "recomputed-int8", "share")
WITHIN_A_LIMIT = ("checkpoint", "lean", "bf16", "recomputed-bf16", "recomputed-int8", "within")
COLUMNS = (
    "way", "batch a rank", "peak GiB", "predicted", "in first steps", "more than DDP", "of n", "less than naive",
    "× naive's step", "ms a step", "from – to", "samples/s", "× checkpointing", "× best by hand", "row s",
)  # fmt: skip
MEDIANS = ("of n", "less than naive", "× naive's step", "× checkpointing", "× best by hand")


@dataclass(frozen=True)
class Row:
    """What a way has shown (``lean_batches.Shown``); ``row_s``: the whole row, with its start."""

    way: str
    batch: int = 0
    first_nbytes: int = 0
    peak_nbytes: int = 0
    seconds: Sequence[float] = field(default_factory=tuple)
    note: str = ""
    predicted_nbytes: int | None = None
    row_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The mean of its steps; 0 if it has none."""
        return sum(self.seconds) / len(self.seconds) if self.seconds else 0.0

    def rate(self, ranks: int) -> float:
        """Samples per second of all ranks."""
        return self.batch * ranks / self.step_s if self.seconds else 0.0


class Job(NamedTuple):
    """A row to find: of a model, at a batch, 0 for the largest one within the limit."""

    model: str
    batch: int
    way: str


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[:BATCH]", help="of the zoo, or module:function[:BATCH]")
    parser.add_argument(
        "--ways", nargs="*", choices=[*SYSTEMS], help="rows, in this order; by default what figures need"
    )
    parser.add_argument("--without", nargs="*", default=[], metavar="MODEL/WAY", help="rows to leave out")
    parser.add_argument("--limit-gib", type=float, default=16.0)
    parser.add_argument("--share", type=float, help="of naive sparse's peak; default 0.4 in fp32, 0.5 in bf16")
    parser.add_argument("--steps", type=int, default=3, help="to time, where they are short")
    parser.add_argument("--precision", choices=PRECISIONS, default=BF16, help="bf16: by autocast")
    parser.add_argument("--buckets", nargs="+", default=["12"], metavar="[MODEL[/WAY]=]N", help="of Lean's plans")
    parser.add_argument("--network", default="", help="what to call it")
    parser.add_argument("--at", nargs="*", default=[], metavar="MODEL/WAY=BATCH", help="a batch that is known to fit")
    parser.add_argument("--row-seconds", type=float, default=90.0, help="a row that takes longer is ended")
    parser.add_argument("--predict", action="store_true", help="only predict, without ranks")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="written with --predict, else read")
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", 4)), help="with --predict")
    return parser.parse_args()


def jobs_of(given: argparse.Namespace) -> list[Job]:
    """All rows, model by model."""
    found = []
    for text in given.models:
        name, _, batch = text.rpartition(":") if text.rpartition(":")[2].isdigit() else (text, "", "0")
        ways = given.ways or (AT_EQUAL_BATCHES if int(batch) else WITHIN_A_LIMIT)
        found += [Job(name, int(batch), way) for way in ways]
    return [job for job in found if f"{job.model}/{job.way}" not in given.without]


def main() -> None:
    """Predict, supervise the rows, or run them in a worker."""
    given = arguments()
    jobs = jobs_of(given)
    known = {at.rpartition("=")[0]: int(at.rpartition("=")[2]) for at in given.at}
    if unknown := known.keys() - {f"{job.model}/{job.way}" for job in jobs}:
        raise SystemExit(f"--at names {', '.join(unknown)}: expected MODEL/WAY=BATCH of a row that runs")
    if given.predict:
        show_predictions(given, jobs, known)
    elif worker_place() is not None:
        work(given, jobs, joined())
    else:
        supervise(given, jobs, known, read_predictions(given))


def case_of(given: argparse.Namespace, job: Job, batch: int) -> Case:
    """The case of a row."""
    buckets = {row: int(number) for row, _, number in (text.rpartition("=") for text in given.buckets)}
    named = [row for row in (f"{job.model}/{job.way}", job.model, "") if row in buckets]
    number = buckets[named[0]] if named else 12
    return Case(job.model, batch, given.precision, given.ranks, number, given.steps)


def predicted(given: argparse.Namespace, job: Job, known: Mapping[str, int]) -> tuple[int, int | None]:
    """The batch of a row, 0 where none fits or only the rows before it will tell, and its predicted peak."""
    way, batch = SYSTEMS[job.way], job.batch or known.get(f"{job.model}/{job.way}", 0)
    if way.within:
        return batch, None
    batch = batch or predicted_batch(case_of(given, job, 1), way.mode, way.recomputed, int(given.limit_gib * GIB))
    return batch, predicted_nbytes(case_of(given, job, batch), way.mode, way.recomputed) if batch else None


def show_predictions(given: argparse.Namespace, jobs: Sequence[Job], known: Mapping[str, int]) -> None:
    """Batches and peaks without a GPU, and what to give with --at."""
    found, rows = [], {}
    for job in jobs:
        begun = perf_counter()
        batch, nbytes = rows[key_of(job)] = predicted(given, job, known)
        peak = "" if nbytes is None else f"{nbytes / GIB:.2f} GiB"
        print(f"{job.model} {job.way}: batch {batch}, {peak}, found in {perf_counter() - begun:.1f} s", flush=True)
        found += [f"{job.model}/{job.way}={batch}"] if batch and not job.batch else []
        if given.predictions is not None:
            given.predictions.write_text(json.dumps({"for": options_of(given), "rows": rows}, indent=1) + "\n")
    if found:
        print(f"--at {' '.join(found)}")


def read_predictions(given: argparse.Namespace) -> dict[str, tuple[int, int | None]]:
    """What a file knows of rows: batch and peak."""
    if given.predictions is None:
        return {}
    document = json.loads(given.predictions.read_text())
    if document["for"] != options_of(given):
        raise SystemExit(f"{given.predictions} was made for {document['for']}: expected {options_of(given)}")
    return dict(document["rows"])


def options_of(given: argparse.Namespace) -> dict[str, object]:
    """On what predictions depend, beside the row."""
    return {name: getattr(given, name) for name in ("precision", "ranks", "buckets", "limit_gib")}


def key_of(job: Job) -> str:
    """The name of a row in a file of predictions."""
    return f"{job.model}:{job.batch}/{job.way}"


# ------------------------------------------------------------------------------------------------- the supervisor


def supervise(
    given: argparse.Namespace,
    jobs: Sequence[Job],
    known: Mapping[str, int],
    rows: Mapping[str, tuple[int, int | None]],
) -> None:
    """See to the workers; on rank 0 predict beside them, and print rows as they come."""
    store = board()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # else little fits behind other rows
    if os.environ["RANK"] == "0":
        threading.Thread(target=predict_all, args=(given, jobs, known, rows), daemon=True).start()

    def again(number: int) -> bool:
        """Whether a smaller batch may help."""
        return not jobs[number].batch and store.add(f"tries/{number}", 1) < TRIES

    def can_begin(number: int) -> bool:
        return store.check([f"predicted/{number}"])

    table = Table(given)
    command = ["-m", "benchmarks.lean", *sys.argv[1:]]
    for number, result in supervised(command, len(jobs), store, given.row_seconds, again, can_begin):
        job = jobs[number]
        print(f"{job.model} {result}", file=sys.stderr, flush=True)  # should the run be ended before it is predicted
        row = Row(job.way, job.batch, note=why(store, number)) if result is None else Row(**json.loads(result))
        batch, nbytes = json.loads(store.get(f"predicted/{number}"))
        if row.predicted_nbytes is None and row.batch == batch:
            row = replace(row, predicted_nbytes=nbytes)
        if number == 0:
            print(heading(given, jobs, store.get("device").decode() if store.check(["device"]) else "no device"))
        table.show(job, row)
    if os.environ["RANK"] == "0":
        table.show_medians()


def predict_all(
    given: argparse.Namespace,
    jobs: Sequence[Job],
    known: Mapping[str, int],
    rows: Mapping[str, tuple[int, int | None]],
) -> None:
    """In a thread: batches and predicted peaks, which workers and the table wait for; ``rows`` has some of them."""
    store = joined()
    for number, job in enumerate(jobs):
        try:
            found = rows[key_of(job)] if key_of(job) in rows else predicted(given, job, known)
        except Exception:  # rows need no prediction where their batch is given
            traceback.print_exc()
            found = job.batch or known.get(f"{job.model}/{job.way}", 0), None
        store.set(f"predicted/{number}", json.dumps(found))


def heading(given: argparse.Namespace, jobs: Sequence[Job], device: str) -> str:
    """Where and how the rows were found."""
    models: dict[str, list[str]] = {}
    for model in dict.fromkeys(job.model for job in jobs):
        models.setdefault(case_of(given, Job(model, 0, ""), 1).optimizer_name, []).append(model)
    optimizers = ", ".join(f"{name} ({', '.join(those)})" for name, those in models.items())
    return (
        f"\n{datetime.now(UTC).date()}, {given.ranks} ranks, {given.network or 'network not named'}; {device}, torch "
        f"{torch.__version__}; density {DENSITY:g}; up to {given.steps} steps each; in {given.precision}; Lean in "
        f"{', '.join(given.buckets)} buckets; {optimizers}."
    )


class Table:
    """Rows as Markdown, with a heading per model, and their medians over the models.

    "of n" is the difference to DDP over the bytes of all weights; "by hand" is every way that has no budget.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._rows: dict[tuple[str, int], dict[str, Row]] = {}  # by model and batch, by way
        self._ratios: dict[str, list[Mapping[str, float]]] = {}  # by way

    def show(self, job: Job, row: Row) -> None:
        """Print a row."""
        if (job.model, job.batch) not in self._rows:
            where = f"batch {job.batch}" if job.batch else f"{self._given.limit_gib:g} GiB a rank"
            print(f"\n## {job.model}, {where}\n\n| " + " | ".join(COLUMNS) + " | |")
            print("|---|" + "---:|" * (len(COLUMNS) - 1) + "---|")
        rows = self._rows.setdefault((job.model, job.batch), {})
        rows[row.way] = row
        ratios = dict(self._compared(job, row, rows))
        self._ratios.setdefault(row.way, []).append(ratios)
        print(f"| {SYSTEMS[row.way].title} | " + " | ".join(self._cells(row, rows, ratios)) + " |", flush=True)

    def show_medians(self) -> None:
        """Print for each way the medians of its ratios over the models that have them, and how many these are."""
        if len(self._rows) < 2:
            return
        print("\n## Medians over the models\n\n| way | " + " | ".join(MEDIANS) + " |\n|---|" + "---:|" * len(MEDIANS))
        for way, models in self._ratios.items():
            found = ([ratios[name] for ratios in models if name in ratios] for name in MEDIANS)
            cells = (
                f"{ratio_text(name, median(all_))} of {len(all_)}" if all_ else ""
                for name, all_ in zip(MEDIANS, found, strict=True)
            )
            print(f"| {SYSTEMS[way].title} | " + " | ".join(cells) + " |", flush=True)

    def _compared(self, job: Job, row: Row, rows: Mapping[str, Row]) -> Iterator[tuple[str, float]]:
        """Its ratios to rows before it, by column; times of a step are compared where batches are equal."""
        ranks, peak = self._given.ranks, row.peak_nbytes
        ddp, naive, reused = (rows.get(way, Row(way)) for way in ("ddp", "naive", "checkpoint"))
        if peak and ddp.peak_nbytes:
            yield "of n", (peak - ddp.peak_nbytes) / case_of(self._given, job, 1).weights_nbytes
        if peak and naive.peak_nbytes:
            yield "less than naive", 1 - peak / naive.peak_nbytes
        if row.seconds and naive.seconds and row.batch == naive.batch:
            yield "× naive's step", row.step_s / naive.step_s
        if row.seconds and reused.seconds:
            yield "× checkpointing", row.rate(ranks) / reused.rate(ranks)
        by_hand = [other.rate(ranks) for way, other in rows.items() if other.seconds and not SYSTEMS[way].within]
        if row.seconds and SYSTEMS[row.way].within and by_hand:
            yield "× best by hand", row.rate(ranks) / max(by_hand)

    def _cells(self, row: Row, rows: Mapping[str, Row], ratios: Mapping[str, float]) -> Iterator[str]:
        texts = {name: ratio_text(name, ratio) for name, ratio in ratios.items()}
        peak, said, ddp = row.peak_nbytes, row.predicted_nbytes, rows.get("ddp", Row("ddp"))
        yield str(row.batch)
        yield f"{peak / GIB:.2f}" if peak else ""
        yield f"{said / GIB:.2f}" if said else ""
        yield f"{row.first_nbytes / GIB:.2f}" if row.first_nbytes else ""
        yield f"{(peak - ddp.peak_nbytes) / GIB:+.3f}" if peak and ddp.peak_nbytes else ""
        yield texts.get("of n", "")
        yield texts.get("less than naive", "")
        yield texts.get("× naive's step", "")
        yield f"{1e3 * row.step_s:.0f}" if row.seconds else ""
        spread = [f"{1e3 * found(row.seconds):.0f}" for found in (min, max)] if row.seconds else []
        yield f"{' – '.join(spread)} of {len(row.seconds)}" if spread else ""
        yield f"{row.rate(self._given.ranks):.1f}" if row.seconds else ""
        yield texts.get("× checkpointing", "")
        yield texts.get("× best by hand", "")
        yield f"{row.row_s:.0f}" if row.row_s else ""
        yield row.note


def ratio_text(column: str, ratio: float) -> str:
    """A ratio as its column writes it."""
    return f"{ratio:+.3f}" if column == "of n" else f"{ratio:.0%}" if column == "less than naive" else f"{ratio:.2f}"


# -------------------------------------------------------------------------------------------------------- a worker


def work(given: argparse.Namespace, jobs: Sequence[Job], store: TCPStore) -> None:
    """Run rows on this rank, one after another."""
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if ON_GPU else "gloo", store=group_store(store), rank=rank, world_size=ranks)
    store.set("device", torch.cuda.get_device_name() if ON_GPU else "CPU")

    def run(number: int) -> str:
        job = jobs[number]
        barrier()  # rank 0 has written down the row before: all ranks choose batch and budget from the same rows
        before = [
            Row(**json.loads(store.get(f"done/{other}")))
            for other in range(number)
            if jobs[other][:2] == job[:2] and store.check([f"done/{other}"])
        ]
        case = prepared(given, job, store, number, before)
        begun = perf_counter()
        row = seen(job.way, case) if case.batch else Row(job.way, note="does not fit")
        return json.dumps(asdict(replace(row, row_s=perf_counter() - begun)))

    working(run, len(jobs), store)
    dist.destroy_process_group()


def prepared(given: argparse.Namespace, job: Job, store: TCPStore, number: int, before: Sequence[Row]) -> Case:
    """The case of a row, with its batch and its budget; the allocator's limit is set."""
    way, limit_nbytes = SYSTEMS[job.way], int(given.limit_gib * GIB)
    if ON_GPU:
        total_nbytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if job.batch else limit_nbytes / total_nbytes)
    batch = job.batch or json.loads(store.get(f"predicted/{number}"))[0]
    if not batch and way.within:
        ours = [row for row in before if SYSTEMS[row.way].mode in OUR_MODES and row.seconds]
        batch = max(ours, key=lambda row: row.rate(given.ranks)).batch if ours else 1
    if tries := store.add(f"tries/{number}", 0):
        batch = max(1, int(batch * SHRUNK**tries))
    budget_nbytes = limit_nbytes if way.within == "limit" else None
    if way.within == "share":
        share = given.share or (0.4 if given.precision == "fp32" else 0.5)
        naive = next((row.peak_nbytes for row in before if row.way == "naive" and row.peak_nbytes), None)
        naive = naive or predicted_nbytes(case_of(given, job, batch), NAIVE, False)
        budget_nbytes = int(share * naive)
    return replace(case_of(given, job, batch), budget_nbytes=budget_nbytes)


def seen(way: str, case: Case) -> Row:
    """What it shows, or why it is refused."""
    try:
        return Row(way, case.batch, *timed(SYSTEMS[way].training, case))
    except ValueError as error:  # on every rank alike
        return Row(way, case.batch, note=str(error).partition(". ")[0][:160])


if __name__ == "__main__":
    main()
