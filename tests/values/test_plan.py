"""Plans: every gradient in exactly one bucket, one fingerprint per plan."""

import json
from dataclasses import FrozenInstanceError
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import Bucket, Plan, PlanError, TensorSpec, Trace
from shorthand import bucket_of, plan_of, trace_of
from strategies import plans, traces

TRACE = trace_of([TensorSpec(name, 1, 4, float(i)) for i, name in enumerate("abcde")], 0.0)


def names(plan: Plan) -> list[str]:
    return ["".join(bucket.names) for bucket in plan.buckets]


def test_from_cuts() -> None:
    assert names(Plan.from_cuts(TRACE, [])) == ["abcde"]
    assert names(Plan.from_cuts(TRACE, [1, 3])) == ["a", "bc", "de"]
    assert names(Plan.from_cuts(TRACE, [0, 3, 5])) == ["abc", "de"]
    for bad in ([3, 1], [2, 2], [-1], [6]):
        with pytest.raises(ValueError, match="rising indices"):
            Plan.from_cuts(TRACE, bad)


@given(traces(), st.data())
def test_from_cuts_parts_the_trace(trace: Trace, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(trace)))))
    plan = Plan.from_cuts(trace, cuts)
    assert [name for bucket in plan.buckets for name in bucket.names] == [t.name for t in trace.tensors]
    assert len(plan) == 1 + len(set(cuts) - {0, len(trace)})
    assert plan.lanes == 1


def test_from_cuts_checks_dtypes() -> None:
    mixed = trace_of([TensorSpec("a", 1, 4, 0.0), TensorSpec("b", 1, 2, 0.0)], 0.0)
    with pytest.raises(PlanError, match="one dtype"):
        Plan.from_cuts(mixed, [])
    assert len(Plan.from_cuts(mixed, [1])) == 2


def test_dealt_to_lanes_in_turn() -> None:
    plan = Plan.of_runs([[tensor] for tensor in TRACE.tensors], lanes=2)
    assert [bucket.lane for bucket in plan.buckets] == [0, 1, 0, 1, 0]
    assert plan.lanes == 2


def test_check_names_what_is_wrong() -> None:
    assert plan_of([bucket_of("ab"), bucket_of("cde")]).check(TRACE)
    with pytest.raises(PlanError, match="leaves out b, c, d and 1 more"):
        plan_of([bucket_of("a")]).check(TRACE)
    with pytest.raises(PlanError, match="names x, y, which the model does not have"):
        plan_of([bucket_of("abcde"), bucket_of("yx")]).check(TRACE)


def test_a_plan_refuses() -> None:
    with pytest.raises(ValueError, match="no buckets"):
        plan_of([])
    with pytest.raises(ValueError, match="no names"):
        bucket_of([])
    with pytest.raises(ValueError, match="a is in 2 places"):
        plan_of([bucket_of("a"), bucket_of("ba")])
    with pytest.raises(ValueError, match="a is in 2 places"):
        plan_of([bucket_of("aa")])
    for lane in (-1, 64):
        with pytest.raises(ValueError, match="lane"):
            bucket_of("a", lane)
    with pytest.raises(ValueError, match="collective"):
        bucket_of("a", 0, "")


def test_the_fingerprint_is_a_hash_of_canonical_json() -> None:
    plan = plan_of([bucket_of(["é", "b"], 1, "oktopk")])
    text = '{"buckets":[{"collective":"oktopk","lane":1,"names":["\\u00e9","b"]}]}'
    assert plan.canonical == text
    assert plan.fingerprint == sha256(text.encode()).hexdigest()
    assert json.loads(plan.canonical) == {"buckets": [{"names": ["é", "b"], "lane": 1, "collective": "oktopk"}]}


@given(plans(), plans())
def test_equal_plans_and_only_they_have_equal_fingerprints(one: Plan, other: Plan) -> None:
    again = plan_of([bucket_of(list(b.names), b.lane, b.collective) for b in one.buckets])
    assert again == one
    assert again.fingerprint == one.fingerprint
    assert (one == other) == (one.fingerprint == other.fingerprint)


def test_order_lane_and_collective_are_in_the_fingerprint() -> None:
    variants = [
        plan_of([bucket_of("a"), bucket_of("b")]),
        plan_of([bucket_of("b"), bucket_of("a")]),
        plan_of([bucket_of("ab")]),
        plan_of([bucket_of("ba")]),
        plan_of([bucket_of("a"), bucket_of("b", 1)]),
        plan_of([bucket_of("a"), bucket_of("b", 0, "sparse")]),
    ]
    assert len({plan.fingerprint for plan in variants}) == len(variants)


@pytest.mark.parametrize("lane", [True, 1.0])
def test_equal_lanes_have_equal_text(lane: int) -> None:
    try:
        plan = plan_of([bucket_of("a", lane)])
    except (TypeError, ValueError):
        return
    assert plan.fingerprint == plan_of([bucket_of("a", 1)]).fingerprint


def test_frozen_slotted_hashable() -> None:
    plan = plan_of([bucket_of("a")])
    for noun, name in ((plan, "buckets"), (plan.buckets[0], "lane")):
        with pytest.raises(FrozenInstanceError):
            setattr(noun, name, 1)
        assert not hasattr(noun, "__dict__")
    assert len({plan, plan_of([bucket_of(["a"])])}) == 1


def test_indices_into_the_names_of_a_model() -> None:
    plan = Plan((Bucket(("c", "a")), Bucket(("b",))))
    assert plan.indices(["a", "b", "c"]) == [[2, 0], [1]]
    with pytest.raises(PlanError, match="names c, which this model does not train"):
        plan.indices(["a", "b"])
    with pytest.raises(PlanError, match="leaves out d and 0 more"):
        plan.indices(["a", "b", "c", "d"])
