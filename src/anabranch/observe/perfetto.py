"""Steps of all ranks as one Chrome trace for Perfetto: a process per rank, tracks for computation and lanes."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from anabranch.observe.clock_sync import ClockAlignment
from anabranch.values.plan import bucket_label

COMPUTE, GRADIENTS, FIRST_LANE = 0, 1, 2  # tracks of a process
INSIDE, BETWEEN = 1, 2  # those of a sharded model, beside computing
SHARDED_TRACKS = {"compute": COMPUTE, "inside": INSIDE, "between": BETWEEN}
PARTS = ("forward", "backward", "exposed communication")

Event = dict[str, Any]


def perfetto_document(
    recordings: Sequence[Mapping[str, Any]], alignments: Sequence[ClockAlignment], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The trace-event JSON object, in rank 0's time from the first event on, in microseconds.

    ``recordings`` are the steps of each rank by its own clock, as ``TraceWindow`` gathers them; those of sharded models
    hold ``spans`` by track, and the ranks ``inside`` this one's node. The error bound of a rank's clock against rank
    0's is in the name of its process and in ``otherData``, with ``facts``.
    """
    errors_s = [0.0]
    for recording, alignment in zip(recordings[1:], alignments[1:], strict=True):
        errors_s.append(alignment.error_s + recording["anchor_error_s"] + recordings[0]["anchor_error_s"])
    origin_s = min(
        alignment.to_rank_0_time(_first_s(step))
        for recording, alignment in zip(recordings, alignments, strict=True)
        for step in recording["steps"]
    )
    events: list[Event] = []
    for rank, (recording, alignment) in enumerate(zip(recordings, alignments, strict=True)):
        clock = _TraceClock(alignment, origin_s)
        if "inside" in recording:
            events += _track_names(rank, errors_s[rank], SHARDED_TRACKS)
            peers = {INSIDE: recording["inside"], BETWEEN: _line(rank, recordings)}
            events += (event for step in recording["steps"] for event in _span_events(rank, step, clock, peers))
        else:
            lanes = sorted({bucket["lane"] for step in recording["steps"] for bucket in step["buckets"]})
            names = {"compute": COMPUTE, "gradients ready": GRADIENTS, **{f"lane {n}": FIRST_LANE + n for n in lanes}}
            events += _track_names(rank, errors_s[rank], names)
            events += (event for step in recording["steps"] for event in _step_events(rank, step, clock))
    other = {
        "made_by": "anabranch",
        **facts,
        "ranks": len(recordings),
        "clock_error_s": {f"rank {rank}": error_s for rank, error_s in enumerate(errors_s)},
        "clocks": "rank 0's; the others' were aligned by round trips before and after the window",
    }
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


class _TraceClock:
    """Converts a rank's seconds to whole nanoseconds since the first event, so that adjacent slices stay adjacent."""

    def __init__(self, alignment: ClockAlignment, origin_s: float) -> None:
        self._alignment = alignment
        self._origin_s = origin_s

    def ns(self, at_s: float) -> int:
        return max(0, round((self._alignment.to_rank_0_time(at_s) - self._origin_s) * 1e9))


def _line(rank: int, recordings: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ranks with the same shard, one in each node: those at the same place inside theirs."""
    places = [recording["inside"].index(other) for other, recording in enumerate(recordings)]
    return [other for other, place in enumerate(places) if place == places[rank]]


def _first_s(step: Mapping[str, Any]) -> float:
    if "spans" in step:
        return float(min(start_s for _, _, start_s, _ in step["spans"]))
    return float(min([*step["edges_s"], *step["ready_s"].values(), *(b["launched_s"] for b in step["buckets"])]))


def _track_names(rank: int, error_s: float, tracks: Mapping[str, int]) -> Iterator[Event]:
    clock = "reference clock" if rank == 0 else f"clock within ±{error_s * 1e6:.1f} µs of rank 0's"
    yield _meta(rank, 0, "process_name", name=f"rank {rank} ({clock})")
    yield _meta(rank, 0, "process_sort_index", sort_index=rank)
    for name, track in tracks.items():
        yield _meta(rank, track, "thread_name", name=name)
        yield _meta(rank, track, "thread_sort_index", sort_index=track)


def _span_events(
    rank: int, step: Mapping[str, Any], clock: _TraceClock, peers: Mapping[int, Sequence[int]]
) -> Iterator[Event]:
    """A step of a sharded model; ``peers`` are the ranks that take part in the messages of a track."""
    for name, label, start_s, end_s in step["spans"]:
        track = SHARDED_TRACKS[name]
        category = "compute" if track == COMPUTE else "communication"
        args: dict[str, Any] = {"step": step["step"], **({"ranks": peers[track]} if track in peers else {})}
        yield _slice(rank, track, label, category, clock.ns(start_s), clock.ns(end_s), args)


def _step_events(rank: int, step: Mapping[str, Any], clock: _TraceClock) -> Iterator[Event]:
    edges_ns = [clock.ns(edge) for edge in step["edges_s"]]
    number = {"step": step["step"]}
    for name, (start_ns, end_ns) in zip(PARTS, pairwise(edges_ns), strict=True):
        if end_ns > start_ns or name != PARTS[-1]:
            yield _slice(rank, COMPUTE, name, "compute", start_ns, end_ns, {**number, "plan": step["plan"]})
    for name, ready_s in step["ready_s"].items():
        instant = {"ph": "i", "s": "t", "pid": rank, "tid": GRADIENTS}
        yield {**instant, "name": name, "cat": "gradient", "ts": clock.ns(ready_s) / 1e3, "args": number}
    for bucket in step["buckets"]:
        start_ns, end_ns = clock.ns(bucket["begin_s"]), clock.ns(bucket["end_s"])
        name = bucket_label(bucket["index"], bucket["collective"], bucket["names"])
        args = {**number, "tensors": bucket["names"], "nbytes": bucket["nbytes"], "collective": bucket["collective"]}
        args["launched_us"] = clock.ns(bucket["launched_s"]) / 1e3
        yield _slice(rank, FIRST_LANE + bucket["lane"], name, "communication", start_ns, end_ns, args)


def _slice(
    rank: int, track: int, name: str, category: str, start_ns: int, end_ns: int, args: Mapping[str, Any]
) -> Event:
    return {
        "ph": "X", "pid": rank, "tid": track, "name": name, "cat": category, "ts": start_ns / 1e3,
        "dur": max(0, end_ns - start_ns) / 1e3, "args": dict(args),
    }  # fmt: skip


def _meta(rank: int, track: int, kind: str, **args: object) -> Event:
    return {"ph": "M", "pid": rank, "tid": track, "ts": 0, "name": kind, "args": args}
