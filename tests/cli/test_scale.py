"""anabranch scale: the library's sweep, its assumptions, and a plot that opens."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from anabranch import Network, planners, save
from anabranch.cli import links
from anabranch.cli.main import main
from anabranch.sim import finish_s, sweep
from cli.nouns import HOSTILE, RING, error_of, json_of, measured, small_trace, trace_file

PNG = b"\x89PNG\r\n\x1a\n"
QUICK = ["--world-sizes", "4,16,64", "--planners", "by_bytes,optimal"]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ([], {"straggler_factor": 2.0}),
        (["--scaling", "strong"], {"scaling": "strong"}),
        (["--jitter", "0.1", "--seed", "7"], {"jitter": 0.1, "seed": 7}),
        (["--stragglers", "1", "--straggler-factor", "1.5"], {"stragglers": 1, "straggler_factor": 1.5}),
    ],
)
def test_points_are_what_the_library_says(
    options: list[str], given: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json_of(capsys, "scale", "--trace", trace_file(tmp_path), "--network", RING, *QUICK, *options)
    chosen = {"by_bytes": planners.by_bytes, "optimal": planners.optimal}
    expected = sweep(small_trace(), links.network(RING), [4, 16, 64], chosen, **given)  # type: ignore[arg-type]
    assert document["points"] == [asdict(point) for point in expected]
    assert {key: document[key] for key in given} == given


def test_the_default_goes_from_4_to_2048(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, "scale", "--trace", trace_file(tmp_path), "--network", RING)
    assert sorted({point["world_size"] for point in document["points"]}) == [2**k for k in range(2, 12)]


def test_assumptions_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(measured(), tmp_path / "network.json")
    argv = ["scale", "--trace", trace_file(tmp_path), "--network", str(tmp_path / "network.json"), *QUICK]
    assert main(argv) == 0
    assumed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Assumed: ")]
    assert len(assumed) == 1
    assert "ring fitted to 8 ranks" in assumed[0] and "weak scaling" in assumed[0]
    here = json_of(capsys, *argv[:-4], "--world-sizes", "8", "--planners", "optimal")
    assert len(here["assumptions"]) == 1  # nothing is extrapolated


def test_tables_show_every_planner_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "per_tensor,single,by_bytes,horovod,mgwfbp,optimal,asc,lanes"
    argv = ["scale", "--trace", trace_file(tmp_path), "--network", RING, "--planners", names, "--world-sizes", "4,2048"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in names.split(",")) and "2,048" in out
    assert all(title in out for title in ("Iteration, ", "Speed-up", "Efficiency"))


@pytest.mark.parametrize("name", ["plot.png", "plot.svg", "plot.SVG"])
def test_a_plot_is_written_and_not_overwritten(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    argv = [
        "scale",
        "--trace",
        trace_file(tmp_path, HOSTILE + "$\\frac$"),
        "--network",
        RING,
        *QUICK,
        "--plot",
        str(path),
    ]
    assert json_of(capsys, *argv)["written"] == str(path)
    content = path.read_bytes()
    if name.endswith("png"):
        assert content.startswith(PNG)
    else:
        assert ElementTree.fromstring(content).tag.endswith("svg")
    assert "--force" in error_of(capsys, *argv)
    assert path.read_bytes() == content
    assert main([*argv, "--force"]) == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--plot", "plot.pdf"], ".png or .svg"),
        (["--world-sizes", "4,,8"], "rising whole numbers"),
        (["--world-sizes", "8,4"], "rising whole numbers"),
        (["--world-sizes", "0"], "rising whole numbers"),
        (["--world-sizes", "9" * 5000], "rising whole numbers"),
        (["--world-sizes", "٤"], "rising whole numbers"),
        (["--planners", "optimal,magic"], "'magic'"),
        (["--scaling", "odd"], "odd"),
        (["--jitter", "nan"], "expected 0 to 3"),
        (["--jitter", "-0.1"], "expected 0 to 3"),
        (["--jitter", "1e300"], "expected 0 to 3"),
        (["--stragglers", "5"], "stragglers is 5"),
        (["--stragglers", "1", "--straggler-factor", "0"], "straggler_factor is 0"),
        (["--straggler-factor", "3"], "--stragglers is 0"),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert word in error_of(capsys, "scale", "--trace", trace_file(tmp_path), "--network", RING, *options)


def test_one_rank_has_no_links_to_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["scale", "--trace", trace_file(tmp_path), "--network", "linear:ranks=1,start=0,s_per_byte=0"]
    assert "cannot be carried" in error_of(capsys, *argv)


def sparse(tmp_path: Path, capsys: pytest.CaptureFixture[str], *ways: str, network: str = RING) -> dict[str, Any]:
    asked = [word for way in ways for word in ("--compress", way)]
    return json_of(capsys, "scale", "--trace", trace_file(tmp_path), "--network", network, *QUICK, *asked)


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
    from anabranch.sparse.pricing import H200, priced

    here = priced(links.network(RING).at(64), 0.05, H200)
    plan = planners.optimal(small_trace(), here, collective="oktopk:0.05")
    point = sparse(tmp_path, capsys, "oktopk:0.05")["points"][-1]
    assert point["buckets"] == len(plan) and point["world_size"] == 64
    assert point["iteration_s"] == pytest.approx(small_trace().forward_s + finish_s(small_trace(), plan, here))


def test_a_measured_exchange_tells_what_selection_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = measured().curve("dense").points
    slow = [(point.nbytes, 1e-3 + 5e-10 * point.nbytes) for point in dense]
    curves = {"dense": [(point.nbytes, point.seconds) for point in dense], "oktopk:0.01": slow}
    save(Network.measured(8, curves), tmp_path / "network.json")
    document = sparse(tmp_path, capsys, "oktopk:0.01", network=str(tmp_path / "network.json"))
    assert any("oktopk:0.01 took beyond its messages" in told for told in document["assumptions"])


def test_gradients_that_are_not_float32_stay_dense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tuple(replace(tensor, dtype="float64", itemsize=8) for tensor in small_trace().tensors)
    save(replace(small_trace(), tensors=tensors), tmp_path / "double.json")
    argv = ["scale", "--trace", str(tmp_path / "double.json"), "--network", RING, *QUICK, "--compress", "oktopk:0.01"]
    points = {(p["planner"], p["world_size"]): p["iteration_s"] for p in json_of(capsys, *argv)["points"]}
    assert points["oktopk:0.01", 64] == points["optimal", 64]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("bf16", "--compress is 'bf16': scale prices oktopk (as dense as is hidden) and oktopk:0.01"),
        ("gtopk:0.01", "--compress is 'gtopk:0.01': scale prices oktopk"),
        ("oktopk:2", "--compress is 'oktopk:2': expected a density in (0, 1], such as oktopk:0.01"),
    ],
)
def test_what_cannot_be_priced_is_named(
    way: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["scale", "--trace", trace_file(tmp_path), "--network", RING, *QUICK, "--compress", way]
    assert words in error_of(capsys, *argv)
