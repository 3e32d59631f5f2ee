"""Timeline: what occupied which track from when to when, predicted or measured."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from anabranch.values.checks import STRICT, Meta, frozen_meta

COMPUTE = "compute"
INSIDE = "inside"  # begins the name of a track with the stages of messages inside nodes
LATEST_S = 1e30  # finite, and so is any sum of such instants

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that kept a track busy. Seconds count from the start of backward, so forward is negative."""

    track: str
    name: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not -LATEST_S <= self.start_s <= self.end_s <= LATEST_S:
            raise ValueError(
                f"{self.name} on {self.track} runs from {self.start_s} to {self.end_s} s: expected start ≤ end"
            )

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """One training step. The track named "compute" holds forward and backward, "lane 0" the messages of that lane.

    Of two-level messages a lane has what nodes exchange; "inside 0" has their stages inside nodes, before and after.
    """

    __pydantic_config__: ClassVar = STRICT

    spans: tuple[Span, ...]
    meta: Meta = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(self.spans))
        object.__setattr__(self, "meta", frozen_meta(self.meta))
        if not any(span.track == COMPUTE for span in self.spans):
            raise ValueError(f"a timeline has no span on the track {COMPUTE!r}: a step computes something")

    @property
    def compute(self) -> tuple[Span, ...]:
        """Forward and backward."""
        return tuple(span for span in self.spans if span.track == COMPUTE)

    @property
    def communication(self) -> tuple[Span, ...]:
        """The messages in all of their stages, on any lane."""
        return tuple(span for span in self.spans if span.track != COMPUTE)

    @property
    def messages(self) -> tuple[Span, ...]:
        """The messages on any lane, without their stages inside nodes: one span for each."""
        return tuple(span for span in self.communication if not span.track.startswith(INSIDE))

    @property
    def finish_s(self) -> float:
        """When backward and all communication are done, from the start of backward."""
        return max(span.end_s for span in self.spans)

    @property
    def iteration_s(self) -> float:
        """The whole step: from the first span's start to the last one's end."""
        return self.finish_s - min(span.start_s for span in self.spans)

    @property
    def communication_s(self) -> float:
        """Time during which at least one message was in one of its stages."""
        return _total_s(union(self.communication))

    @property
    def exposed_s(self) -> float:
        """Time of communication during which nothing was computed: what nothing hid."""
        exposed_s = _total_s(union(self.spans)) - _total_s(union(self.compute))
        return min(max(0.0, exposed_s), self.communication_s)  # the difference is rounded

    @property
    def overlap(self) -> float:
        """Share of the communication time that computation hid, from 0 to 1; 1 when nothing was sent."""
        busy_s = self.communication_s
        return 1.0 if busy_s == 0 else 1.0 - self.exposed_s / busy_s

    def trace_events(self) -> dict[str, Any]:
        """The Chrome trace-event JSON object that Perfetto and chrome://tracing open; its times are microseconds."""
        origin_s = min(span.start_s for span in self.spans)
        tracks = {track: tid for tid, track in enumerate(dict.fromkeys(span.track for span in self.spans))}
        names: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": track}}
            for track, tid in tracks.items()
        ]
        slices = [
            {"ph": "X", "pid": 0, "tid": tracks[span.track], "name": span.name, "cat": span.track,
             "ts": (span.start_s - origin_s) * 1e6, "dur": span.seconds * 1e6}
            for span in self.spans
        ]  # fmt: skip
        return {"displayTimeUnit": "ms", "traceEvents": names + slices}


def lane_track(lane: int) -> str:
    """The track of the messages of a lane."""
    return f"lane {lane}"


def inside_track(lane: int) -> str:
    """The track of what messages of a lane do inside nodes."""
    return f"{INSIDE} {lane}"


def union(spans: Iterable[Span]) -> list[Interval]:
    """The instants covered by any of the spans, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _total_s(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
