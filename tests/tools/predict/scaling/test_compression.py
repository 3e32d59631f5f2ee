"""Strategies with compressed buckets: what their names mean, what they cost, and which gradients they leave dense."""

from dataclasses import replace

import pytest

from anabranch import Network
from anabranch.planning.ladder import least_lossy
from anabranch.planning.simulator import finish_s
from anabranch.tools.predict.scaling.compression import (
    Compression,
    about_sent,
    compressed_strategies,
    dense_only,
    priced,
    sent_nbytes,
)
from anabranch.values.kinds.fidelity import error_of, error_of_plan
from anabranch.values.links import AlphaBeta
from anabranch.values.trace import TensorSpec
from tools.cli.nouns import small_trace

RING = Network.ring(8, 5e-5, 8e-10)
NODES = Network.two_level(32, 8, AlphaBeta("ring", 1e-6, 1e-11), AlphaBeta("ring", 1e-5, 1e-9))
LADDER = ("oktopk:0.01", "oktopk:0.02", "oktopk:0.05", "oktopk:0.1", "oktopk:0.2")


def test_what_names_mean() -> None:
    cases: list[tuple[str, Compression, str]] = [
        ("int8", Compression(("int8",)), "quantised"),
        ("bf16@nodes", Compression(("bf16",), between_nodes=True), "quantised"),
        ("dense@nodes", Compression(("dense",), between_nodes=True), "dense"),
        ("oktopk:0.01", Compression(("oktopk:0.01",)), "sparse"),
        ("oktopk", Compression(LADDER), "sparse"),
        ("oktopk:0.02@nodes", Compression(("oktopk:0.02",), between_nodes=True), "sparse"),
        ("lean", Compression(LADDER, lean=True), "lean"),
        ("lean:0.01", Compression(("oktopk:0.01",), lean=True), "lean"),
        ("lean:.01", Compression(("oktopk:0.01",), lean=True), "lean"),
        ("lean:int4", Compression(("int4",), lean=True), "lean"),
        ("oktopk:0.01:bf16", Compression(("oktopk:0.01",), wire="bf16"), "sparse"),
        ("oktopk:0.01:fp32", Compression(("oktopk:0.01",)), "sparse"),
        ("oktopk:int8@nodes", Compression(LADDER, between_nodes=True, wire="int8"), "sparse"),
        ("lean:0.05:bf16", Compression(("oktopk:0.05",), lean=True, wire="bf16"), "lean"),
        ("auto", Compression(("bf16", "int8", "int4")), "quantised"),
        ("auto:int8@nodes", Compression(("bf16", "int8"), between_nodes=True), "quantised"),
        ("auto:oktopk:0.05", Compression(("bf16", "int8", "int4", "oktopk:0.1", "oktopk:0.05")), "sparse"),
        ("lean:auto", Compression(("bf16", "int8", "int4"), lean=True), "lean"),
        ("lean:int8@nodes", Compression(("int8",), lean=True, between_nodes=True), "lean"),
    ]
    for name, expected, kind in cases:
        assert Compression.named(name) == expected and expected.strategy_kind == kind
        suffix = f":{expected.wire}" * (expected.wire != "fp32") + "@nodes" * expected.between_nodes
        assert expected.collectives == [one + suffix for one in expected.kinds]


def test_other_names_are_refused() -> None:
    for name in [
        "int2",
        "int8:0.01",
        "@nodes",
        "lean:int2",
        "dense",
        "oktopk:2",
        "lean:int8:0.1",
        "oktopk:0.01:fp16",
        "int8:bf16",
        "auto:int2",
        "lean:auto:int2",
    ]:
        with pytest.raises(ValueError, match=f"--compress is '{name}': expected"):
            Compression.named(name)


def test_errors_say_what_is_expected_of_the_part_that_is_wrong() -> None:
    cases: list[tuple[str, str]] = [
        ("oktopk:2:bf16", "a density in .0, 1., such as oktopk:0.01"),
        ("oktopk:0.01:fp8", "how values are sent .fp32, bf16, int8., such as oktopk:0.01:bf16"),
        ("lean:2", "a density in .0, 1., such as lean:0.01"),
        ("lean:oktopk:0.01", "a density in .0, 1., such as lean:0.01"),
        ("lean:fp8", "on Lean lean:int8, lean:auto"),
        ("auto:", "expected auto"),
        ("lean:auto:int2", "on Lean lean:int8, lean:auto"),
        ("auto:oktopk", "auto:oktopk:0.01 .down to 1 % sparse."),
    ]
    for name, expected in cases:
        with pytest.raises(ValueError, match=f"--compress is '{name}'.*{expected}"):
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
    assert {"dense", "oktopk:0.01", "oktopk:0.2", "oktopk:0.03", "int8", "int4", "dense@nodes", "bf16@nodes"} == (
        set(here.curves) - {"oktopk:0.02", "oktopk:0.05", "oktopk:0.1"}
    )
    assert here.world_size == 64
    for planner in strategies.planners.values():
        planner(small_trace(), here).check(small_trace())


