"""anabranch simulate: the library's timeline, and its files."""

import json
from pathlib import Path

import pytest

from anabranch import load, plan, save, simulate
from anabranch.cli import network_text
from anabranch.cli.main import main
from cli.nouns import RING, error_of, json_of, small_trace, trace_file

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
    for word in ("forward", "backward", "exposed", "finish", "iteration", "behind computation", "lane 0"):
        assert word in out
