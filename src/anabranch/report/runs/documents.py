"""What ``--json`` prints and what loggers write, as far as a report shows it: read liberally, typed strictly.

Unknown fields are left out, so that a document of a later version can still be drawn.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from anabranch.checks import MAX_NBYTES, MAX_SECONDS
from anabranch.plan import MAX_LANES
from anabranch.scaling.result import Scaling

# Numbers that can be drawn: products of them with any unit stay finite.
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Instant = Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS)]
Count = Annotated[int, Field(ge=0, le=MAX_NBYTES)]
Positive = Annotated[int, Field(ge=1, le=MAX_NBYTES)]
MOST_DRAWN = 1e30
Number = Annotated[float, Field(ge=-MOST_DRAWN, le=MOST_DRAWN)]
Name = Annotated[str, Field(min_length=1)]


class Document(BaseModel):
    """Nothing infinite, nothing converted; what is not known here is passed over."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class PlannedBucket(Document):
    """A row of ``plan --json`` and ``simulate --json``."""

    index: Count
    lane: Annotated[int, Field(ge=0, lt=MAX_LANES)]
    collective: Name
    nbytes: Count
    ready_s: Instant
    start_s: Instant
    end_s: Instant
    names: Annotated[tuple[Name, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.end_s < self.start_s:
            raise ValueError(f"bucket {self.index} ends at {self.end_s} s, before it starts at {self.start_s} s")
        return self


class PlannedStep(Document):
    """``plan --json`` or ``simulate --json``."""

    command: Literal["plan", "simulate"]
    planner: str | None = None
    plan: str | None = None
    world_size: Positive
    fingerprint: str
    forward_s: Seconds
    backward_s: Seconds
    buckets: tuple[PlannedBucket, ...]


class ComparedPlanner(Document):
    """A row of ``compare --json``."""

    name: str
    buckets: Count
    lanes: Count
    finish_s: Seconds
    exposed_s: Seconds
    iteration_s: Seconds
    speedup: Number | None
    above_bound: Number
    iteration_low_s: Seconds | None = None
    iteration_high_s: Seconds | None = None


class Comparison(Document):
    """``compare --json``."""

    command: Literal["compare"]
    world_size: Positive
    best: str
    rows: tuple[ComparedPlanner, ...]
    trace: str | None = None
    network: str | None = None


class MemoryMode(Document):
    """One way to train in ``memory --json``."""

    kinds: Mapping[str, Count]
    predicted_nbytes: Count
    host_nbytes: Count = 0
    measured_nbytes: Count | None = None


class Memory(Document):
    """``memory --json``."""

    command: Literal["memory"]
    model: str
    batch_size: Positive
    ranks: Positive
    optimizer: str
    assumptions: tuple[str, ...] = ()
    modes: Mapping[str, MemoryMode]
    largest_batch: Mapping[str, Count] = {}
    samples_per_s: Mapping[str, Number] = {}


class Contestant(Document):
    """A row of a benchmark."""

    name: str
    turns_s: tuple[Seconds, ...]
    step_s: Seconds
    ratio_to_ddp: Number
    predicted_s: Seconds | None = None
    prediction_error: Number | None = None
    buckets: Count | None = None
    lanes: Count | None = None
    sent_nbytes: Number | None = None


class Benchmark(Document):
    """Everything that ``bench`` measured on one model."""

    model: str
    batch: Positive
    unit: str
    ranks: Positive
    bound_s: Seconds
    explanation: str
    facts: Mapping[str, str]
    skipped: tuple[str, ...] = ()
    rows: tuple[Contestant, ...]


class Bench(Document):
    """``bench --json``."""

    command: Literal["bench"]
    benchmarks: tuple[Benchmark, ...]


class DemoRun(Document):
    """One of the two trainings of ``demo --json``."""

    first_loss: Number
    last_loss: Number
    step_s: Seconds
    step_low_s: Seconds
    step_high_s: Seconds


class Demo(Document):
    """``demo --json``."""

    command: Literal["demo"]
    workers: Positive
    steps: Positive
    parameters: Count
    runs: Mapping[str, DemoRun]
    explanation: str
    notes: tuple[str, ...] = ()


class StepLine(Document):
    """A line of ``ab.JsonLines``, or of a file of losses; ``measured_s`` or ``loss`` is there."""

    step: Count
    rank: Count = 0
    loss: Number | None = None
    measured_s: Instant | None = None
    predicted_s: Instant | None = None
    compute_s: Instant | None = None
    exposed_s: Instant | None = None
    overlap: Number | None = None
    sent_nbytes: Count | None = None
    density: Number | None = None
    plan: str | None = None
    buckets: Count | None = None
    lanes: Count | None = None
    stage: str = ""


COMMANDS: Mapping[str, type[Document | Scaling]] = {
    "plan": PlannedStep,
    "simulate": PlannedStep,
    "compare": Comparison,
    "scale": Scaling,
    "memory": Memory,
    "bench": Bench,
    "demo": Demo,
}
