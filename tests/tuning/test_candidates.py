"""What is worth trying, and what it is called; planning in the background, with the same outcome on every rank."""

import inspect
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from anabranch import Bucket, Curve, Network, Plan, TensorSpec, Trace
from anabranch import planning as planners
from anabranch.exchange.nodes import FoundNodes
from anabranch.planning.simulator import lower_bound_s
from anabranch.tuning.candidates import MIXED, BackgroundPlanner, Candidates, candidates
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.trial import predicted_s
from anabranch.values.network import InsideNodes
from anabranch.values.nodes import Nodes
from ranks import on_ranks

TRACE = Trace(tuple(TensorSpec(f"t{i}", 1 << 16, 4, 1e-3 * (i + 1), "float32") for i in range(12)), 5e-3)
SHARED = Network.linear(4, 1e-6, 5e-9, eta=1.0)
ROOMY = Network.linear(4, 1e-3, 5e-9, eta=0.1)


def options(planner: str = "optimal", lanes: int | None = None, compress: str | None = None) -> TuningOptions:
    return TuningOptions(planner, None, None, lanes, 5, () if compress is None else (compress,))


def test_lanes_are_offered_only_where_they_are_predicted_to_pay() -> None:
    assert [label for label, _ in candidates(options(), TRACE, SHARED)] == ["optimal"]
    offered = candidates(options(), TRACE, ROOMY)
    assert [label for label, _ in offered] == ["optimal", "2 lanes"]
    assert offered[1][1].lanes == 2
    assert predicted_s(TRACE, offered[1][1], ROOMY) < predicted_s(TRACE, offered[0][1], ROOMY)
    assert [label for label, _ in candidates(options(lanes=1), TRACE, ROOMY)] == ["optimal"]
    assert max(plan.lanes for _, plan in candidates(options(lanes=4), TRACE, ROOMY)) > 2


def test_compressed_and_dense_are_both_offered() -> None:
    both = Network(4, {kind: SHARED.curve("dense") for kind in ("dense", "bf16")}, SHARED.contention)
    offered = candidates(options(compress="bf16"), TRACE, both)
    assert [label for label, _ in offered] == ["optimal, bf16", "optimal"]
    assert {bucket.collective for bucket in offered[0][1].buckets} == {"bf16"}


def test_lanes_of_a_compressed_kind_are_planned_at_its_own_prices() -> None:
    """Also where dense messages fill the link: compressed ones are small, and may cost more to start than to send."""
    curves = {"dense": Curve.linear(1e-6, 5e-9), "int8": Curve.linear(2e-3, 1e-9)}
    network = Network(4, curves, ROOMY.contention)
    offered = dict(candidates(options(compress="int8"), TRACE, network))
    assert list(offered) == ["optimal, int8", "2 lanes, int8", "optimal", "2 lanes"]
    several = offered["2 lanes, int8"]
    assert several.lanes == 2 and {bucket.collective for bucket in several.buckets} == {"int8"}
    assert predicted_s(TRACE, several, network) < predicted_s(TRACE, offered["optimal, int8"], network)
    assert predicted_s(TRACE, several, network) < predicted_s(
        TRACE, planners.using(offered["2 lanes"], "int8"), network
    )
    assert offered["optimal, int8"] == planners.optimal(TRACE, network, collective="int8")
    named = dict(
        candidates(options("by_bytes", compress="int8"), TRACE, network)
    )  # which does not know what int8 costs
    assert named["by_bytes, int8"] == planners.using(planners.by_bytes(TRACE, network), "int8")
    full = Network(4, {"dense": Curve.linear(1e-6, 5e-9), "int8": Curve.linear(1e-6, 1e-9)}, SHARED.contention)
    assert list(dict(candidates(options(compress="int8"), TRACE, full))) == ["optimal, int8", "optimal"]
    tensors = [replace(t, dtype="float64", numel=1, itemsize=8) if t.name == "t3" else t for t in TRACE.tensors]
    kept = replace(options(compress="int8"), excluded={"int8": frozenset({"t3"})})
    beside = dict(candidates(kept, replace(TRACE, tensors=tuple(tensors)), network))["2 lanes, int8"]
    assert [bucket.names for bucket in beside.buckets if bucket.collective == "dense"] == [("t3",)]


