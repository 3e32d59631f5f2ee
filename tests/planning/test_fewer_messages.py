"""Fewer messages: small buckets join a neighbour, in time, with hardly more error, and only where they may."""

import random
from dataclasses import replace

import pytest

from anabranch import Curve, Network, Plan, TensorSpec, Trace
from anabranch.planning.ladder import ADDED_ERROR, MERGED, least_lossy, with_fewer_messages
from anabranch.planning.simulator import finish_s
from anabranch.values.kinds.fidelity import LADDER, error_of
from anabranch.values.plan import Bucket

ERRORS = {kind: error_of(kind) for kind in LADDER}
SHARES = {"dense": 1.0, "bf16": 0.5, "int8": 0.254, "int4": 0.141}
NETWORK = Network(4, {kind: Curve.linear(1e-4, share * 1e-9) for kind, share in SHARES.items()})
MATRIX, BIAS = 10**7, 100
TENSORS = TensorSpec("w1", MATRIX, 4, 0.01), TensorSpec("b0", BIAS, 4, 0.02), TensorSpec("w0", MATRIX, 4, 0.03)
TRACE = Trace(TENSORS, 0.02)
APART = Plan((Bucket(("w1",), 0, "int8"), Bucket(("b0",), 0, "dense"), Bucket(("w0",), 0, "int8")))


def error(trace: Trace, plan: Plan) -> int:
    numels = {tensor.name: tensor.numel for tensor in trace.tensors}
    return sum(ERRORS[bucket.collective] * numels[name] for bucket in plan.buckets for name in bucket.names)


def kinds(plan: Plan) -> list[tuple[tuple[str, ...], str]]:
    return [(bucket.names, bucket.collective) for bucket in plan.buckets]


def test_a_bias_joins_the_matrix_after_it_and_a_matrix_that_would_come_late_stays() -> None:
    found = with_fewer_messages(TRACE, NETWORK, APART, ERRORS, {})
    assert kinds(found) == [(("w1",), "int8"), (("b0", "w0"), "int8")]


def test_a_gradient_that_must_not_use_the_lossier_kind_stays_alone() -> None:
    assert with_fewer_messages(TRACE, NETWORK, APART, ERRORS, {"int8": {"b0"}}) == APART


def test_gradients_of_two_dtypes_and_of_two_lanes_stay_apart() -> None:
    other = replace(TRACE, tensors=tuple(replace(t, dtype="f" if t.name == "b0" else "") for t in TRACE.tensors))
    assert with_fewer_messages(other, NETWORK, APART, ERRORS, {}) == APART
    first, bias, last = APART.buckets
    lanes = Plan((first, replace(bias, lane=1), last))
    assert with_fewer_messages(TRACE, NETWORK, lanes, ERRORS, {}) == lanes


def test_an_exact_plan_stays_exact_and_what_counts_stays_exact() -> None:
    exact = Plan((Bucket(("w1",)), Bucket(("b0",)), Bucket(("w0",))))
    assert kinds(with_fewer_messages(TRACE, NETWORK, exact, ERRORS, {})) == [
        (("w1",), "dense"),
        (("b0", "w0"), "dense"),
    ]
    large = replace(TRACE, tensors=tuple(replace(t, numel=10**6) if t.name == "b0" else t for t in TRACE.tensors))
    assert with_fewer_messages(large, NETWORK, APART, ERRORS, {}) == APART


@pytest.mark.parametrize("seed", range(200))
def test_it_ends_in_time_with_hardly_more_error_and_no_more_messages(seed: int) -> None:
    chance = random.Random(seed)
    ready = sorted(chance.uniform(0, 0.1) for _ in range(chance.randint(1, 12)))
    sizes = [int(chance.choice([1e2, 1e4, 1e6, 1e7]) * chance.uniform(0.5, 2)) for _ in ready]
    dtypes = chance.choice([("",), ("", "f")])
    tensors = [
        TensorSpec(f"t{i}", numel, 4, at, chance.choice(dtypes))
        for i, (numel, at) in enumerate(zip(sizes, ready, strict=True))
    ]
    trace = Trace(tuple(tensors), chance.uniform(0, 0.1))
    slope = 8e-9 / 10 ** chance.uniform(-1, 2)
    network = Network(4, {k: Curve.linear(10 ** chance.uniform(-5, -3), share * slope) for k, share in SHARES.items()})
    excluded = {"int4": {t.name for t in trace.tensors if chance.random() < 0.3}}
    errors = {kind: ERRORS[kind] for kind in SHARES}
    plan = least_lossy(trace, network, errors, excluded)
    found = with_fewer_messages(trace, network, plan, errors, excluded).check(trace)
    assert len(found) <= len(plan)
    assert all(bucket.collective != "int4" or excluded["int4"].isdisjoint(bucket.names) for bucket in found.buckets)
    assert error(trace, found) <= error(trace, plan) * (1 + ADDED_ERROR)
    computing_s = trace.forward_s + trace.backward_s
    assert finish_s(trace, found, network) <= finish_s(trace, plan, network) + MERGED * computing_s + 1e-12
