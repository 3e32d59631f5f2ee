"""Steps of all ranks as one Chrome trace for Perfetto: a process per rank, tracks for computation and lanes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from anabranch.values.plan import bucket_label

if TYPE_CHECKING:
    from anabranch.observe.trace_window import ClockAlignment

COMPUTE, GRADIENTS, FIRST_LANE = 0, 1, 2  # tracks of a process
PARTS = ("forward", "backward", "exposed communication")

Event = dict[str, Any]
Nanoseconds = Callable[[float], int]  # since the first event: whole ones, so that adjacent slices stay adjacent


def perfetto_document(
    recordings: Sequence[Mapping[str, Any]], alignments: "Sequence[ClockAlignment]", facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The trace-event JSON object, in rank 0's time from the first event on, in microseconds.

    ``recordings`` are the steps of each rank by its own clock, as ``TraceWindow`` gathers them. The error bound of a
    rank's clock against rank 0's is in the name of its process and in ``otherData``, with ``facts``.
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
    for rank, (alignment, error_s) in enumerate(zip(alignments, errors_s, strict=True)):
        events += _rank_events(rank, recordings[rank]["steps"], error_s, partial(_nanoseconds, alignment, origin_s))
    other = {
        "made_by": "anabranch",
        **facts,
        "ranks": len(recordings),
        "clock_error_s": {f"rank {rank}": error_s for rank, error_s in enumerate(errors_s)},
        "clocks": "rank 0's; the others' were aligned by round trips before and after the window",
    }
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def _nanoseconds(alignment: "ClockAlignment", origin_s: float, at_s: float) -> int:
    return max(0, round((alignment.to_rank_0_time(at_s) - origin_s) * 1e9))


def _rank_events(rank: int, steps: Sequence[Mapping[str, Any]], error_s: float, ns: Nanoseconds) -> Iterator[Event]:
    lanes = sorted({bucket["lane"] for step in steps for bucket in step["buckets"]})
    names = {"compute": COMPUTE, "gradients ready": GRADIENTS, **{f"lane {n}": FIRST_LANE + n for n in lanes}}
    yield from _track_names(rank, error_s, names)
    for step in steps:
        yield from _step_events(rank, step, ns)


def _first_s(step: Mapping[str, Any]) -> float:
    return float(min([*step["edges_s"], *step["ready_s"].values(), *(b["launched_s"] for b in step["buckets"])]))


def _track_names(rank: int, error_s: float, tracks: Mapping[str, int]) -> Iterator[Event]:
    clock = "reference clock" if rank == 0 else f"clock within ±{error_s * 1e6:.1f} µs of rank 0's"
    yield _meta(rank, 0, "process_name", name=f"rank {rank} ({clock})")
    yield _meta(rank, 0, "process_sort_index", sort_index=rank)
    for name, track in tracks.items():
        yield _meta(rank, track, "thread_name", name=name)
        yield _meta(rank, track, "thread_sort_index", sort_index=track)


def _step_events(rank: int, step: Mapping[str, Any], ns: Nanoseconds) -> Iterator[Event]:
    number = {"step": step["step"]}
    for name, (start_ns, end_ns) in zip(PARTS, pairwise(map(ns, step["edges_s"])), strict=True):
        if end_ns > start_ns or name != PARTS[-1]:
            yield _slice(rank, COMPUTE, name, "compute", start_ns, end_ns, {**number, "plan": step["plan"]})
    for name, ready_s in step["ready_s"].items():
        instant = {"ph": "i", "s": "t", "pid": rank, "tid": GRADIENTS}
        yield {**instant, "name": name, "cat": "gradient", "ts": ns(ready_s) / 1e3, "args": number}
    for bucket in step["buckets"]:
        name = bucket_label(bucket["index"], bucket["collective"], bucket["names"])
        args = {**number, "tensors": bucket["names"], "nbytes": bucket["nbytes"], "collective": bucket["collective"]}
        args["launched_us"] = ns(bucket["launched_s"]) / 1e3
        track = FIRST_LANE + bucket["lane"]
        yield _slice(rank, track, name, "communication", ns(bucket["begin_s"]), ns(bucket["end_s"]), args)


def _slice(
    rank: int, track: int, name: str, category: str, start_ns: int, end_ns: int, args: Mapping[str, Any]
) -> Event:
    return {
        "ph": "X", "pid": rank, "tid": track, "name": name, "cat": category, "ts": start_ns / 1e3,
        "dur": max(0, end_ns - start_ns) / 1e3, "args": dict(args),
    }  # fmt: skip


def _meta(rank: int, track: int, kind: str, **args: object) -> Event:
    return {"ph": "M", "pid": rank, "tid": track, "ts": 0, "name": kind, "args": args}
