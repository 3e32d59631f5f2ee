"""Hypothesis strategies for the four nouns, from tame to adversarial."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from anabranch import (
    AlphaBeta,
    Bucket,
    Contention,
    Curve,
    CurvePoint,
    Network,
    Plan,
    Span,
    TensorSpec,
    Timeline,
    Trace,
    TwoLevel,
)

DTYPES = (("", 4), ("float32", 4), ("bfloat16", 2), ("", 8))

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
seconds = st.floats(0, 1e6)
costs = st.one_of(st.just(0.0), st.floats(1e-9, 10))
scalars: SearchStrategy[Any] = st.one_of(
    text, st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()
)
metas = st.dictionaries(text, scalars, max_size=3)


@st.composite
def traces(
    draw: st.DrawFn, max_tensors: int = 8, kinds: int = 1, any_name: bool = False, max_numel: int = 1 << 28
) -> Trace:
    """Gaps between gradients from none to long, sizes from zero bytes on."""
    count = draw(st.integers(1, max_tensors))
    names = draw(st.lists(words, min_size=count, max_size=count, unique=True)) if any_name else map(str, range(count))
    ready_s, tensors = 0.0, []
    for name in names:
        ready_s += draw(costs)
        dtype, itemsize = DTYPES[draw(st.integers(0, kinds - 1))]
        numel = draw(st.one_of(st.integers(0, 20), st.integers(0, max_numel)))
        spread_s = draw(seconds) if any_name else 0.0
        tensors.append(TensorSpec(name, numel, itemsize, ready_s, dtype, spread_s))
    return Trace(tuple(tensors), draw(seconds), draw(metas) if any_name else {})


@st.composite
def whole_traces(draw: st.DrawFn, max_tensors: int = 8, kinds: int = 1) -> Trace:
    """Small whole numbers of seconds and bytes: every sum is exact and ties abound."""
    count = draw(st.integers(1, max_tensors))
    ready_s, tensors = 0, []
    for index in range(count):
        ready_s += draw(st.integers(0, 6))
        dtype, itemsize = DTYPES[draw(st.integers(0, kinds - 1))]
        tensors.append(TensorSpec(f"t{index}", draw(st.integers(1, 8)), itemsize, float(ready_s), dtype))
    return Trace(tuple(tensors), 1.0)


@st.composite
def linear_curves(draw: st.DrawFn) -> Curve:
    """Start-up and slope, either of which may be nothing."""
    return Curve.linear(draw(costs), draw(st.one_of(st.just(0.0), st.floats(1e-12, 1.0))))


@st.composite
def stepped_curves(draw: st.DrawFn) -> Curve:
    """Any non-falling polygon: flats, jumps within one byte, convex and concave parts, any tail."""
    count = draw(st.integers(1, 6))
    size = draw(st.integers(0, 8))
    level = draw(costs)
    points = []
    for _ in range(count):
        points.append(CurvePoint(size, level, draw(st.one_of(st.just(0.0), st.floats(0, 1)))))
        size += draw(st.one_of(st.just(1), st.integers(1, 40), st.integers(1, 1 << 24)))
        level += draw(st.one_of(st.just(0.0), st.floats(0, 8)))
    return Curve(tuple(points), draw(st.one_of(st.just(0.0), st.floats(1e-12, 2.0))))


measured_points = st.dictionaries(
    st.integers(0, 1 << 30), st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=2, max_size=8
).map(lambda points: [(nbytes, s, spread_s) for nbytes, (s, spread_s) in points.items()])
measured_curves = measured_points.map(Curve.through)
curves = st.one_of(linear_curves(), stepped_curves(), measured_curves)


@st.composite
def contentions(draw: st.DrawFn) -> Contention:
    """A law or a table, with and without a cap on the link."""
    rises = draw(st.lists(st.floats(0, 3), max_size=3))
    table = [1.0]
    for rise in rises:
        table.append(table[-1] + rise)
    return Contention(tuple(table), draw(st.one_of(st.none(), st.floats(1, 4))))


alpha_betas = st.builds(
    AlphaBeta,
    st.sampled_from(["ring", "tree", "halving_doubling"]),
    st.floats(0, 1),
    st.floats(0, 1e-6),
    st.floats(0, 1),
)
models = st.one_of(alpha_betas, st.builds(TwoLevel, st.integers(1, 16), alpha_betas, alpha_betas))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Measured or modelled, with other collectives beside the dense one, meta, and delays."""
    world_size = draw(st.integers(1, 4096))
    contention, meta = draw(contentions()), draw(metas)
    if draw(st.booleans()):
        modelled = Network.modelled(world_size, draw(models), contention)
        return Network(world_size, modelled.curves, contention, modelled.model, meta)
    others = draw(st.dictionaries(text, curves, max_size=2))
    delays = draw(st.dictionaries(st.sampled_from(["dense", *others]), st.floats(0, 1), max_size=2))
    return Network(world_size, {**others, "dense": draw(curves)}, contention, None, meta, delays)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any names in any buckets on any lanes by any collective."""
    names = draw(st.lists(words, min_size=1, max_size=8, unique=True))
    buckets, rest = [], names
    while rest:
        count = draw(st.integers(1, len(rest)))
        buckets.append(Bucket(tuple(rest[:count]), draw(st.integers(0, 63)), draw(words)))
        rest = rest[count:]
    return Plan(tuple(buckets))


@st.composite
def plans_of(draw: st.DrawFn, trace: Trace, lanes: int = 3) -> Plan:
    """A plan that fits a trace of one dtype: any gradients together, in any launch order, on any lane."""
    names = draw(st.permutations([tensor.name for tensor in trace.tensors]))
    buckets = []
    while names:
        count = draw(st.integers(1, len(names)))
        buckets.append(Bucket(tuple(names[:count]), draw(st.integers(0, lanes - 1))))
        names = names[count:]
    return Plan(tuple(buckets))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Spans on a few tracks, overlapping as they like, forward before zero."""
    moments = st.floats(-1e3, 1e3)
    spans = [Span("compute", draw(text), *sorted((draw(moments), draw(moments))))]
    for _ in range(draw(st.integers(0, 5))):
        start_s, end_s = sorted((draw(moments), draw(moments)))
        spans.append(Span(draw(st.sampled_from(["compute", "lane 0", "lane 1"])), draw(text), start_s, end_s))
    return Timeline(tuple(spans), draw(metas))


nouns = st.one_of(traces(any_name=True, kinds=4), networks(), plans(), timelines())
