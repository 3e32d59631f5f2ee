"""The nouns from lists, as tests like to write them; the nouns themselves are typed for tuples."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from anabranch import Bucket, Plan, Span, TensorSpec, Timeline, Trace

NOTHING: Mapping[str, str] = MappingProxyType({})


def trace_of(tensors: Iterable[TensorSpec], forward_s: float = 0.0, meta: Mapping[str, str] = NOTHING) -> Trace:
    """A trace of these tensors."""
    return Trace(tuple(tensors), forward_s, meta)


def bucket_of(names: Iterable[str], lane: int = 0, collective: str = "dense") -> Bucket:
    """A bucket of these names; of its letters, if it is one word."""
    return Bucket(tuple(names), lane, collective)


def plan_of(buckets: Iterable[Bucket]) -> Plan:
    """A plan of these buckets."""
    return Plan(tuple(buckets))


def timeline_of(spans: Iterable[Span], meta: Mapping[str, str] = NOTHING) -> Timeline:
    """A timeline of these spans."""
    return Timeline(tuple(spans), meta)
