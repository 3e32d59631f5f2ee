"""Traces: what they hold, what they refuse."""

from dataclasses import FrozenInstanceError
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import TensorSpec, Trace
from shorthand import trace_of
from strategies import traces

A, B = TensorSpec("a", 3, 4, 1.0), TensorSpec("b", 5, 2, 2.5)


def test_sizes_and_times() -> None:
    trace = trace_of([A, B], 0.5)
    assert (A.nbytes, B.nbytes, trace.nbytes) == (12, 10, 22)
    assert trace.backward_s == 2.5
    assert len(trace) == 2
    assert trace.tensors == (A, B)


@pytest.mark.parametrize("bad", [-1.0, nan, inf, -inf, 1e10])
def test_refuses_times_that_are_none(bad: float) -> None:
    with pytest.raises(ValueError, match="ready_s"):
        TensorSpec("a", 1, 4, bad)
    with pytest.raises(ValueError, match="spread_s"):
        TensorSpec("a", 1, 4, 1.0, spread_s=bad)
    with pytest.raises(ValueError, match="forward_s"):
        trace_of([A], bad)


def test_refuses_sizes_that_are_none() -> None:
    for numel, itemsize in [(-1, 4), (1, 0), (1, -4), (1 << 53, 2)]:
        with pytest.raises(ValueError, match="weight"):
            TensorSpec("weight", numel, itemsize, 1.0)
    with pytest.raises(ValueError, match="empty name"):
        TensorSpec("", 1, 4, 1.0)
    half = 1 << 52
    with pytest.raises(ValueError, match="whole trace"):
        trace_of([TensorSpec("a", half, 1, 0.0), TensorSpec("b", half + 1, 1, 0.0)], 0.0)


def test_refuses_disorder() -> None:
    with pytest.raises(ValueError, match=r"a is ready at 1\.0 s, before b at 2\.5 s"):
        trace_of([B, A], 0.0)
    with pytest.raises(ValueError, match="a is in the trace twice"):
        trace_of([A, A], 0.0)
    with pytest.raises(ValueError, match="no tensors"):
        trace_of([], 0.0)


def test_frozen_slotted_hashable() -> None:
    trace = trace_of([A], 0.5, {"host": "x"})
    for noun, name in ((trace, "forward_s"), (A, "numel")):
        with pytest.raises(FrozenInstanceError):
            setattr(noun, name, 1)
        assert not hasattr(noun, "__dict__")
        assert hash(noun) == hash(noun)
    with pytest.raises(TypeError):
        trace.meta["host"] = "y"  # type: ignore[index]


def test_meta_is_a_checked_copy() -> None:
    mine = {"host": "x"}
    trace = trace_of([A], 0.5, mine)
    mine["host"] = "y"
    assert trace.meta["host"] == "x"
    assert trace == trace_of([A], 0.5, {"host": "x"}) != trace_of([A], 0.5, mine)
    refused: list[Any] = [{"a": [1]}, {"a": nan}, {"a": inf}, {1: "a"}, {"a": {}}]
    for bad in refused:
        with pytest.raises(ValueError, match="meta"):
            trace_of([A], 0.5, bad)


def test_kinds_are_dtypes_then_sizes() -> None:
    tensors = [TensorSpec(str(i), 1, size, float(i), dtype) for i, (dtype, size) in enumerate(
        [("", 4), ("", 2), ("f", 4), ("", 4), ("f", 4)])]  # fmt: skip
    parts = trace_of(tensors, 0.0).by_kind()
    assert [[t.name for t in part] for part in parts] == [["0", "3"], ["1"], ["2", "4"]]


@given(traces(kinds=3))
def test_by_kind_parts_the_trace(trace: Trace) -> None:
    parts = trace.by_kind()
    assert sorted(t.name for part in parts for t in part) == sorted(t.name for t in trace.tensors)
    for part in parts:
        assert len({t.kind for t in part}) == 1
        assert [t.ready_s for t in part] == sorted(t.ready_s for t in part)
    assert [part[0].ready_s for part in parts] == sorted(part[0].ready_s for part in parts)


@given(traces(), st.floats(1e-3, 1e2))
def test_scaled(trace: Trace, factor: float) -> None:
    longer = trace.scaled(factor)
    assert longer.forward_s == trace.forward_s * factor
    assert [t.ready_s for t in longer.tensors] == [t.ready_s * factor for t in trace.tensors]
    assert [t.nbytes for t in longer.tensors] == [t.nbytes for t in trace.tensors]


@pytest.mark.parametrize("bad", [0.0, -1.0, nan, inf])
def test_scaled_refuses(bad: float) -> None:
    with pytest.raises(ValueError, match="factor"):
        trace_of([A], 0.0).scaled(bad)
