"""Checks of the trace-event format that Perfetto reads."""

from collections import defaultdict
from itertools import pairwise
from typing import Any

NUMBERS = (int, float)


def check_format(document: dict[str, Any]) -> None:
    """The trace-event format, JSON object form, as far as our kinds of events go."""
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[int, int]] = set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X", "i")
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["ts"], NUMBERS) and event["ts"] >= 0
        assert isinstance(event["args"], dict)
        track = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            (key,) = event["args"]
            assert key == ("name" if event["name"].endswith("_name") else "sort_index")
            named |= {track} if event["name"] == "thread_name" else set()
            continue
        assert track in named, "every track has a name before its first event"
        assert isinstance(event["cat"], str)
        if event["ph"] == "i":
            assert event["s"] == "t"
        else:
            assert isinstance(event["dur"], NUMBERS) and event["dur"] >= 0
            slices[track].append((event["ts"], event["ts"] + event["dur"]))
    for busy in slices.values():
        busy.sort()
        # A track holds one thing at a time; 1 ns is what adding two rounded numbers may lose.
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(busy))


def of_rank(document: dict[str, Any], rank: int, **fields: object) -> list[dict[str, Any]]:
    return [
        event
        for event in document["traceEvents"]
        if event["pid"] == rank and all(event.get(key) == value for key, value in fields.items())
    ]
