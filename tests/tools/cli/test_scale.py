"""anabranch scale: the library's sweep and its assumptions."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from anabranch import Network, Plan, Trace, save
from anabranch import planning as planners
from anabranch.planning.footprint import Setting
from anabranch.planning.ladder import FREE, least_lossy
from anabranch.planning.simulator import finish_s
from anabranch.tools.bench import zoo
from anabranch.tools.cli import network_text
from anabranch.tools.cli.main import main
from anabranch.tools.cli.memory import estimator_of
from anabranch.tools.network_presets import NetworkRange
from anabranch.tools.predict.scaling.compression import priced
from anabranch.tools.predict.scaling.prediction import planned, sweep
from anabranch.tools.predict.scaling.result import Basis, Scaling
from anabranch.tools.report.comparison import MEANING
from anabranch.values.kinds import fidelity
from anabranch.values.kinds.names import COMPRESSED
from tools.cli.nouns import RING, error_of, json_of, measured, small_trace, trace_file

FEW = ["--world-sizes", "4,16,64", "--planners", "by_bytes,optimal"]
QUICK = [*FEW, "--compress", "none"]


def test_points_are_what_the_library_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen: dict[str, Callable[[Trace, Network], Plan]] = {"by_bytes": planners.by_bytes, "optimal": planners.optimal}
    for basis in get_args(Basis):
        argv = ["scale", "--trace", trace_file(tmp_path), "--network", RING, *QUICK, "--scaling", basis]
        document = json_of(capsys, *argv)
        links = NetworkRange.given(RING, network_text.network(RING), "")
        strategies = {name: planned(planner) for name, planner in chosen.items()}
        expected = sweep(small_trace(), links, [4, 16, 64], strategies, scaling=basis)
        assert document["points"] == [{**asdict(point), "error": 0.0} for point in expected]  # all of them are dense


def test_the_default_goes_from_4_to_2048(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, "scale", "--trace", trace_file(tmp_path))
    assert sorted({point["world_size"] for point in document["points"]}) == [2**k for k in range(2, 12)]
    assert [network["name"] for network in document["networks"]] == ["10gbe", "nvlink+100gbe"]
    kinds = [strategy["kind"] for strategy in document["strategies"]]
    assert kinds == ["dense"] * 7 + ["quantised", "sparse"]
    assert all(point["iteration_low_s"] < point["iteration_high_s"] for point in document["points"])


def test_the_document_is_a_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["scale", "--trace", trace_file(tmp_path), "--network", "25gbe", "--network", RING, *QUICK]
    document = json_of(capsys, *argv)
    assert document["command"] == "scale" and document["version"] == 1
    found = TypeAdapter(Scaling).validate_json(json.dumps(document))
    assert json.loads(json.dumps(asdict(found))) == document
    assert [known.name for known in found.networks] == ["25gbe", RING]
    assert "no band" in found.networks[1].spread and len(found.answer) == 2
    assert "rivals_h200_lab_25gbit" in found.networks[0].source
    del document["points"][-1]
    with pytest.raises(ValidationError, match="in this order"):
        TypeAdapter(Scaling).validate_json(json.dumps(document))


def test_65536_ranks_on_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--network", "nvlink+400ib", "--world-sizes", "8,65536", "--compress", "none"]
    document = json_of(capsys, "scale", "--trace", trace_file(tmp_path), *argv)
    steps = {(p["planner"], p["world_size"]): p["iteration_s"] for p in document["points"]}
    assert all(steps[name, 8] < steps[name, 65536] for name in ("per_tensor", "optimal", "lanes"))


def test_a_batch_of_your_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(replace(small_trace(), meta={"model": "m", "batch": 8}), tmp_path / "batch.json")
    argv = ["scale", "--trace", str(tmp_path / "batch.json"), "--network", RING, *QUICK]
    recorded, doubled = json_of(capsys, *argv), json_of(capsys, *argv, "--batch", "16")
    for one, two in zip(recorded["points"], doubled["points"], strict=True):
        alone_s = one["iteration_s"] - one["exposed_s"]
        assert two["iteration_s"] - two["exposed_s"] == pytest.approx(2 * alone_s)
        assert two["samples_per_s"] == pytest.approx(16 * two["world_size"] / two["iteration_s"])
        assert two["samples_per_s"] > one["samples_per_s"]  # as much is sent for twice the work
    assert {strategy["batch"] for strategy in doubled["strategies"]} == {16}
    assert any("in proportion to the batch" in said for said in doubled["assumptions"])


def test_lean_sends_what_oktopk_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = sparse(tmp_path, capsys, "oktopk:0.01", "lean:0.01")
    steps = {(p["planner"], p["world_size"]): p["iteration_s"] for p in document["points"]}
    assert all(steps["oktopk:0.01", size] == steps["lean:0.01", size] for size in (4, 16, 64))
    assert document["strategies"][-1] == {"name": "lean:0.01", "kind": "lean", "batch": None}
    assert any("lean sends what the same exchange does" in said for said in document["assumptions"])


def test_what_fits_decides_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.predict.memory.models import images

    monkeypatch.setattr(zoo, "model_and_loss", lambda _name, device, batch: images(batch)(device))
    save(replace(small_trace(), meta={"model": "resnet50", "batch": 8}), tmp_path / "fit.json")
    argv = ["scale", "--trace", str(tmp_path / "fit.json"), "--network", RING, *FEW, "--within", "100MiB"]
    document = json_of(capsys, *argv)
    batches = {strategy["name"]: strategy["batch"] for strategy in document["strategies"]}
    assert list(batches) == ["by_bytes", "optimal", "int8", "oktopk:0.01", "lean:0.01"]
    assert batches["by_bytes"] == batches["optimal"] >= batches["oktopk:0.01"] > 0
    assert batches["lean:0.01"] > 0  # of so small a model, its two slots take more than they save
    told = "; ".join(document["assumptions"])
    assert "largest batch per rank that fits in 100.0 MiB at 64 ranks" in told and "momentum" in told
    said = "batch per rank: dense {optimal:,}, int8 {int8:,}, oktopk:0.01 {oktopk:,}, lean"
    assert said.format(**batches, oktopk=batches["oktopk:0.01"]) in told
    assert "whatever the strategy" in error_of(capsys, *argv[:-1], "1MiB")
    assert "--scaling strong" in error_of(capsys, *argv, "--scaling", "strong")
    assert "and no --within" in error_of(capsys, *argv, "--batch", "4")


def test_what_fits_of_a_sharded_model_does_at_the_fewest_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.predict.memory.models import images

    monkeypatch.setattr(zoo, "model_and_loss", lambda _name, device, batch: images(batch)(device))
    numbered = tuple(replace(t, name=f"layers.{i}.{t.name}") for i, t in enumerate(small_trace().tensors))
    save(replace(small_trace(), tensors=numbered, meta={"model": "resnet50", "batch": 8}), tmp_path / "fit.json")
    argv = ["scale", "--trace", str(tmp_path / "fit.json"), "--network", "nvlink+25gbe", *FEW, "--within", "100MiB"]
    found = json_of(capsys, *argv, "--sharded", "fsdp2:reshard", "--sharded", "hsdp")
    batches = {strategy["name"]: strategy["batch"] for strategy in found["strategies"]}
    estimator = estimator_of("resnet50", "momentum")
    for way in ("fsdp2:reshard", "hsdp"):
        expected = estimator.largest_batch(way, Setting(ranks=4, ranks_per_node=4), 100 << 20)
        assert batches[way] == expected > 0
    assert "memory: of sharded models at 4 ranks in nodes of 4; with more, shards are smaller" in found["assumptions"]
    other = [*argv, "--network", "25gbe", "--sharded", "hsdp"]
    assert "depends on the nodes of the network, and these have [1, 8] ranks" in error_of(capsys, *other)


def test_what_nobody_can_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(replace(small_trace(), meta={"model": "mine", "batch": 8}), tmp_path / "mine.json")
    argv = ["scale", "--trace", str(tmp_path / "mine.json"), "--network", RING, *QUICK, "--within", "1GiB"]
    assert "--within: a trace holds no activations, and its model ('mine')" in error_of(capsys, *argv)


def test_assumptions_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(measured(), tmp_path / "network.json")
    argv = ["scale", "--trace", trace_file(tmp_path), "--network", str(tmp_path / "network.json"), *QUICK]
    assert main(argv) == 0
    assumed = " ".join(capsys.readouterr().out.split()).split("Assumed: ")
    assert len(assumed) == 2
    assert "ring fitted to 8 ranks" in assumed[1] and "weak scaling" in assumed[1]
    here = json_of(capsys, *argv[:-6], "--world-sizes", "8", "--planners", "optimal", "--compress", "none")
    assert not any("extrapolated" in said for said in here["assumptions"])


def test_tables_show_the_best_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "per_tensor,single,by_bytes,mgwfbp,optimal,asc,lanes"
    argv = ["scale", "--trace", trace_file(tmp_path), "--network", RING, "--planners", names, "--world-sizes", "4,2048"]
    assert main([*argv, "--network", "100ib"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2,048" in out and "100ib: " in out and "100ib is nominal: 5 µs a hop" in out


WRONG_OPTIONS = [
    (["--world-sizes", "4,,8"], "rising whole numbers"),
    (["--world-sizes", "8,4"], "rising whole numbers"),
    (["--world-sizes", "0"], "rising whole numbers"),
    (["--world-sizes", "9" * 5000], "rising whole numbers"),
    (["--world-sizes", "٤"], "rising whole numbers"),
    (["--planners", "optimal,magic"], "'magic'"),
    (["--scaling", "odd"], "odd"),
    (["--batch", "9" * 30], "--batch"),
    (["--batch", "4"], "the trace's meta has batch None"),
    (["--network", "10gbe:16"], "10gbe:ranks=16"),
    (["--network", "token"], "no name (1gbe, 10gbe"),
]


def test_wrong_options_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, word in WRONG_OPTIONS:
        assert word in error_of(capsys, "scale", "--trace", trace_file(tmp_path), "--network", RING, *options)


def test_one_rank_has_no_links_to_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["scale", "--trace", trace_file(tmp_path), "--network", "linear:ranks=1,start=0,s_per_byte=0"]
    assert "cannot be carried" in error_of(capsys, *argv)


def sparse(tmp_path: Path, capsys: pytest.CaptureFixture[str], *ways: str, network: str = RING) -> dict[str, Any]:
    asked = [word for way in ways for word in ("--compress", way)]
    return json_of(capsys, "scale", "--trace", trace_file(tmp_path), "--network", network, *FEW, *asked)


def test_sparse_buckets_are_priced_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = sparse(tmp_path, capsys, "oktopk:0.01", "oktopk", "oktopk:0.01")
    steps = {(point["planner"], point["world_size"]): point["iteration_s"] for point in document["points"]}
    assert [key[0] for key in steps if key[1] == 64] == ["by_bytes", "optimal", "oktopk:0.01", "oktopk"]
    for size in (4, 16, 64):
        assert steps["oktopk:0.01", size] < steps["optimal", size]
        assert steps["oktopk:0.01", size] <= steps["oktopk", size] <= 1.02 * steps["oktopk:0.01", size]
    assert steps["oktopk:0.01", 4] < steps["oktopk:0.01", 64]
    told = "; ".join(document["assumptions"])
    assert "virtual ranks" in told and "as on an H200" in told and "2(P-1)" in told


def test_sparse_points_are_those_of_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = priced(network_text.network(RING).at(64), ["oktopk:0.05"])
    plan = planners.optimal(small_trace(), here, collective="oktopk:0.05")
    point = sparse(tmp_path, capsys, "oktopk:0.05")["points"][-1]
    assert point["buckets"] == len(plan) and point["world_size"] == 64
    assert point["iteration_s"] == pytest.approx(small_trace().forward_s + finish_s(small_trace(), plan, here))


def test_rounded_buckets_are_priced_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = sparse(tmp_path, capsys, "int4", "bf16", "int8", "lean:int8")
    steps = {(p["planner"], p["world_size"]): p["iteration_s"] for p in document["points"]}
    for size in (4, 16, 64):
        assert steps["int4", size] < steps["int8", size] < steps["bf16", size] < steps["optimal", size]
        assert steps["lean:int8", size] == steps["int8", size]
    assert [strategy["kind"] for strategy in document["strategies"]][2:] == ["quantised"] * 3 + ["lean"]
    told = "; ".join(document["assumptions"])
    assert "all-to-all" in told and "int8 computes for 0.50 ms per 110 M elements" in told and "@nodes" not in told


def test_auto_and_packed_values_are_priced_also_on_lean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = ["int4", "auto", "lean:auto", "oktopk:0.2", "oktopk:0.2:bf16", "lean:0.2:bf16"]
    document = sparse(tmp_path, capsys, *ways)
    steps = {(p["planner"], p["world_size"]): p["iteration_s"] for p in document["points"]}
    computing_s = small_trace().forward_s + small_trace().backward_s
    for size in (4, 16, 64):
        assert steps["auto", size] == steps["lean:auto", size] <= steps["int4", size] + FREE * computing_s
        assert steps["oktopk:0.2:bf16", size] == steps["lean:0.2:bf16", size] < steps["oktopk:0.2", size]
    kinds = {strategy["name"]: strategy["kind"] for strategy in document["strategies"]}
    assert (kinds["auto"], kinds["lean:auto"]) == ("quantised", "lean")


def test_how_lossy_plans_are_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = ["auto", "int8", "oktopk:0.2:bf16", "auto@nodes"]
    document = sparse(tmp_path, capsys, *ways)
    found = {(p["planner"], p["world_size"]): p["error"] for p in document["points"]}
    trace = small_trace()
    for size in (4, 16, 64):
        here = priced(network_text.network(RING).at(size), COMPRESSED)
        made = least_lossy(trace, here, fidelity.ERRORS)
        assert found["auto", size] == found["auto@nodes", size] == fidelity.error_of_plan(trace, made) > 0
        assert (
            found["optimal", size] == 0 and 0 < found["oktopk:0.2:bf16", size] <= fidelity.error_of("oktopk:0.2") / 1e6
        )
    assert len({found["auto", size] for size in (4, 16, 64)}) == 3
    asked = [word for way in ways for word in ("--compress", way)]
    assert main(["scale", "--trace", trace_file(tmp_path), "--network", RING, *FEW, *asked]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"Error: {MEANING}." in out
    assert all(any(f" {found[way, size]:.2g} " in out for way in ways) for size in (4, 16, 64))


def test_two_level_kinds_are_priced_and_what_runs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = "two_level:ranks=16,per_node=8,alpha=30us,rate=10gbit,inside_alpha=3us,inside_rate=3000gbit"
    document = sparse(tmp_path, capsys, "int8", "dense@nodes", "int8@nodes", "oktopk:0.01@nodes", network=nodes)
    steps = {(p["planner"], p["world_size"]): p["iteration_s"] for p in document["points"]}
    assert steps["int8@nodes", 64] < steps["int8", 64] <= steps["optimal", 64]
    assert steps["oktopk:0.01@nodes", 64] < steps["int8@nodes", 64]
    # The dense all-reduce of the formula has the same stages, of which no two overlap.
    assert all(steps["dense@nodes", size] <= steps["optimal", size] for size in (4, 16, 64))
    assert steps["dense@nodes", 64] < steps["optimal", 64]
    assert {s["name"]: s["kind"] for s in document["strategies"]}["dense@nodes"] == "dense"
    assert any("stages of successive buckets overlap" in said for said in document["assumptions"])
    flat = sparse(tmp_path, capsys, "int8", "int8@nodes")
    here = {(p["planner"], p["world_size"]): p["iteration_s"] for p in flat["points"]}
    assert all(here["int8", size] == here["int8@nodes", size] for size in (4, 16, 64))


def test_a_measured_exchange_tells_what_selection_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = measured().curve("dense").points
    slow = [(point.nbytes, 1e-3 + 5e-10 * point.nbytes) for point in dense]
    curves = {"dense": [(point.nbytes, point.seconds) for point in dense], "oktopk:0.01": slow}
    save(Network.measured(8, curves), tmp_path / "network.json")
    document = sparse(tmp_path, capsys, "oktopk:0.01", network=str(tmp_path / "network.json"))
    assert any("oktopk:0.01 took beyond its messages" in told for told in document["assumptions"])
    assert "at 8 ranks oktopk:0.01 buckets cost what was measured there" in document["assumptions"]


def test_gradients_that_are_not_float32_stay_dense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tuple(replace(tensor, dtype="float64", itemsize=8) for tensor in small_trace().tensors)
    save(replace(small_trace(), tensors=tensors), tmp_path / "double.json")
    argv = ["scale", "--trace", str(tmp_path / "double.json"), "--network", RING, *FEW, "--compress", "oktopk:0.01"]
    points = {(p["planner"], p["world_size"]): p["iteration_s"] for p in json_of(capsys, *argv)["points"]}
    assert points["oktopk:0.01", 64] == points["optimal", 64]


UNPRICED = [
    ("fp8", "--compress is 'fp8': expected auto (as faithful as is hidden, down to int4), auto:oktopk:0.01"),
    ("gtopk:0.01", "--compress is 'gtopk:0.01': expected auto"),
    ("oktopk:2", "--compress is 'oktopk:2': expected a density in (0, 1], such as oktopk:0.01"),
]


def test_what_cannot_be_priced_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for way, words in UNPRICED:
        argv = ["scale", "--trace", trace_file(tmp_path), "--network", RING, *FEW, "--compress", way]
        assert words in error_of(capsys, *argv)


def test_sharded_strategies_stand_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["scale", "--trace", "resnet50", "--network", "nvlink+25gbe", *QUICK, "--sharded", "fsdp2:planned"]
    assert main([*argv, "--json"]) == 0
    names = [strategy["name"] for strategy in json.loads(capsys.readouterr().out)["strategies"]]
    assert names[-1] == "fsdp2:planned"
    message = error_of(capsys, *argv, "--within", "1GiB")
    assert "--sharded is 'fsdp2:planned': expected one of fsdp2, " in message
