"""What a sweep rests on is said: batches, extrapolation, and networks that share a name."""

from dataclasses import replace
from pathlib import Path

import pytest

from anabranch import Network, save
from anabranch.scaling.compression import highest_density
from cli.nouns import RING, json_of, measured, small_trace, trace_file

QUICK = ["--planners", "by_bytes,optimal", "--compress", "none"]


def assumptions(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    return "; ".join(json_of(capsys, "scale", *argv, *QUICK)["assumptions"])


def test_two_files_of_one_name_keep_their_own_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {}
    for folder, start_s in (("a", 1e-3), ("b", 1e-1)):
        (tmp_path / folder).mkdir()
        files[folder] = str(tmp_path / folder / "network.json")
        save(Network.measured(8, [(1024, start_s), (1 << 24, 2 * start_s)]), files[folder])
    argv = ["scale", "--trace", trace_file(tmp_path), "--world-sizes", "8", *QUICK]
    both = json_of(capsys, *argv, "--network", files["a"], "--network", files["b"])
    alone = json_of(capsys, *argv, "--network", files["a"])
    steps = {point["network"]: point["iteration_s"] for point in both["points"]}
    assert list(steps) == list(files.values()) and steps[files["b"]] > steps[files["a"]] + 0.05
    assert steps[files["a"]] == alone["points"][-1]["iteration_s"]
    assert [said.partition(": ")[0] for said in both["answer"]] == list(files.values())


def test_an_extrapolation_is_said_wherever_it_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the largest size is the measured one, and only of the networks that were carried."""
    save(measured(), tmp_path / "net.json")
    argv = ["--trace", trace_file(tmp_path), "--network", str(tmp_path / "net.json"), "--network", RING]
    assert "net.json extrapolated by ring fitted to 8 ranks" in assumptions(capsys, *argv, "--world-sizes", "4,8")
    assert "extrapolated" not in assumptions(capsys, *argv, "--world-sizes", "8")


def test_rings_of_many_ranks_are_said_to_be_rings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_file(tmp_path)
    trees = "halving_doubling:ranks=16,alpha=30us,rate=10gbit"
    for network, ring in (("nvlink+400ib", True), ("100ib", True), (trees, False)):
        argv = ["--trace", trace, "--network", network, "--world-sizes"]
        assert ("may choose trees" in assumptions(capsys, *argv, "4,2048")) == ring
        assert "may choose trees" not in assumptions(capsys, *argv, "4,8")


def test_a_batch_that_cannot_be_shared_is_on_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(replace(small_trace(), meta={"model": "m", "batch": 8}), tmp_path / "batch.json")
    argv = ["--trace", str(tmp_path / "batch.json"), "--network", RING, "--scaling", "strong", "--world-sizes"]
    words = "a batch of 8 has no sample for every rank from 16 ranks on: only on paper"
    assert words in assumptions(capsys, *argv, "4,8,16,64")
    assert "only on paper" not in assumptions(capsys, *argv, "4,8")
    assert "only on paper" not in assumptions(capsys, *argv, "4,64", "--batch", "64")
    weak = [*argv[:4], "--world-sizes", "4,64"]
    assert "only on paper" not in assumptions(capsys, *weak)


def test_messages_need_room_for_the_greatest_density_that_may_be_chosen() -> None:
    assert highest_density("oktopk:0.01") == highest_density("lean:0.01") == 0.01
    assert highest_density("oktopk") == highest_density("lean") == 0.2  # the top of the ladder
    assert highest_density("optimal") == 1.0
