"""What a sweep rests on is said: batches, extrapolation, and networks that share a name."""

import doctest
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from anabranch import Network, save
from anabranch.tools.network_presets import NetworkRange
from anabranch.tools.predict import scaling
from anabranch.tools.predict.scaling import Strategy, scale, strategy_kinds
from tools.cli.nouns import RING, json_of, measured, small_trace, trace_file

ROUNDED = ["int8", "int4@nodes", "lean:int8", "lean:bf16@nodes", "auto", "lean:auto", "lean:auto:int8"]
SPARSE = ["lean", "lean:0.01", "lean:0.01:bf16", "oktopk", "auto:oktopk:0.01", "lean:auto:oktopk:0.01"]
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


def test_the_example_of_the_documentation_is_true() -> None:
    assert doctest.testmod(scaling) == doctest.TestResults(failed=0, attempted=5)


def test_the_command_is_the_python_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--trace", trace_file(tmp_path), "--network", "10gbe", "--world-sizes", "4,16", "--planners", "optimal"]
    found = scale(small_trace(), ["10gbe"], [4, 16], ["optimal"])
    assert json_of(capsys, "scale", *argv) == json.loads(json.dumps(asdict(found)))


def test_networks_may_be_given_in_three_ways() -> None:
    ring = Network.ring(4, 5e-5, 8e-10)
    faster, slower = Network.ring(4, 4e-5, 7e-10), Network.ring(4, 6e-5, 9e-10)
    mine = NetworkRange("mine", ring, faster, slower, "a guess", "guessed")
    found = scale(small_trace(), [ring, "25gbe", mine], [8], ["optimal"], [])
    assert [(network.name, network.source.partition(":")[0]) for network in found.networks] == [
        ("network 1", "as given"),
        ("25gbe", "measured"),
        ("mine", "a guess"),
    ]
    plain, _, banded = found.points
    assert plain.iteration_s == banded.iteration_s == plain.iteration_low_s > banded.iteration_low_s


def test_every_point_is_announced() -> None:
    seen: list[tuple[str, int, int]] = []
    found = scale(small_trace(), ["10gbe", "25gbe"], [4, 8], ["optimal"], [], on_point=lambda *told: seen.append(told))
    assert seen == [("10gbe", 1, 2), ("10gbe", 2, 2), ("25gbe", 1, 2), ("25gbe", 2, 2)]
    assert len(found.points) == 4


def test_batches_by_strategy() -> None:
    trace = replace(small_trace(), meta={"batch": 8})
    batch = {"by_bytes": 8, "optimal": 16}
    found = scale(trace, ["10gbe"], [4], list(batch), [], batch=batch, assumptions=["chosen by hand"])
    assert {strategy.name: strategy.batch for strategy in found.strategies} == batch
    assert "chosen by hand" in found.assumptions and any("in proportion" in said for said in found.assumptions)
    with pytest.raises(ValueError, match="no entry for the strategy 'single'"):
        scale(trace, ["10gbe"], [4], ["by_bytes", "single"], [], batch=batch)
    with pytest.raises(ValueError, match="the trace's meta has batch None"):
        scale(small_trace(), ["10gbe"], [4], ["by_bytes"], [], batch=8)


def test_arguments_that_make_no_sense_are_named() -> None:
    trace = small_trace()
    for sizes in ([], [0, 4], [8, 4], [4, 4]):
        with pytest.raises(ValueError, match="expected rising whole numbers from 1 on"):
            scale(trace, ["10gbe"], sizes)
    with pytest.raises(ValueError, match="networks is empty"):
        scale(trace, [], [4])
    with pytest.raises(ValueError, match="network 'lan': no such name"):
        scale(trace, ["lan"], [4])
    with pytest.raises(ValueError, match="planner is 'magic'"):
        scale(trace, ["10gbe"], [4], ["magic"])


def test_strategies_by_kind() -> None:
    kinds = strategy_kinds(["optimal"], ["oktopk", "lean:0.01", "int8"])
    assert kinds == {"optimal": "dense", "oktopk": "sparse", "lean:0.01": "lean", "int8": "quantised"}


def test_what_a_strategy_sends() -> None:
    kinds = strategy_kinds(["optimal"], [*ROUNDED, *SPARSE])
    sends = {name: Strategy(name, kind).sends for name, kind in kinds.items()}
    assert sends == {"optimal": "dense", **dict.fromkeys(ROUNDED, "quantised"), **dict.fromkeys(SPARSE, "sparse")}
