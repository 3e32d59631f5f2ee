"""anabranch report: files in, a page out, and what it says when that cannot be."""

import json
from pathlib import Path

import pytest

from anabranch import planning as planners
from anabranch import save
from anabranch.tools.cli.main import main
from tools.cli.nouns import RING, error_of, json_of, measured, small_trace


def made(capsys: pytest.CaptureFixture[str], folder: Path, *names: str) -> str:
    """The page of these files of a folder."""
    output = folder / "page.html"
    assert main(["report", *(str(folder / name) for name in names), "-o", str(output), "--force"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and str(output) in out
    return output.read_text(encoding="utf-8")


def test_a_plan_is_simulated_on_its_trace_and_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, network = small_trace(), measured()
    save(trace, tmp_path / "trace.json")
    save(small_trace("other"), tmp_path / "other.json")
    save(network, tmp_path / "network.json")
    save(planners.optimal(trace, network), tmp_path / "plan.json")
    page = made(capsys, tmp_path, "other.json", "trace.json", "network.json", "plan.json")
    assert "plan.json on network.json, 8 ranks" in page and 'id="plan-0"' in page
    assert 'id="timelines"' not in page  # nothing was measured


def test_without_a_plan_ddps_buckets_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save(small_trace(), tmp_path / "trace.json")
    save(measured(), tmp_path / "network.json")
    page = made(capsys, tmp_path, "trace.json", "network.json")
    assert "default buckets, as no plan was given, on network.json" in page


def test_a_plan_alone_is_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save(planners.optimal(small_trace(), measured()), tmp_path / "plan.json")
    page = made(capsys, tmp_path, "plan.json")
    assert "give the trace and the network" in page and 'id="plan-0"' not in page and "layer.19" in page


def test_a_plan_that_the_network_cannot_price(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, network = small_trace(), measured()
    save(trace, tmp_path / "trace.json")
    save(network, tmp_path / "network.json")
    save(planners.using(planners.single(trace, network), "oktopk:0.01"), tmp_path / "plan.json")
    assert "oktopk:0.01" in made(capsys, tmp_path, "trace.json", "network.json", "plan.json")


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--planner", "lanes"],
        ["simulate", "--planner", "optimal"],
        ["compare"],
        ["scale", "--world-sizes", "4,8", "--planners", "by_bytes,optimal"],
    ],
)
def test_what_commands_print_can_be_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    save(small_trace(), tmp_path / "trace.json")
    document = json_of(capsys, *command, "--trace", str(tmp_path / "trace.json"), "--network", RING)
    (tmp_path / "document.json").write_text(json.dumps(document))
    assert "document.json" in made(capsys, tmp_path, "document.json")


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    save(small_trace(), tmp_path / "trace.json")
    said = error_of(capsys, "report", str(tmp_path / "trace.json"), "-o", str(tmp_path / "page.html"))
    assert "--force" in said and (tmp_path / "page.html").read_text() == "mine"


def test_what_is_read_is_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save(small_trace(), path)
    before = path.read_bytes()
    said = error_of(capsys, "report", str(path), "-o", str(tmp_path / "." / "trace.json"), "--force")
    assert "which is also read" in said and path.read_bytes() == before


@pytest.mark.parametrize("which", ["input", "output"])
def test_a_name_too_long_to_be_one(which: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save(small_trace(), tmp_path / "trace.json")
    long = str(tmp_path / ("x" * 300))
    argv = [long, "-o", str(tmp_path / "page.html")] if which == "input" else [str(tmp_path / "trace.json"), "-o", long]
    said = error_of(capsys, "report", *argv)
    assert "Errno" not in said and "(File name too long)" in said


def test_a_file_of_another_program(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"name": "\\u001b[2J"}')
    said = error_of(capsys, "report", str(tmp_path / "x.json"), "-o", str(tmp_path / "page.html"))
    assert "the fields ['name']" in said and "lines of ab.JsonLines" in said and not (tmp_path / "page.html").exists()


def test_what_a_folder_has_beside_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save(small_trace(), tmp_path / "trace.json")
    (tmp_path / "x.json").write_text("{}")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert "left out: " in capsys.readouterr().out
