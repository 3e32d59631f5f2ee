"""anabranch compare: every planner, the bound, and what the measured spread changes."""

from pathlib import Path

import pytest

from anabranch import plan, save, simulate
from anabranch.planning.ladder import least_lossy
from anabranch.planning.merge import compressed_if_faster
from anabranch.planning.simulator import lower_bound_s
from anabranch.tools.cli import network_text
from anabranch.tools.cli.main import main
from anabranch.tools.predict.scaling.compression import priced
from anabranch.values.kinds import fidelity
from anabranch.values.kinds.fidelity import error_of_plan
from anabranch.values.kinds.names import COMPRESSED, EVERY_ELEMENT, two_level
from tools.cli.nouns import RING, error_of, json_of, measured, small_trace, trace_file

ROWS = ["per_tensor", "single", "by_bytes", "mgwfbp", "optimal", "asc", "lanes"]


def test_rows_are_what_the_library_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, trace = network_text.network(RING), small_trace()
    document = json_of(capsys, "compare", "--trace", trace_file(tmp_path), "--network", RING)
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ROWS
    ddp_s = simulate(trace, plan(trace, network, "by_bytes"), network).iteration_s
    for row in rows.values():
        made = plan(trace, network, row["planner"], **row["options"])
        timeline = simulate(trace, made, network)
        bound_s = lower_bound_s(trace, network, made.lanes)
        assert (row["buckets"], row["lanes"], row["fingerprint"]) == (len(made), made.lanes, made.fingerprint)
        assert (row["finish_s"], row["exposed_s"]) == (timeline.finish_s, timeline.exposed_s)
        assert row["speedup"] == pytest.approx(ddp_s / timeline.iteration_s, rel=1e-12)
        assert row["lower_bound_s"] == bound_s and row["above_bound"] == timeline.finish_s / bound_s - 1
        assert row["above_bound"] >= -1e-12
        assert row["iteration_low_s"] is None
    assert rows[document["best"]]["iteration_s"] == min(row["iteration_s"] for row in rows.values())


def test_every_way_to_compress_is_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "--trace", trace_file(tmp_path), "--network", RING]
    document = json_of(capsys, *argv)
    rows = {row["name"]: row for row in document["compressed"]}
    assert list(rows) == ["auto", "bf16", "int8", "int4", "oktopk:0.01"]
    assert rows.pop("auto")["planner"] == "least_lossy"
    trace, network = small_trace(), priced(network_text.network(RING), rows)
    for name, row in rows.items():
        made = compressed_if_faster(trace, network, name)
        assert row["iteration_s"] == simulate(trace, made, network).iteration_s and row["speedup"] > 1
        assert row["planner"] == "optimal" and row["error"] == error_of_plan(trace, made)
    assert all((row["kinds"], row["error"]) == ({"dense": 1.0}, 0.0) for row in document["rows"])
    assert rows["bf16"]["iteration_s"] > rows["int8"]["iteration_s"] > rows["int4"]["iteration_s"]
    assert document["best"] in ROWS  # of what sends everything in full
    assert any("int4 computes for" in said for said in document["assumptions"])
    assert main([*argv, "--compress", "int8@nodes"]) == 0
    out = capsys.readouterr().out
    assert "int8@nodes" in out and "oktopk" not in out and "Assumed: int8 buckets cost" in out
    assert json_of(capsys, *argv, "--compress", "none")["compressed"] == []
    assert "--compress is 'fp8'" in error_of(capsys, *argv, "--compress", "fp8")


def test_auto_is_the_least_lossy_plan_and_says_what_it_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["compare", "--trace", trace_file(tmp_path), "--network", RING, "--compress", "auto"]
    (row,) = json_of(capsys, *argv)["compressed"]
    trace, network = small_trace(), priced(network_text.network(RING), COMPRESSED)
    made = least_lossy(trace, network, fidelity.ERRORS)
    assert (row["planner"], row["fingerprint"]) == ("least_lossy", made.fingerprint)
    assert row["error"] == error_of_plan(trace, made) > 0
    assert list(row["kinds"]) == fidelity.by_fidelity(list({b.collective for b in made.buckets}))
    assert len(row["kinds"]) > 1
    assert sum(row["kinds"].values()) == pytest.approx(1)
    errors = [fidelity.ERRORS[kind] * share for kind, share in row["kinds"].items()]
    assert sum(errors) == pytest.approx(1e6 * row["error"])
    assert main(argv) == 0
    shown = " ".join(capsys.readouterr().out.split())
    mix = ", ".join(f"{kind} {share:.1%}" for kind, share in row["kinds"].items())
    assert f"Shares of the values: auto: {mix}." in shown and f"{row['error']:.2g}" in shown


def test_packed_values_and_nodes_have_the_error_of_their_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = ["oktopk:0.2", "oktopk:0.2:bf16", "oktopk:0.2:int8@nodes", "auto@nodes"]
    argv = ["compare", "--trace", trace_file(tmp_path), "--network", RING]
    rows = json_of(capsys, *argv, *(word for way in ways for word in ("--compress", way)))["compressed"]
    assert [row["name"] for row in rows] == ways
    assert rows[1]["iteration_s"] < rows[0]["iteration_s"] and set(rows[1]["kinds"]) <= {"dense", "oktopk:0.2"}
    assert set(rows[3]["kinds"]) <= {"dense", *map(two_level, EVERY_ELEMENT)}
    assert 0 < rows[3]["error"] <= 0.0225 < rows[2]["error"]


def test_the_best_row_has_a_mark_that_is_not_a_colour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_file(tmp_path)
    best = json_of(capsys, "compare", "--trace", trace, "--network", RING)["best"]
    assert main(["compare", "--trace", trace, "--network", RING]) == 0
    out = capsys.readouterr().out
    marked = [line for line in out.splitlines() if line.startswith("* ") and not line.startswith("* best.")]
    assert [line.split()[1] for line in marked] == [best]
    assert "\x1b" not in out
    caption = out[out.index("* best.") :]  # says what each name means
    assert all(name in caption for name in ROWS)
    assert "spread" not in out


def test_a_measured_spread_gives_a_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, trace, path = measured(), small_trace(), str(tmp_path / "network.json")
    save(network, path)
    argv = ["compare", "--trace", trace_file(tmp_path), "--network", path]
    for row in json_of(capsys, *argv)["rows"]:
        made = plan(trace, network, row["planner"], **row["options"])
        assert row["iteration_low_s"] == simulate(trace, made, network.shifted(-1)).iteration_s
        assert row["iteration_high_s"] == simulate(trace, made, network.shifted(+1)).iteration_s
        assert row["iteration_low_s"] <= row["iteration_s"] <= row["iteration_high_s"]
    assert main(argv) == 0
    assert "measured spread" in capsys.readouterr().out


def test_a_step_that_takes_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(small_trace().scaled(1e-320), tmp_path / "instant.json")
    argv = ["compare", "--trace", str(tmp_path / "instant.json"), "--network", "linear:ranks=2,start=0,s_per_byte=0"]
    document = json_of(capsys, *argv)
    assert all(row["speedup"] is None or row["speedup"] >= 0 for row in document["rows"])
    assert main(argv) == 0
