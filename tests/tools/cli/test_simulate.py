"""anabranch simulate: the library's timeline, and its files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch import Plan, load, plan, save, simulate
from anabranch import planning as planners
from anabranch.tools.cli import network_text
from anabranch.tools.cli.main import main
from anabranch.tools.predict.scaling.compression import priced, sent_nbytes
from anabranch.tools.report.runs import read_runs
from anabranch.tools.report.steps import step_views
from tools.cli.nouns import RING, error_of, json_of, small_trace, trace_file

NETWORK = network_text.network(RING)


def test_json_is_what_the_library_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(small_trace(), NETWORK, "asc")
    timeline = simulate(small_trace(), made, NETWORK)
    document = json_of(capsys, "simulate", "--trace", trace_file(tmp_path), "--network", RING, "--planner", "asc")
    assert (document["lanes"], document["fingerprint"]) == (made.lanes, made.fingerprint)
    assert document["iteration_s"] == timeline.iteration_s
    assert [b["end_s"] for b in document["buckets"]] == [span.end_s for span in timeline.communication]


def test_a_plan_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(small_trace(), NETWORK, "single")
    save(made, tmp_path / "plan.json")
    argv = ["simulate", "--trace", trace_file(tmp_path), "--network", RING, "--plan", str(tmp_path / "plan.json")]
    document = json_of(capsys, *argv)
    assert (document["fingerprint"], document["planner"]) == (made.fingerprint, None)
    assert "expected one of them" in error_of(capsys, *argv, "--planner", "single")


def test_both_files_are_written_and_neither_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, chrome = tmp_path / "timeline.json", tmp_path / "chrome.json"
    argv = ["simulate", "--trace", trace_file(tmp_path), "--network", RING, "-o", str(saved), "--chrome", str(chrome)]
    assert main(argv) == 0
    timeline = simulate(small_trace(), plan(small_trace(), NETWORK), NETWORK)
    assert load(saved) == timeline
    assert json.loads(chrome.read_text()) == timeline.trace_events()
    capsys.readouterr()
    saved.unlink()
    assert "chrome.json: is already there" in error_of(capsys, *argv)
    assert not saved.exists()  # refused before anything is written
    assert main([*argv, "--force"]) == 0


def test_the_summary_says_what_is_exposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", trace_file(tmp_path), "--network", RING]) == 0
    out = capsys.readouterr().out
    for word in ("forward", "backward", "exposed", "finish", "iteration", "behind computation", "lane"):
        assert word in out


def test_compressed_buckets_are_priced_and_what_is_sent_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = small_trace()
    kinds = ("int8", "oktopk:0.01", "dense")
    apart = planners.per_tensor(trace, NETWORK)
    mixed = [replace(bucket, collective=kinds[at % 3]) for at, bucket in enumerate(apart.buckets)]
    save(Plan(tuple(mixed)), tmp_path / "mixed.json")
    argv = ["simulate", "--trace", trace_file(tmp_path), "--network", RING, "--plan", str(tmp_path / "mixed.json")]
    rows = json_of(capsys, *argv)["buckets"]
    here = priced(NETWORK, kinds)
    for row, bucket in zip(rows, mixed, strict=True):
        tensor = next(tensor for tensor in trace.tensors if tensor.name in bucket.names)
        assert row["sent_nbytes"] == sent_nbytes(bucket.collective, [tensor], NETWORK.world_size)
        took_s = here.seconds(bucket.collective, tensor.nbytes)
        assert row["end_s"] - row["start_s"] == pytest.approx(took_s)
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "sends" in out and "oktopk:0.01" in out
    save(Plan(tuple(replace(bucket, collective="gtopk:0.01") for bucket in mixed)), tmp_path / "other.json")
    assert "no cost for the collective 'gtopk:0.01'" in error_of(capsys, *argv[:-1], str(tmp_path / "other.json"))


def test_stages_inside_nodes_are_in_the_document_and_in_what_a_report_draws_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = small_trace()
    nodes = "two_level:ranks=16,per_node=8,alpha=30us,rate=10gbit,inside_alpha=3us,inside_rate=100gbit"
    made = planners.using(planners.per_tensor(trace, NETWORK), "int8@nodes")
    save(made, tmp_path / "plan.json")
    argv = ["simulate", "--trace", trace_file(tmp_path), "--network", nodes, "--plan", str(tmp_path / "plan.json")]
    document = json_of(capsys, *argv)
    timeline = simulate(trace, made, priced(network_text.network(nodes), ["int8@nodes"]))
    assert document["finish_s"] == timeline.finish_s
    found = [tuple(row[stage]) for row in document["buckets"] for stage in ("scatter", "gather")]
    inside = [(span.start_s, span.end_s) for span in timeline.communication if span.track == "inside 0"]
    assert sorted(found) == sorted(inside) and len(inside) == 2 * len(made)
    path = tmp_path / "step.json"
    path.write_text(json.dumps(document))
    (view,) = step_views(read_runs([path]), [])
    assert view.timeline.finish_s == timeline.finish_s
    assert sorted(span.track for span in view.timeline.communication) == sorted(s.track for s in timeline.communication)
