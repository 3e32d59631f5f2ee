"""The documents that commands print with ``--json``, each declared once.

A command builds its document and prints ``printed(document)``; ``anabranch report`` reads the same class back. Reading
ignores unknown fields, so that a document of a later version can still be drawn, and refuses wrong types. The limits
on numbers are checked on reading only: they keep what is drawn finite. (The document of ``scale`` is ``Scaling``.)
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean, median
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from anabranch.tools.predict.scaling.result import Scaling
from anabranch.values.checks import MAX_NBYTES, MAX_SECONDS
from anabranch.values.plan import MAX_LANES

MAX_NUMBER = 1e30  # a larger one may leave the range of an axis once it is multiplied by a unit

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
StepSeconds = Annotated[float, Field(ge=1e-9, le=MAX_SECONDS)]  # of a whole step: the ratio of two stays finite
Instant = Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS)]  # from the start of backward
Count = Annotated[int, Field(ge=0, le=MAX_NBYTES)]
Positive = Annotated[int, Field(ge=1, le=MAX_NBYTES)]
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Name = Annotated[str, Field(min_length=1)]

LEAST_GAIN = 0.02  # share of a step, below which nothing is called faster
LEAST_ROUNDS = 0.85  # share of the rounds in which it must be faster: all but one of 7 or 8

# Rows of a benchmark that others are compared with.
COMPUTE, BASELINE, OURS = "compute only", "DDP", "DataParallel"
COMPILED = ", compiled"  # ends the name of a contestant's twin under torch.compile


class _Read:
    """pydantic's settings for every document and its parts."""

    __slots__ = ()
    __pydantic_config__: ClassVar = {"extra": "ignore", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBucket(_Read):
    """One bucket of a step; times count from the start of backward, and one rank sends ``sent_nbytes`` for it.

    Of a two-level bucket ``start_s`` and ``end_s`` are those of what nodes exchange. ``scatter`` and ``gather``, from
    when until when, are its stages inside nodes; a flat one has none. Otherwise None where a number is not known, as of
    measured steps; those that are predicted lack ``sent_nbytes`` at most.
    """

    index: Count
    lane: Annotated[int, Field(ge=0, lt=MAX_LANES)]
    collective: Name
    tensors: Count
    nbytes: Count | None
    ready_s: Instant | None
    start_s: Instant | None
    end_s: Instant | None
    names: Annotated[tuple[Name, ...], Field(min_length=1)]
    sent_nbytes: Count | None = None
    scatter: tuple[Instant, Instant] | None = None
    gather: tuple[Instant, Instant] | None = None

    def __post_init__(self) -> None:
        if self.start_s is not None and self.end_s is not None and self.end_s < self.start_s:
            raise ValueError(f"bucket {self.index} ends at {self.end_s} s, before it starts at {self.start_s} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations(_Read):
    """The durations of one step; ``overlap`` is the share of communication, 0 to 1, that computation hides."""

    forward_s: Seconds
    backward_s: Seconds
    finish_s: Seconds
    communication_s: Seconds
    exposed_s: Seconds
    overlap: Number
    iteration_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep(Durations):
    """What the documents of ``plan`` and ``simulate`` have in common: one step of one plan on one network."""

    world_size: Positive
    fingerprint: str
    lanes: Count
    buckets: tuple[PlannedBucket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument(PredictedStep):
    """``plan --json``. Speed-ups are ratios of iteration times."""

    command: Literal["plan"] = "plan"
    planner: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of the planner
    lower_bound_s: Seconds
    speedup_over_ddp_default: Number | None
    speedup_over_per_tensor: Number | None
    written: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateDocument(PredictedStep):
    """``simulate --json``. Either ``plan`` is the file of a plan, or ``planner`` made one."""

    command: Literal["simulate"] = "simulate"
    plan: str | None = None
    planner: str | None = None
    written: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComparedPlanner(_Read):
    """One planner's plan, or the plan for one compression, and what is predicted of it.

    ``speedup`` is over DDP's default, and ``above_bound`` how much later this plan finishes than ``lower_bound_s``, as
    a share of it. The low and high iteration times are those on a network one measured spread faster and slower.
    ``kinds`` is the share of all values by exchange, and ``error`` the expected squared error of a step's averages,
    relative to them; files of earlier versions have neither.
    """

    name: str
    planner: str
    options: Mapping[str, Any]
    fingerprint: str
    buckets: Count
    lanes: Count
    finish_s: Seconds
    exposed_s: Seconds
    iteration_s: Seconds
    speedup: Number | None
    lower_bound_s: Seconds
    above_bound: Number
    iteration_low_s: Seconds | None = None
    iteration_high_s: Seconds | None = None
    kinds: Mapping[str, Number] = field(default_factory=dict)
    error: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareDocument(_Read):
    """``compare --json``; ``trace`` and ``network`` as they were named on the command line.

    ``compressed``: the plan for each compression, which ``assumptions`` are for. ``best`` is of ``rows``.
    """

    command: Literal["compare"] = "compare"
    trace: str | None = None
    network: str | None = None
    world_size: Positive
    forward_s: Seconds
    backward_s: Seconds
    best: str
    rows: tuple[ComparedPlanner, ...]
    compressed: tuple[ComparedPlanner, ...] = ()
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMode(_Read):
    """The peak of one training mode: bytes by kind of object, their sum, and when in a step it occurs (``at``)."""

    kinds: Mapping[str, Count]
    predicted_nbytes: Count
    at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDocument(_Read):
    """``memory --json``. Batches are per rank; the last two fields are None where they were not asked for."""

    command: Literal["memory"] = "memory"
    model: str
    batch_size: Positive
    ranks: Positive
    density: Number | None = None
    optimizer: str
    activations: str = ""
    assumptions: tuple[str, ...] = ()
    modes: Mapping[str, MemoryMode]
    within_nbytes: Count | None = None
    largest_batch: Mapping[str, Count] | None = None


@dataclass(frozen=True, slots=True)
class BenchmarkRow(_Read):
    """One contestant: seconds per step in each of its turns, and the predicted step where there is a prediction.

    ``card_nbytes``: what passed a host's network card in a step, where that is known: of what it received and sent the
    greater number, mean over the hosts. ``compile_s``: on rank 0, each step in which torch compiled something, of a
    compiled contestant.
    """

    name: str
    turns_s: Annotated[tuple[StepSeconds, ...], Field(min_length=1)]
    predicted_s: Seconds | None = None
    buckets: Count | None = None
    lanes: Count | None = None
    card_nbytes: Number | None = None
    compile_s: tuple[Seconds, ...] = ()

    @property
    def step_s(self) -> float:
        """Median over the turns."""
        return median(self.turns_s)

    @property
    def prediction_error(self) -> float | None:
        """The prediction's relative error: +0.1 where it is 10 % too long."""
        return None if self.predicted_s is None else self.predicted_s / self.step_s - 1

    def ratio_to(self, other: "BenchmarkRow") -> float:
        """Median over the rounds of the ratio of the two, which were measured minutes apart at most."""
        return median(own / theirs for own, theirs in zip(self.turns_s, other.turns_s, strict=True))


@dataclass(frozen=True, slots=True)
class Benchmark(_Read):
    """Everything measured on one model. A step that sends every gradient in full cannot be shorter than ``bound_s``."""

    model: str
    batch: Positive
    unit: str
    ranks: Positive
    rows: tuple[BenchmarkRow, ...]
    bound_s: Seconds
    explanation: str
    facts: Mapping[str, str]
    skipped: tuple[str, ...] = ()
    ranks_per_host: Positive = 1

    def __post_init__(self) -> None:
        turns = {len(row.turns_s) for row in self.rows}
        if BASELINE not in {row.name for row in self.rows} or len(turns) != 1:
            rows = f"{', '.join(row.name for row in self.rows)} of {sorted(turns)} turns"
            raise ValueError(f"a benchmark has the rows {rows}: expected {BASELINE} and as many turns for all")

    def row(self, name: str) -> BenchmarkRow:
        """The contestant of this name."""
        return next(row for row in self.rows if row.name == name)

    def ratio_to_ddp(self, row: BenchmarkRow) -> float:
        """Median over the rounds of this contestant's step over stock DDP's in the same round."""
        return row.ratio_to(self.row(BASELINE))

    def card_to_ddp(self, row: BenchmarkRow) -> float | None:
        """This contestant's bytes through a host's network card over stock DDP's, where both are known."""
        base = self.row(BASELINE).card_nbytes
        return row.card_nbytes / base if row.card_nbytes is not None and base else None

    def is_faster(self, row: BenchmarkRow) -> bool:
        """Whether its step is shorter than stock DDP's by more than noise: in most rounds, and by enough.

        A DataParallel that runs DDP's own buckets, of which nothing is known, is not, whatever the clock said.
        """
        base = self.row(BASELINE)
        won = [own_s < ddp_s for own_s, ddp_s in zip(row.turns_s, base.turns_s, strict=True)]
        return row.buckets is not None and fmean(won) >= LEAST_ROUNDS and self.ratio_to_ddp(row) <= 1 - LEAST_GAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDocument(_Read):
    """``bench --json``; it also prints what follows from the turns, which is computed again on reading."""

    command: Literal["bench"] = "bench"
    benchmarks: tuple[Benchmark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTraining(_Read):
    """One training: its loss, averaged over the ranks, at each step, and the seconds since its start, search included.

    code      what a user writes for it
    memory    bytes of parameters, gradients, the optimizer's state and residuals of a rank
    chosen    what DataParallel found, in a sentence or two; empty for stock DDP, as is ``explanation``
    """

    name: Name
    code: str
    losses: Annotated[tuple[Number, ...], Field(min_length=1)]
    elapsed_s: tuple[Seconds, ...]
    memory: Mapping[str, Count]
    chosen: str = ""
    explanation: str = ""

    def __post_init__(self) -> None:
        if len(self.losses) != len(self.elapsed_s):
            raise ValueError(
                f"{self.name} has {len(self.losses)} losses at {len(self.elapsed_s)} times: expected as many of both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoDocument(_Read):
    """``demo --json``: trainings of one model under several setups; those that send less have more steps than DDP.

    link         the network between the ranks, in words
    benchmark    the steps of all setups and of computing alone, in turns
    """

    command: Literal["demo"] = "demo"
    link: str
    parameters: Count
    benchmark: Benchmark
    trainings: tuple[DemoTraining, ...]

    def __post_init__(self) -> None:
        trained, timed = [one.name for one in self.trainings], [row.name for row in self.benchmark.rows]
        if BASELINE not in trained or timed != [COMPUTE, *trained]:
            raise ValueError(
                f"a demo has the trainings {', '.join(trained)} and the steps of {', '.join(timed)}: expected "
                f"{BASELINE} among the trainings, and the steps of {COMPUTE} and of each training in the same order"
            )

    def training(self, name: str) -> DemoTraining:
        """The training of this name."""
        return next(one for one in self.trainings if one.name == name)


# --------------------------------------------------------------------------------------------------- print and read

Document = PlanDocument | SimulateDocument | CompareDocument | Scaling | MemoryDocument | BenchDocument | DemoDocument

BY_COMMAND: Mapping[str, type[Document]] = {
    str(own.default): kind for kind in get_args(Document) for own in fields(kind) if own.name == "command"
}


def printed(document: Document) -> dict[str, Any]:
    """The document as ``--json`` prints it: its command, then every field by its name."""
    said = {"command": document.command, **asdict(document)}
    if isinstance(document, BenchDocument):
        said["benchmarks"] = [_with_ratios(benchmark) for benchmark in document.benchmarks]
    return said


def _with_ratios(benchmark: Benchmark) -> dict[str, Any]:
    rows = [
        {
            **asdict(row),
            "step_s": row.step_s,
            "ratio_to_ddp": benchmark.ratio_to_ddp(row),
            "card_to_ddp": benchmark.card_to_ddp(row),
            "ratio_to_bound": row.step_s / benchmark.bound_s,
            "prediction_error": row.prediction_error,
        }
        for row in benchmark.rows
    ]
    return {**asdict(benchmark), "rows": rows}