def test_auto_is_the_least_lossy_plan_of_its_kinds() -> None:
    trace = small_trace()
    names = ["auto", "auto:oktopk:0.01", "lean:auto", "int4"]
    strategies = compressed_strategies(names, trace, RING)
    here = strategies.priced(RING)
    plans = {name: strategies.planners[name](trace, here) for name in names}
    chosen = {kind: error_of(kind) for kind in ("dense", "bf16", "int8", "int4")}
    assert plans["auto"] == plans["lean:auto"] == least_lossy(trace, here, chosen)
    assert plans["auto"] != plans["int4"]
    assert error_of_plan(trace, plans["auto"]) <= error_of_plan(trace, plans["int4"])
    assert finish_s(trace, plans["auto:oktopk:0.01"], here) <= finish_s(trace, plans["auto"], here)
    assert [Compression.named(name).planner_name for name in names] == ["least_lossy"] * 3 + ["optimal"]


def test_packed_values_cost_less_and_are_told_apart() -> None:
    names = ["oktopk:0.2", "oktopk:0.2:bf16", "oktopk:0.2:int8", "lean:0.2:bf16"]
    strategies = compressed_strategies(names, small_trace(), RING)
    here = strategies.priced(RING)
    whole, half, least = (here.seconds(name, 100 << 20) for name in names[:3])
    assert least < half < whole
    plans = [strategies.planners[name](small_trace(), here) for name in names]
    assert finish_s(small_trace(), plans[1], here) < finish_s(small_trace(), plans[0], here)
    assert plans[1] == plans[3]
    told = "; ".join(strategies.assumptions)
    assert "8 bytes as fp32 or 4 bytes as bf16 or 3 bytes as int8" in told
    plain = "; ".join(compressed_strategies(names[:1], small_trace(), RING).assumptions)
    assert "8 bytes as fp32, and new regions" in plain
    for wire, took in (("fp32", "0.92"), ("bf16", "1.22"), ("int8", "1.41")):
        assert f"{took} ms per 110 M elements (values as {wire})" in told
    assert "0.92 ms" in plain and "bf16" not in plain


def test_assumptions_are_of_what_was_asked_for() -> None:
    told = {name: "; ".join(compressed_strategies([name], small_trace(), RING).assumptions) for name in
            ("int8", "bf16", "oktopk:0.01", "int4@nodes")}  # fmt: skip
    assert "0.50 ms per 110 M elements" in told["int8"] and "virtual ranks" not in told["int8"]
    assert "bf16 computes for 0.57 ms per 110 M elements, three passes on an H200" in told["bf16"]
    assert "virtual ranks" in told["oktopk:0.01"] and "all-to-all" not in told["oktopk:0.01"]
    assert ["exact sums inside each node" in words for words in told.values()] == [False, False, False, True]


def test_without_compression_nothing_is_added() -> None:
    none = compressed_strategies([], small_trace(), RING)
    assert none.priced(RING) == RING and not none.planners and not none.assumptions


def test_the_kinds_of_a_plan_are_priced_and_unknown_ones_left_to_the_network() -> None:
    here = priced(NODES, ["dense", "int8", "oktopk:0.01@nodes", "gtopk:0.01"])
    assert set(here.curves) == {"dense", "dense@nodes", "int8", "oktopk:0.01@nodes"}
    assert here.inside is not None and here.inside.ranks_per_node == 8
    assert here.curve("dense") is NODES.curve("dense")


def test_what_one_rank_sends() -> None:
    bucket = [TensorSpec("a", 6144, 4, 0.0), TensorSpec("b", 2048, 4, 1.0)]  # 8192 values
    assert sent_nbytes("dense", bucket, 4) == 2 * 3 * 4 * 8192 // 4
    assert sent_nbytes("bf16", bucket, 4) == 2 * 3 * 2 * 2048
    assert sent_nbytes("int8", bucket, 4) == 2 * 3 * (2048 + 16 * 2)
    assert 0 < (sent_nbytes("oktopk:0.01", bucket, 4) or 0) < 2 * 3 * 2048
    packed = {wire: sent_nbytes(f"oktopk:0.01:{wire}", bucket, 4) or 0 for wire in ("fp32", "bf16", "int8")}
    assert packed["fp32"] == sent_nbytes("oktopk:0.01", bucket, 4) and packed["fp32"] > packed["bf16"] > packed["int8"]
    assert "8 bytes an entry" in about_sent(["dense", "oktopk:0.01"]) and about_sent(["dense", "int8"]) == ""
    assert sent_nbytes("int8@nodes", bucket, 4) is None is sent_nbytes("gtopk:0.01", bucket, 4)
