"""Files of ``model.trace_steps``: some steps of all ranks, on one clock."""

import re
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anabranch.tools.report.figures import bucket_number
from anabranch.values.errors import FileError
from anabranch.values.files import complaint
from anabranch.values.kinds.names import DENSE
from anabranch.values.plan import Bucket
from anabranch.values.timeline import COMPUTE, Span, Timeline

LANE = re.compile(r"lane \d+")
EXPOSED = "exposed communication"
LATEST_US = 1e15  # 30 years
Number = Annotated[int, Field(ge=0, le=1 << 53)]


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class _Args(_Read):
    """What an event says of itself: the name of a track; a slice's step and gradients."""

    name: str = ""
    step: Number | None = None
    tensors: list[str] = []


class _Slice(_Read):
    """A Chrome trace event with a duration (ph X), or one that names a track (ph M)."""

    ph: Literal["X", "M"]
    pid: Number
    tid: Number
    name: str
    ts: Annotated[float, Field(ge=0, le=LATEST_US)] = 0.0
    dur: Annotated[float, Field(ge=0, le=LATEST_US)] = 0.0
    args: _Args = _Args()


class Wait(NamedTuple):
    """A message cannot begin before its slowest rank: the ranks before it wait for ``rank`` until ``until_s``."""

    until_s: float
    rank: int


class RankStep(NamedTuple):
    """One rank in one step, with its buckets by number; zero is the start of rank 0's backward.

    ``waits`` is of the messages that were here before they were on another rank, by the name of their span.
    """

    step: int
    rank: int
    timeline: Timeline
    buckets: Mapping[int, Bucket]
    waits: Mapping[str, Wait]


def rank_steps(document: Mapping[str, Any], where: str) -> list[RankStep]:
    """Every rank in the step whose time on rank 0 is the median; FileError if the file has no step of rank 0."""
    # Instants, at which gradients are ready, are not drawn.
    wanted = [raw for raw in document["traceEvents"] if isinstance(raw, dict) and raw.get("ph") in ("X", "M")]
    try:
        events = [_Slice.model_validate(raw) for raw in wanted]
    except ValidationError as error:
        wrong = complaint(error.errors(include_url=False), "an event")
        raise FileError(f"{where}: traceEvents: {wrong}; write it again") from error
    tracks = {(event.pid, event.tid): event.args.name for event in events if event.name == "thread_name"}
    by_step: dict[int, list[_Slice]] = {}
    for event in events:
        if event.ph == "X" and event.args.step is not None:
            by_step.setdefault(event.args.step, []).append(event)
    own = {step: [event for event in slices if event.pid == 0] for step, slices in by_step.items()}
    lengths = {step: max(e.ts + e.dur for e in of) - min(e.ts for e in of) for step, of in own.items() if of}
    if not any(lengths.values()):
        raise FileError(f"{where}: has no step of rank 0 in it; write it again with model.trace_steps(first, last, …)")
    median_us = median_low(lengths.values())
    step = next(step for step, length_us in lengths.items() if length_us == median_us)
    slices = [(tracks.get((event.pid, event.tid), COMPUTE), event) for event in by_step[step]]
    backward = (e.ts for e in own[step] if e.name.startswith("backward"))
    zero_us = min(backward, default=by_step[step][0].ts)
    waits = _waits(slices, zero_us, _clock_error_s(document))
    found = []
    for rank in sorted({event.pid for _, event in slices}):
        of = [(track, event) for track, event in slices if event.pid == rank]
        if any(track == COMPUTE and event.name != EXPOSED for track, event in of):
            found.append(_rank_step(step, rank, of, zero_us, waits.get(rank, {})))
    if not found:
        raise FileError(f"{where}: step {step:,} has nothing on a track named {COMPUTE!r}; write it again")
    return found


def _rank_step(
    step: int, rank: int, own: Sequence[tuple[str, _Slice]], zero_us: float, waits: Mapping[str, Wait]
) -> RankStep:
    spans: list[Span] = []
    buckets: dict[int, Bucket] = {}
    has_lanes = any(LANE.fullmatch(track) for track, _ in own)
    for track, event in own:
        if event.name == EXPOSED and has_lanes:  # the buckets show it, too; DDP's own buckets are not traced
            continue
        start_s = (event.ts - zero_us) / 1e6
        at = "lane 0" if event.name == EXPOSED else track
        spans.append(Span(at, event.name, start_s, start_s + event.dur / 1e6))
        if (number := bucket_number(event.name)) is not None and event.args.tensors:
            collective = event.name.partition(": ")[2].partition(",")[0] or DENSE
            buckets[number] = Bucket(tuple(event.args.tensors), 0, collective)
    return RankStep(step, rank, Timeline(tuple(spans), {"source": "measured"}), buckets, waits)


def _clock_error_s(document: Mapping[str, Any]) -> float:
    """By how much the clocks of two ranks may differ, at most; 0 where the file does not say."""
    errors = document["otherData"].get("clock_error_s")
    known = [each for each in errors.values() if isinstance(each, float)] if isinstance(errors, dict) else []
    return sum(sorted(known)[-2:])


def _waits(slices: Sequence[tuple[str, _Slice]], zero_us: float, error_s: float) -> dict[int, dict[str, Wait]]:
    """What each rank waited for; differences that the clocks' error explains are none."""
    begun: dict[str, dict[int, float]] = {}  # by message, then by rank
    for track, event in slices:
        if track != COMPUTE and event.name != EXPOSED:  # of DDP's own buckets, which may be under way meanwhile
            start_s = (event.ts - zero_us) / 1e6
            begun.setdefault(event.name, {})[event.pid] = start_s
    found: dict[int, dict[str, Wait]] = {}
    for name, starts in begun.items():
        last = max(starts, key=lambda rank: starts[rank])
        for rank, start_s in starts.items():
            if starts[last] - start_s > error_s:
                found.setdefault(rank, {})[name] = Wait(starts[last], last)
    return found
