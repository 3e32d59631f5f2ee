"""Strategies with compressed buckets: what their names mean, what they cost, and which gradients they leave dense."""

from dataclasses import replace

import pytest

from anabranch import Network
from anabranch.alpha_beta import AlphaBeta
from anabranch.scaling.compression import Compression, compressed_strategies, dense_only, priced, sent_nbytes
from anabranch.trace import TensorSpec
from cli.nouns import small_trace

RING = Network.ring(8, 5e-5, 8e-10)
NODES = Network.two_level(32, 8, AlphaBeta("ring", 1e-6, 1e-11), AlphaBeta("ring", 1e-5, 1e-9))
LADDER = ("oktopk:0.01", "oktopk:0.02", "oktopk:0.05", "oktopk:0.1", "oktopk:0.2")


@pytest.mark.parametrize(
    ("name", "expected", "kind"),
    [
        ("int8", Compression(("int8",)), "quantised"),
        ("bf16@nodes", Compression(("bf16",), between_nodes=True), "quantised"),
        ("oktopk:0.01", Compression(("oktopk:0.01",)), "sparse"),
        ("oktopk", Compression(LADDER), "sparse"),
        ("oktopk:0.02@nodes", Compression(("oktopk:0.02",), between_nodes=True), "sparse"),
        ("lean", Compression(LADDER, lean=True), "lean"),
        ("lean:0.01", Compression(("oktopk:0.01",), lean=True), "lean"),
        ("lean:int4", Compression(("int4",), lean=True), "lean"),
        ("lean:int8@nodes", Compression(("int8",), lean=True, between_nodes=True), "lean"),
    ],
)
def test_what_names_mean(name: str, expected: Compression, kind: str) -> None:
    assert Compression.named(name) == expected and expected.strategy_kind == kind
    suffix = "@nodes" if expected.between_nodes else ""
    assert expected.collectives == [one + suffix for one in expected.kinds]


@pytest.mark.parametrize("name", ["int2", "int8:0.01", "@nodes", "lean:int2", "dense", "oktopk:2", "lean:int8:0.1"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="--compress is"):
        Compression.named(name)


def test_only_float32_and_its_halves_travel_compressed() -> None:
    trace = small_trace()
    assert dense_only(trace) == []
    for dtype, itemsize, dense in (("bfloat16", 2, False), ("float16", 2, False), ("float64", 8, True), ("", 8, True)):
        first = replace(trace.tensors[0], dtype=dtype, itemsize=itemsize)
        assert dense_only(replace(trace, tensors=(first, *trace.tensors[1:]))) == [first.name] * dense


def test_every_exchange_that_may_be_chosen_has_a_cost() -> None:
    names = ["oktopk", "oktopk:0.03", "lean:0.03", "int8", "lean:int4", "bf16@nodes"]
    strategies = compressed_strategies(names, small_trace(), RING)
    assert list(strategies.planners) == names
    here = strategies.priced(RING.at(64))
    assert {"dense", "oktopk:0.01", "oktopk:0.2", "oktopk:0.03", "int8", "int4", "bf16@nodes"} == (
        set(here.curves) - {"oktopk:0.02", "oktopk:0.05", "oktopk:0.1"}
    )
    assert here.world_size == 64
    for planner in strategies.planners.values():
        planner(small_trace(), here).check(small_trace())


def test_assumptions_are_of_what_was_asked_for() -> None:
    told = {name: "; ".join(compressed_strategies([name], small_trace(), RING).assumptions) for name in
            ("int8", "bf16", "oktopk:0.01", "int4@nodes")}  # fmt: skip
    assert "0.50 ms per 110 M elements" in told["int8"] and "virtual ranks" not in told["int8"]
    assert "bf16 computes for 0.58 ms per 110 M elements, three passes on an H200" in told["bf16"]
    assert "virtual ranks" in told["oktopk:0.01"] and "all-to-all" not in told["oktopk:0.01"]
    assert ["DataParallel does not run that yet" in words for words in told.values()] == [False, False, False, True]


def test_without_compression_nothing_is_added() -> None:
    none = compressed_strategies([], small_trace(), RING)
    assert none.priced(RING) == RING and not none.planners and not none.assumptions


def test_the_kinds_of_a_plan_are_priced_and_unknown_ones_left_to_the_network() -> None:
    here = priced(NODES, ["dense", "int8", "oktopk:0.01@nodes", "gtopk:0.01"])
    assert set(here.curves) == {"dense", "int8", "oktopk:0.01@nodes"}
    assert here.curve("dense") is NODES.curve("dense")


def test_what_one_rank_sends() -> None:
    bucket = [TensorSpec("a", 6144, 4, 0.0), TensorSpec("b", 2048, 4, 1.0)]  # 8192 values
    assert sent_nbytes("dense", bucket, 4) == 2 * 3 * 4 * 8192 // 4
    assert sent_nbytes("bf16", bucket, 4) == 2 * 3 * 2 * 2048
    assert sent_nbytes("int8", bucket, 4) == 2 * 3 * (2048 + 16 * 2)
    assert 0 < (sent_nbytes("oktopk:0.01", bucket, 4) or 0) < 2 * 3 * 2048
    assert sent_nbytes("int8@nodes", bucket, 4) is None is sent_nbytes("gtopk:0.01", bucket, 4)
