"""One small file of each kind, for the tests that write, read and damage files."""

import json
from typing import Any

from anabranch import AlphaBeta, Contention, Network, Span, TensorSpec
from anabranch.values.files import Noun, dumps
from shorthand import bucket_of, plan_of, timeline_of, trace_of

TRACE = trace_of(
    [TensorSpec("a.weight", 12, 4, 0.5), TensorSpec("b", 3, 2, 0.75, "bfloat16", 0.1)], 0.25, {"host": "x"}
)
RINGS = AlphaBeta("ring", 1e-5, 1e-10), AlphaBeta("tree", 1e-4, 1e-9)
POINTS: dict[str, list[tuple[int, float, float]]] = {
    "dense": [(0, 1.0, 0.5), (8, 2.0, 0.0)],
    "other": [(0, 1.0, 0.0), (1, 1.0, 0.0)],
}
EXAMPLES: list[Noun] = [
    TRACE,
    Network.measured(4, POINTS, contention=Contention((1.0, 1.2))),
    Network.two_level(64, 8, *RINGS, eta=0.5, link_cap=1.5),
    plan_of([bucket_of(["a.weight"], 1), bucket_of(["b"], 0, "oktopk")]),
    timeline_of([Span("compute", "forward", -0.25, 0.0), Span("lane 0", "bucket", 0.5, 1.5)], {"source": "hand"}),
]
IDS = ["trace", "measured", "two level", "plan", "timeline"]


def document(noun: Noun = TRACE) -> Any:
    """The JSON of its file."""
    return json.loads(dumps(noun))
