"""What all ranks saw as one Chrome trace, which Perfetto opens: a process per rank, tracks for computing and lanes."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from anabranch.observe.clock_sync import Alignment
from anabranch.plan import bucket_label

COMPUTE, GRADIENTS, FIRST_LANE = 0, 1, 2  # tracks of a process
PARTS = ("forward", "backward", "exposed communication")

Event = dict[str, Any]


def merged(
    told: Sequence[Mapping[str, Any]], alignments: Sequence[Alignment], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The trace-event JSON object, in rank 0's time from the first event on, in microseconds.

    ``told`` is what each rank says of its steps, by its own clock. How well its clock is known against rank 0's is in
    the name of its process and in ``otherData``.
    """
    errors_s = [0.0]
    for part, alignment in zip(told[1:], alignments[1:], strict=True):
        errors_s.append(alignment.error_s + part["anchor_error_s"] + told[0]["anchor_error_s"])
    origin_s = min(
        alignment.as_rank_0(_first_s(step))
        for part, alignment in zip(told, alignments, strict=True)
        for step in part["steps"]
    )
    events: list[Event] = []
    for rank, (part, alignment) in enumerate(zip(told, alignments, strict=True)):
        clock = _Clock(alignment, origin_s)
        lanes = {bucket["lane"] for step in part["steps"] for bucket in step["buckets"]}
        events += _names(rank, errors_s[rank], lanes)
        for step in part["steps"]:
            events += _step(rank, step, clock)
    other = {
        "made_by": "anabranch",
        **facts,
        "ranks": len(told),
        "clock_error_s": {f"rank {rank}": error_s for rank, error_s in enumerate(errors_s)},
        "clocks": "rank 0's; the others' were aligned by round trips before and after the window",
    }
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


class _Clock:
    """A rank's seconds as whole nanoseconds since the first event: slices that touch must touch in the file, too."""

    def __init__(self, alignment: Alignment, origin_s: float) -> None:
        self._alignment, self._origin_s = alignment, origin_s

    def ns(self, at_s: float) -> int:
        return max(0, round((self._alignment.as_rank_0(at_s) - self._origin_s) * 1e9))


def _first_s(step: Mapping[str, Any]) -> float:
    return float(min([*step["edges_s"], *step["ready_s"].values(), *(b["launched_s"] for b in step["buckets"])]))


def _names(rank: int, error_s: float, lanes: set[int]) -> Iterator[Event]:
    known = "whose clock this is" if rank == 0 else f"clock within ±{error_s * 1e6:.1f} µs of rank 0's"
    yield _meta(rank, 0, "process_name", name=f"rank {rank} ({known})")
    yield _meta(rank, 0, "process_sort_index", sort_index=rank)
    tracks = {COMPUTE: "compute", GRADIENTS: "gradients ready"}
    tracks.update({FIRST_LANE + lane: f"lane {lane}" for lane in sorted(lanes)})
    for track, name in tracks.items():
        yield _meta(rank, track, "thread_name", name=name)
        yield _meta(rank, track, "thread_sort_index", sort_index=track)


def _step(rank: int, step: Mapping[str, Any], clock: _Clock) -> Iterator[Event]:
    edges, at = [clock.ns(edge) for edge in step["edges_s"]], {"step": step["step"]}
    for name, (start, end) in zip(PARTS, pairwise(edges), strict=True):
        if end > start or name != PARTS[-1]:
            yield _slice(rank, COMPUTE, name, "compute", start, end, {**at, "plan": step["plan"]})
    for name, ready_s in step["ready_s"].items():
        where = {"ph": "i", "s": "t", "pid": rank, "tid": GRADIENTS}
        yield {**where, "name": name, "cat": "gradient", "ts": clock.ns(ready_s) / 1e3, "args": at}
    for bucket in step["buckets"]:
        start, end = clock.ns(bucket["begin_s"]), clock.ns(bucket["end_s"])
        name = bucket_label(bucket["index"], bucket["collective"], bucket["names"])
        facts = {**at, "tensors": bucket["names"], "nbytes": bucket["nbytes"], "collective": bucket["collective"]}
        facts["launched_us"] = clock.ns(bucket["launched_s"]) / 1e3
        yield _slice(rank, FIRST_LANE + bucket["lane"], name, "communication", start, end, facts)


def _slice(rank: int, track: int, name: str, category: str, start: int, end: int, args: Mapping[str, Any]) -> Event:
    return {
        "ph": "X", "pid": rank, "tid": track, "name": name, "cat": category, "ts": start / 1e3,
        "dur": max(0, end - start) / 1e3, "args": dict(args),
    }  # fmt: skip


def _meta(rank: int, track: int, kind: str, **args: object) -> Event:
    return {"ph": "M", "pid": rank, "tid": track, "ts": 0, "name": kind, "args": args}