def test_where_kinds_are_mixed_one_kind_is_mixed_with_dense() -> None:
    """As under Auto(at_least="bf16"): what is hidden anyway stays exact."""
    curves = {"dense": Curve.linear(1e-6, 5e-9), "bf16": Curve.linear(1e-6, 3e-9)}
    asked = replace(options(compress="bf16"), mixes=True)
    mixed = dict(candidates(asked, TRACE, Network(4, curves, SHARED.contention)))["as faithful as is hidden"]
    assert {bucket.collective for bucket in mixed.buckets} == {"dense", "bf16"}
    fast = {kind: Curve.linear(1e-6, 1e-12) for kind in curves}
    (_, exact), *_ = candidates(asked, TRACE, Network(4, fast, SHARED.contention))
    assert {bucket.collective for bucket in exact.buckets} == {"dense"}


def test_before_a_mix_the_fastest_plan_of_one_kind_is_offered() -> None:
    rates = {"dense": 5e-9, "bf16": 3e-9, "int8": 1.5e-9, "int4": 1.499e-9}
    network = Network(4, {kind: Curve.linear(1e-6, rate) for kind, rate in rates.items()}, SHARED.contention)
    asked = replace(options(), kinds=("bf16", "int8", "int4"), mixes=True)
    offered = dict(candidates(asked, TRACE, network))
    # int4 ends with int8, and is lossier
    assert list(offered) == ["optimal, int8", "as faithful as is hidden", "optimal"]
    backwards = replace(asked, kinds=asked.kinds[::-1])
    assert list(dict(candidates(backwards, TRACE, network))) == list(offered)
    assert {bucket.collective for bucket in offered["optimal, int8"].buckets} == {"int8"}
    kept = replace(asked, excluded=dict.fromkeys(asked.kinds, frozenset({"t0"})))
    beside = candidates(kept, TRACE, network)[0][1]
    assert {bucket.collective for bucket in beside.buckets if "t0" in bucket.names} == {"dense"}
    hidden = Network(4, {kind: Curve.linear(1e-6, rate / 10) for kind, rate in rates.items()}, SHARED.contention)
    label, first = candidates(asked, TRACE, hidden)[0]  # what full messages take away from computing is tried
    assert label == "optimal, bf16" and {bucket.collective for bucket in first.buckets} == {"bf16"}
    assert {bucket.collective for bucket in candidates(asked, TRACE, hidden)[1][1].buckets} == {"dense"}
    slow = Network(4, {kind: Curve.linear(1e-6, 1e3 * rate) for kind, rate in rates.items()}, SHARED.contention)
    only_int8 = replace(asked, kinds=("int8",))
    assert [label for label, _ in candidates(only_int8, TRACE, slow)] == ["as faithful as is hidden", "optimal"]
    free = Network(4, dict.fromkeys(rates, Curve.linear(1e-3, 0.0)), SHARED.contention)  # start-ups are no transfers
    assert [label for label, _ in candidates(asked, TRACE, free)] == ["as faithful as is hidden", "optimal"]


def test_a_kind_that_no_gradient_may_use_is_not_offered_before_a_mix() -> None:
    """As bf16 of a model in float16: its plan would be a dense one in another name, and the most faithful of all."""
    rates = {"dense": 5e-10, "bf16": 3e-10, "int8": 1.5e-10}
    hidden = Network(4, {kind: Curve.linear(1e-6, rate) for kind, rate in rates.items()}, SHARED.contention)
    no_bf16 = {"bf16": frozenset(tensor.name for tensor in TRACE.tensors)}
    asked = replace(options(), kinds=("bf16", "int8"), mixes=True, excluded=no_bf16)
    assert [label for label, _ in candidates(asked, TRACE, hidden)] == ["optimal, int8", MIXED, "optimal"]
    only_bf16 = replace(asked, kinds=("bf16",))
    assert [label for label, _ in candidates(only_bf16, TRACE, hidden)] == [MIXED, "optimal"]


