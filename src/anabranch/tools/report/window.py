"""Files of ``model.trace_steps``: some steps of all ranks, on one clock."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anabranch.values.errors import FileError
from anabranch.values.timeline import COMPUTE, Span, Timeline

LANE = re.compile(r"lane \d+")
EXPOSED = "exposed communication"
LATEST_US = 1e15  # 30 years
MAX_STEP = 1 << 53
Number = Annotated[int, Field(ge=0, le=1 << 53)]


class _Slice(BaseModel):
    """A Chrome trace event with a duration (ph X), or one that names a track (ph M)."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)

    ph: Literal["X", "M"]
    pid: Number
    tid: Number
    name: str
    ts: Annotated[float, Field(ge=0, le=LATEST_US)] = 0.0
    dur: Annotated[float, Field(ge=0, le=LATEST_US)] = 0.0
    args: Mapping[str, Any] = {}


class Wait(NamedTuple):
    """A message cannot begin before its slowest rank: the ranks before it wait for ``rank`` until ``until_s``."""

    until_s: float
    rank: int


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank in one step; zero is the start of rank 0's backward.

    tensors   of each bucket, by the name of its span
    waits     of the buckets that were here before they were on another rank, by the name of their span
    """

    step: int
    rank: int
    timeline: Timeline
    tensors: Mapping[str, tuple[str, ...]]
    waits: Mapping[str, Wait] = field(default_factory=dict)


def rank_steps(document: Mapping[str, Any], where: str) -> list[RankStep]:
    """Every rank in the step whose time on rank 0 is the median; FileError if the file has no step of rank 0."""
    events = [_event(raw, where, at) for at, raw in enumerate(document["traceEvents"]) if _wanted(raw)]
    tracks = {(e.pid, e.tid): str(e.args.get("name", "")) for e in events if e.ph == "M" and e.name == "thread_name"}
    by_step: dict[int, list[_Slice]] = {}
    for event in events:
        if event.ph == "X" and isinstance(event.args.get("step"), int) and 0 <= event.args["step"] <= MAX_STEP:
            by_step.setdefault(event.args["step"], []).append(event)
    lengths = {step: _length_us(slices) for step, slices in by_step.items()}
    if not lengths or not any(lengths.values()):
        raise FileError(f"{where}: has no step of rank 0 in it; write it again with model.trace_steps(first, last, …)")
    median_us = median_low(lengths.values())
    step = next(step for step, length_us in lengths.items() if length_us == median_us)
    backward = (e.ts for e in by_step[step] if e.pid == 0 and e.name.startswith("backward"))  # of the model, of units
    zero_us = min(backward, default=by_step[step][0].ts)
    own: dict[int, list[_Slice]] = {}
    for event in by_step[step]:
        own.setdefault(event.pid, []).append(event)
    ranks = [_rank_step(step, rank, slices, tracks, zero_us) for rank, slices in sorted(own.items())]
    found = [rank_step for rank_step in ranks if rank_step is not None]
    if not found:
        raise FileError(f"{where}: step {step:,} has nothing on a track named {COMPUTE!r}; write it again")
    return _with_waits(found, _clock_error_s(document))


def _clock_error_s(document: Mapping[str, Any]) -> float:
    """By how much the clocks of two ranks may differ, at most; 0 where the file does not say."""
    errors = document["otherData"].get("clock_error_s")
    known = [each for each in errors.values() if isinstance(each, float)] if isinstance(errors, dict) else []
    return sum(sorted(known)[-2:])


def _with_waits(ranks: Sequence[RankStep], error_s: float) -> list[RankStep]:
    """The same, with what each rank waited for; differences that the clocks' error explains are none."""
    begun: dict[str, dict[int, float]] = {}  # by message, then by rank
    for one in ranks:
        for span in one.timeline.communication:
            if span.name != EXPOSED:  # of DDP's own buckets, which may be under way meanwhile
                begun.setdefault(span.name, {})[one.rank] = span.start_s
    last = {message: max(own, key=lambda rank: own[rank]) for message, own in begun.items()}
    return [
        replace(one, waits={
            message: Wait(own[last[message]], last[message])
            for message, own in begun.items()
            if one.rank in own and own[last[message]] - own[one.rank] > error_s
        })
        for one in ranks
    ]  # fmt: skip


def _wanted(raw: object) -> bool:
    """Events with a duration and names of tracks. The instants at which gradients are ready are not drawn."""
    return isinstance(raw, dict) and raw.get("ph") in ("X", "M")


def _event(raw: Any, where: str, at: int) -> _Slice:
    try:
        return _Slice.model_validate(raw)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in found["loc"])
        raise FileError(f"{where}: traceEvents.{at}.{field}: {found['msg']}; write it again") from error


def _length_us(slices: list[_Slice]) -> float:
    of_rank_0 = [event for event in slices if event.pid == 0]
    return max((e.ts + e.dur for e in of_rank_0), default=0.0) - min((e.ts for e in of_rank_0), default=0.0)


def _rank_step(
    step: int, rank: int, own: list[_Slice], tracks: Mapping[tuple[int, int], str], zero_us: float
) -> RankStep | None:
    spans: list[Span] = []
    tensors: dict[str, tuple[str, ...]] = {}
    has_buckets = any(LANE.fullmatch(tracks.get((rank, event.tid), "")) for event in own)
    for event in own:
        track = tracks.get((rank, event.tid), COMPUTE)
        if event.name == EXPOSED:  # the buckets show it, too; DDP's own buckets are not traced
            if has_buckets:
                continue
            track = "lane 0"
        start_s = (event.ts - zero_us) / 1e6
        spans.append(Span(track, event.name, start_s, start_s + event.dur / 1e6))
        names = event.args.get("tensors", ())
        tensors[event.name] = tuple(str(name) for name in names) if isinstance(names, list) else ()
    if not any(span.track == COMPUTE for span in spans):
        return None
    return RankStep(step, rank, Timeline(tuple(spans), {"source": "measured"}), tensors)
