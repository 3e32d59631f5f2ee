"""anabranch plan: the library's plan, its prediction, and a file that is never overwritten by accident."""

from pathlib import Path

import pytest

from anabranch import load, plan, simulate
from anabranch.planning.simulator import lower_bound_s
from anabranch.tools.cli import network_text
from anabranch.tools.cli.main import main
from tools.cli.nouns import HOSTILE, RING, error_of, json_of, small_trace, trace_file

NETWORK = network_text.network(RING)


def test_json_is_what_the_library_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = small_trace()
    document = json_of(capsys, "plan", "--trace", trace_file(tmp_path), "--network", RING)
    made = plan(trace, NETWORK)
    timeline = simulate(trace, made, NETWORK)
    assert document["fingerprint"] == made.fingerprint
    for name in ("finish_s", "exposed_s", "overlap", "iteration_s", "communication_s"):
        assert document[name] == getattr(timeline, name)
    assert (document["forward_s"], document["backward_s"]) == (trace.forward_s, trace.backward_s)
    assert document["lower_bound_s"] == lower_bound_s(trace, NETWORK)
    assert [tuple(bucket["names"]) for bucket in document["buckets"]] == [bucket.names for bucket in made.buckets]
    assert sum(bucket["nbytes"] for bucket in document["buckets"]) == trace.nbytes
    for bucket, span in zip(document["buckets"], timeline.communication, strict=True):
        assert (bucket["start_s"], bucket["end_s"]) == (span.start_s, span.end_s)
    for rival, field in (("by_bytes", "speedup_over_ddp_default"), ("per_tensor", "speedup_over_per_tensor")):
        rival_s = simulate(trace, plan(trace, NETWORK, rival), NETWORK).iteration_s
        assert document[field] == pytest.approx(rival_s / timeline.iteration_s, rel=1e-12)


def test_the_table_has_every_bucket_and_the_fingerprint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--trace", trace_file(tmp_path), "--network", RING, "--planner", "per_tensor"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"layer.{k}" in out for k in range(20))
    assert plan(small_trace(), NETWORK, "per_tensor").fingerprint in out
    assert "over DDP's default" in out and "over no merging" in out


def test_an_unknown_planner_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--trace", trace_file(tmp_path), "--network", RING]
    assert "expected one of per_tensor" in error_of(capsys, *argv, "--planner", "magic")


def test_a_plan_is_written_once_and_again_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    argv = ["plan", "--trace", trace_file(tmp_path), "--network", RING, "-o", str(path)]
    assert json_of(capsys, *argv)["written"] == str(path)
    assert load(path) == plan(small_trace(), NETWORK)
    path.write_text("mine")
    assert "--force" in error_of(capsys, *argv)
    assert path.read_text() == "mine"
    assert json_of(capsys, *argv, "--force")["written"] == str(path)
    assert load(path) == plan(small_trace(), NETWORK)
    assert "cannot write there" in error_of(capsys, *argv[:-1], str(tmp_path / "no" / "folder.json"))


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_a_hostile_name_is_spelled_out(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [verb, "--trace", trace_file(tmp_path, HOSTILE), "--network", RING, "--planner", "per_tensor"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "[red]\\x1b[2J" in out and ":smile:" in out
    assert not set("\x1b\x07\u202e") & set(out)