@pytest.mark.parametrize("planner", ["optimal", "by_bytes"])
def test_a_kind_that_no_gradient_may_use_is_not_offered_alone(planner: str) -> None:
    curves = {"dense": Curve.linear(1e-6, 5e-9), "bf16": Curve.linear(1e-6, 3e-9)}
    network = Network(4, curves, SHARED.contention)
    no_bf16 = {"bf16": frozenset(tensor.name for tensor in TRACE.tensors)}
    asked = replace(options(planner, lanes=1, compress="bf16"), excluded=no_bf16)
    assert [label for label, _ in candidates(asked, TRACE, network)] == [planner]
    some = replace(asked, excluded={"bf16": frozenset({TRACE.tensors[0].name})})
    assert [label for label, _ in candidates(some, TRACE, network)] == [f"{planner}, bf16", planner]


FLAT = {"dense": 5e-9, "bf16": 3e-9, "int8": 1.5e-9}  # seconds per byte, among all ranks
TWO_LEVELS = {"dense@nodes": 2e-9, "bf16@nodes": 1e-9, "int8@nodes": 4e-10}


def with_nodes(asked: TuningOptions) -> TuningOptions:
    return replace(asked, found_nodes=FoundNodes(Nodes.of_size(4, 2), "nodes=2"))


def network_of_nodes(inside_s_per_byte: float = 1e-11) -> Network:
    curves = {kind: Curve.linear(1e-6, rate) for kind, rate in (FLAT | TWO_LEVELS).items()}
    line = Curve.linear(1e-6, inside_s_per_byte)
    return Network(4, curves, SHARED.contention, inside=InsideNodes(2, line, line))


def kinds_of(plan: Plan) -> set[str]:
    return {bucket.collective for bucket in plan.buckets}


def test_exact_messages_on_two_levels_are_offered_where_there_are_nodes() -> None:
    network = network_of_nodes()
    offered = candidates(with_nodes(options()), TRACE, network)
    assert [label for label, _ in offered] == ["optimal, dense@nodes", "optimal"], "the soonest first"
    assert [kinds_of(plan) for _, plan in offered] == [{"dense@nodes"}, {"dense"}]
    assert [label for label, _ in candidates(options(), TRACE, network)] == ["optimal"], "without nodes never"
    flat = replace(network, curves={kind: network.curve(kind) for kind in FLAT}, inside=None)
    assert [label for label, _ in candidates(with_nodes(options()), TRACE, flat)] == ["optimal"], "nor unmeasured"
    slow = network_of_nodes(inside_s_per_byte=1e-8)  # as over PCIe
    assert [label for label, _ in candidates(with_nodes(options()), TRACE, slow)] == ["optimal", "optimal, dense@nodes"]
    assert [label for label, _ in candidates(with_nodes(options("by_bytes", 1)), TRACE, network)] == ["by_bytes"]


def test_of_a_compressed_kind_the_better_of_flat_and_two_levels_comes_first() -> None:
    asked = with_nodes(options(compress="int8"))
    labels = ["optimal, int8@nodes", "optimal, int8", "optimal, dense@nodes", "optimal"]
    assert [label for label, _ in candidates(asked, TRACE, network_of_nodes())] == labels
    slow = [label for label, _ in candidates(asked, TRACE, network_of_nodes(inside_s_per_byte=1e-8))]
    assert slow == ["optimal, int8", "optimal, int8@nodes", "optimal", "optimal, dense@nodes"]
    assert list(dict(candidates(options(compress="int8"), TRACE, network_of_nodes()))) == ["optimal, int8", "optimal"]


def test_a_mix_takes_the_most_faithful_kind_on_either_level() -> None:
    asked = with_nodes(replace(options(), kinds=("bf16", "int8"), mixes=True))
    offered = dict(candidates(asked, TRACE, network_of_nodes()))
    assert list(offered) == ["optimal, bf16@nodes", MIXED, "optimal, dense@nodes", "optimal"]
    assert kinds_of(offered[MIXED]) <= TWO_LEVELS.keys() and len(kinds_of(offered[MIXED])) > 1
    without = dict(candidates(replace(options(), kinds=("bf16", "int8"), mixes=True), TRACE, network_of_nodes()))
    assert set().union(*map(kinds_of, without.values())) <= FLAT.keys()


