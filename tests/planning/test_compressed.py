"""Plans of one compressed kind: what is compressed, and what stays dense."""

import pytest

from anabranch import Curve, Network, NetworkError, Plan, TensorSpec, Trace
from anabranch import planning as planners
from anabranch.planning.merge import compressed, compressed_if_faster
from anabranch.planning.simulator import finish_s


def network(**starts_and_slopes: tuple[float, float]) -> Network:
    curves = {name.replace("_", ":0."): Curve.linear(*line) for name, line in starts_and_slopes.items()}
    return Network(4, curves)


SLOW = network(dense=(1e-3, 1e-8), s_01=(2e-3, 1e-10), s_1=(2e-3, 2e-9))


def trace(*nbytes: int, apart_s: float = 1e-3) -> Trace:
    tensors = [TensorSpec(f"t{i}", size, 1, apart_s * (i + 1)) for i, size in enumerate(nbytes)]
    return Trace(tuple(tensors), 0.01)


def kinds(plan: Plan) -> dict[str, str]:
    return {name: bucket.collective for bucket in plan.buckets for name in bucket.names}


def test_large_buckets_go_sparse_and_small_ones_dense() -> None:
    plan = compressed(trace(10 << 20, 100, apart_s=1.0), SLOW, "s:0.01")
    assert kinds(plan) == {"t0": "s:0.01", "t1": "dense"}


def test_gradients_that_must_stay_dense_do_and_every_gradient_travels_once() -> None:
    told = trace(10 << 20, 4096, 10 << 20, 4096)
    plan = compressed(told, SLOW, "s:0.01", dense={"t1", "t3"}).check(told)
    assert kinds(plan)["t1"] == kinds(plan)["t3"] == "dense" and kinds(plan)["t0"] == "s:0.01"
    ready = {tensor.name: tensor.ready_s for tensor in told.tensors}
    last = [max(ready[name] for name in bucket.names) for bucket in plan.buckets]
    assert last == sorted(last)
    assert kinds(compressed(told, SLOW, "s:0.01", dense={"t0", "t1", "t2", "t3"})) == dict.fromkeys(ready, "dense")


def test_without_dense_gradients_it_is_the_exact_plan_for_that_collective() -> None:
    told = trace(*[10 << 20] * 6)
    assert compressed(told, SLOW, "s:0.01") == planners.optimal(told, SLOW, collective="s:0.01")


def test_an_unknown_collective_is_named() -> None:
    with pytest.raises(NetworkError, match="no cost for the collective 's:0\\.5'"):
        compressed(trace(10), SLOW, "s:0.5")


def test_sparse_where_it_gains_and_dense_where_it_does_not() -> None:
    told = trace(*[10 << 20] * 4)
    assert compressed_if_faster(told, SLOW, "s:0.01", ["t1"]) == compressed(told, SLOW, "s:0.01", ["t1"])
    fast = network(dense=(1e-6, 1e-12), s_01=(2e-3, 1e-13))
    assert compressed_if_faster(told, fast, "s:0.01") == planners.optimal(told, fast)


def test_many_start_ups_can_cost_more_than_sparse_buckets_save() -> None:
    """Each bucket gains by itself, but what must stay dense then travels apart, with a start-up of its own."""
    told = trace(1 << 20, 1 << 20, apart_s=1e-5)
    expensive = network(dense=(1e-2, 1e-9), s_01=(9.9e-3, 1e-10))
    assert finish_s(told, compressed(told, expensive, "s:0.01", ["t1"]), expensive) > finish_s(
        told, planners.optimal(told, expensive), expensive
    )
    assert compressed_if_faster(told, expensive, "s:0.01", ["t1"]) == planners.optimal(told, expensive)
