"""Timelines: what was hidden and what was not."""

import json
from dataclasses import FrozenInstanceError
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import Span, Timeline
from shorthand import timeline_of
from strategies import timelines

STEP = timeline_of(
    [
        Span("compute", "forward", -2.0, 0.0),
        Span("compute", "backward a", 0.0, 3.0),
        Span("compute", "backward b", 3.0, 6.0),
        Span("lane 0", "A", 3.0, 5.0),
        Span("lane 1", "B", 4.0, 8.0),
        Span("lane 0", "C", 9.0, 10.0),
    ],
    {"source": "hand"},
)


def test_by_hand() -> None:
    assert STEP.finish_s == 10.0
    assert STEP.iteration_s == 12.0
    assert STEP.communication_s == 6.0  # 3 … 8 and 9 … 10
    assert STEP.exposed_s == 3.0  # 6 … 8 and 9 … 10
    assert STEP.overlap == 0.5
    assert [span.name for span in STEP.communication] == ["A", "B", "C"]
    assert len(STEP.compute) == 3
    assert STEP.spans[3].seconds == 2.0


def test_nothing_sent_is_all_hidden() -> None:
    alone = timeline_of([Span("compute", "backward", 0.0, 1.0)])
    assert (alone.exposed_s, alone.communication_s, alone.overlap) == (0.0, 0.0, 1.0)


@given(timelines())
def test_shares_are_shares(timeline: Timeline) -> None:
    assert 0 <= timeline.exposed_s <= timeline.communication_s <= timeline.iteration_s + 1e-9
    assert -1e-9 <= timeline.overlap <= 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_exposed_counts_the_seconds_nothing_hid(spans: list[tuple[bool, int, int]]) -> None:
    compute, lane = np.zeros(31, bool), np.zeros(31, bool)
    listed = [Span("compute", "", 0.0, 0.0)]
    for computing, one, other in spans:
        low, high = sorted((one, other))
        (compute if computing else lane)[low:high] = True
        listed.append(Span("compute" if computing else f"lane {high % 3}", "", float(low), float(high)))
    timeline = timeline_of(listed)
    assert timeline.communication_s == lane.sum()
    assert timeline.exposed_s == (lane & ~compute).sum()


@given(timelines())
def test_trace_events(timeline: Timeline) -> None:
    document = json.loads(json.dumps(timeline.trace_events(), allow_nan=False))
    events = document["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    slices = [e for e in events if e["ph"] == "X"]
    assert sorted(tracks.values()) == sorted({span.track for span in timeline.spans})
    assert [(tracks[e["tid"]], e["name"]) for e in slices] == [(span.track, span.name) for span in timeline.spans]
    assert min(e["ts"] for e in slices) == 0
    for event, span in zip(slices, timeline.spans, strict=True):
        assert event["dur"] == pytest.approx(span.seconds * 1e6)
        assert event["ts"] == pytest.approx((span.start_s - min(s.start_s for s in timeline.spans)) * 1e6)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="compute"):
        timeline_of([Span("lane 0", "a", 0, 1)])
    for start, end in ((1.0, 0.0), (nan, 1.0), (0.0, nan), (-inf, 0.0), (0.0, inf)):
        with pytest.raises(ValueError, match="a on lane 0 runs from"):
            Span("lane 0", "a", start, end)


def test_frozen_slotted_hashable() -> None:
    for noun, name in ((STEP, "spans"), (STEP.spans[0], "end_s")):
        with pytest.raises(FrozenInstanceError):
            setattr(noun, name, 1)
        assert not hasattr(noun, "__dict__")
        assert hash(noun) == hash(noun)
    with pytest.raises(TypeError):
        STEP.meta["a"] = 1  # type: ignore[index]