def test_gradients_that_two_levels_cannot_add_stay_flat() -> None:
    asked = replace(with_nodes(options()), excluded={"dense@nodes": frozenset({"t3"})})
    offered = dict(candidates(asked, TRACE, network_of_nodes()))["optimal, dense@nodes"]
    (flat,) = [bucket for bucket in offered.buckets if bucket.collective == "dense"]
    assert "t3" in flat.names and kinds_of(offered) == {"dense", "dense@nodes"}
    none = replace(asked, excluded={"dense@nodes": frozenset(tensor.name for tensor in TRACE.tensors)})
    assert list(dict(candidates(none, TRACE, network_of_nodes()))) == ["optimal"]


def test_a_planner_of_ones_own() -> None:
    def mine(trace: Trace, network: Network) -> Plan:
        return planners.single(trace, network)

    offered = candidates(TuningOptions(mine, None, None, 1, 5), TRACE, SHARED)
    assert [(label, len(plan)) for label, plan in offered] == [("mine", 1)]


def test_no_plan_means_ddps_own_buckets_and_none_beats_the_bound() -> None:
    stock = planners.by_bytes(TRACE, SHARED)
    assert predicted_s(TRACE, None, SHARED) == predicted_s(TRACE, stock, SHARED)
    assert TRACE.forward_s + lower_bound_s(TRACE, SHARED) <= predicted_s(TRACE, planners.optimal(TRACE, SHARED), SHARED)


def test_labels_say_how_often_the_network_was_corrected() -> None:
    once = replace(ROOMY, meta={"refined": "costs × 1.1"})
    twice = replace(ROOMY, meta={"refined": "costs × 1.1", "refined_contention": "1 + 0.5"})
    assert [label for label, _ in candidates(options(), TRACE, once)] == ["optimal, refined", "2 lanes, refined"]
    assert [label for label, _ in candidates(options(), TRACE, twice)] == ["optimal, refined", "2 lanes, refined twice"]


def test_gradients_that_one_kind_must_not_carry_may_travel_by_another() -> None:
    """As in the warm-up of OkTopk, whose vectors must not be delayed, and may be rounded to bf16."""
    network = Network(4, {kind: SHARED.curve("dense") for kind in ("dense", "bf16", "int8")}, SHARED.contention)
    for kind, expected in (("bf16", {"bf16"}), ("int8", {"int8", "dense"})):
        asked = replace(options("per_tensor", 1, kind), excluded={"int8": frozenset({"t0"})})
        compressed = dict(candidates(asked, TRACE, network))[f"per_tensor, {kind}"]
        assert {bucket.collective for bucket in compressed.buckets} == expected


PLANS = [("one", Plan((Bucket(("a", "b")),))), ("two", Plan((Bucket(("a",)), Bucket(("b",), 1))))]


def planned(rank: int) -> dict[str, Any]:
    """Rank 0 plans until it is allowed to end, then fails to plan; the other rank must never be asked to plan."""
    assert dist.group.WORLD is not None
    BackgroundPlanner.done = inspect.unwrap(BackgroundPlanner.done)  # type: ignore[method-assign]  # see ranks.py
    may_end = threading.Event()

    def plan() -> Candidates:
        assert rank == 0
        may_end.wait(30.0)
        return PLANS

    def fail() -> Candidates:
        raise ZeroDivisionError("no bandwidth")

    planner = BackgroundPlanner(plan, dist.group.WORLD)
    before = planner.done()
    may_end.set()
    found, failure = _outcome(planner)
    return {
        "before": before,
        "found": [[label, plan.fingerprint] for label, plan in found],
        "failure": failure,
        "failed": list(_outcome(BackgroundPlanner(fail, dist.group.WORLD))),
    }


def _outcome(planner: BackgroundPlanner) -> tuple[Candidates, str]:
    while not planner.done():
        time.sleep(0.01)
    return planner.outcome()


def test_every_rank_gets_the_candidates_of_rank_0_or_why_planning_failed() -> None:
    for answer in on_ranks(planned, 2):
        assert answer["before"] is False
        assert answer["found"] == [[label, plan.fingerprint] for label, plan in PLANS] and answer["failure"] == ""
        assert answer["failed"] == [[], "ZeroDivisionError: no bandwidth"]
