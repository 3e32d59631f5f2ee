"""Files written before the source tree was rearranged stay valid, and the commands still give their numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

import anabranch as ab
from anabranch.tools.cli.main import main
from anabranch.tools.predict.scaling import Scaling
from anabranch.values.files import dumps
from tools.cli.nouns import json_of

OLD = Path(__file__).parents[1] / "data" / "before_second_edition"
BEFORE_THIRD = OLD.parent / "before_third_edition"
NOUNS = {"trace": ab.Trace, "network": ab.Network, "two_level": ab.Network, "plan": ab.Plan, "timeline": ab.Timeline}
INPUTS = ["--trace", str(OLD / "trace.json"), "--network", str(OLD / "network.json")]
SCALE = ["--network", "10gbe", "--world-sizes", "4,64", "--planners", "by_bytes,optimal", "--compress", "oktopk:0.01",
         "--compress", "lean"]  # fmt: skip


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OLD / f"{name}_command.json").read_text("utf-8"))
    return found


def near(found: Any) -> Any:
    """The same with floats that may differ in their last digits, on another machine's numpy."""
    if isinstance(found, dict):
        return {key: near(value) for key, value in found.items()}
    if isinstance(found, list):
        return [near(value) for value in found]
    return pytest.approx(found, rel=1e-9) if isinstance(found, float) else found


def fields_of(old: Any, found: Any) -> Any:
    """``found`` without the fields that documents got since ``old``."""
    if isinstance(old, dict) and isinstance(found, dict):
        return {key: fields_of(old[key], value) for key, value in found.items() if key in old}
    if isinstance(old, list) and isinstance(found, list) and len(old) == len(found):
        return [fields_of(*pair) for pair in zip(old, found, strict=True)]
    return found


@pytest.mark.parametrize("name", NOUNS)
def test_old_nouns_load_and_are_written_back_byte_by_byte(name: str) -> None:
    noun = ab.load(OLD / f"{name}.json")
    assert type(noun) is NOUNS[name]
    assert dumps(noun) == (OLD / f"{name}.json").read_text("utf-8")


@pytest.mark.parametrize("name", NOUNS)
def test_old_nouns_are_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(OLD / f"{name}.json")]) == 0
    assert capsys.readouterr().out
    content = json_of(capsys, "show", str(OLD / f"{name}.json"))["content"]
    assert content == json.loads((OLD / f"{name}.json").read_text("utf-8"))


def test_an_old_plan_has_the_fingerprint_that_was_printed_with_it() -> None:
    plan = ab.load(OLD / "plan.json")
    assert isinstance(plan, ab.Plan)
    assert plan.fingerprint == document("plan")["fingerprint"] == document("simulate")["fingerprint"]


def test_the_commands_print_the_same_fields(capsys: pytest.CaptureFixture[str]) -> None:
    planned = {**document("plan"), "written": None}
    assert fields_of(planned, json_of(capsys, "plan", *INPUTS, "--planner", "lanes")) == near(planned)
    simulated = {**document("simulate"), "plan": str(OLD / "plan.json"), "written": []}
    found = json_of(capsys, "simulate", *INPUTS, "--plan", str(OLD / "plan.json"))
    assert fields_of(simulated, found) == near(simulated)
    rows = [row for row in document("compare")["rows"] if row["name"] != "horovod"]  # which is retired
    compared = {**document("compare"), "trace": INPUTS[1], "network": INPUTS[3], "rows": rows}
    assert fields_of(compared, json_of(capsys, "compare", *INPUTS)) == near(compared)


def test_scale_prints_the_same_points(capsys: pytest.CaptureFixture[str]) -> None:
    kept = json.loads((BEFORE_THIRD / "scale_command.json").read_text("utf-8"))
    old, new = document("scale"), json_of(capsys, "scale", *INPUTS, *SCALE)
    assert new["points"] == near(kept["points"])
    assert [set(point) for point in new["points"]] == [{*point, "error"} for point in old["points"]]
    assert new.keys() == old.keys()  # its points are with jitter, which is retired
    for field in ("model", "scaling", "strategies", "seed", "fixed_share", "command", "version"):
        assert new[field] == old[field]
    assert [network["name"] for network in new["networks"]] == [network["name"] for network in old["networks"]]


def test_an_old_scaling_is_a_scaling() -> None:
    found = TypeAdapter(Scaling).validate_json((OLD / "scale_command.json").read_bytes())
    assert len(found.points) == 16 and len(found.answer) == 2


def test_a_report_is_made_of_old_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(OLD), "-o", str(page)]) == 0
    text = page.read_text("utf-8")
    for file in ("trace.json", "network.json", "plan.json", "timeline.json", "scale_command.json"):
        assert file.removesuffix(".json") in text
    assert "naive sparse" in text  # the predictions of memory
    assert "Which strategy wins where: small" in text


OWN = """
import torch
from torch import nn

def build(batch, device):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    given = torch.randn(batch, 64, device=device)
    return model, lambda wrapped: wrapped(given).square().mean()
"""


NETWORK = "ring:ranks=4,alpha=30us,rate=10gbit"
LEAN = {"lean"}
RETIRED = {"lean, host"}  # residuals in the memory of the host


def test_memory_predicts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"old_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN, "utf-8")
    asked = ["--model", f"{name}:build", "--batch-size", "4", "--within", "1GiB", "--network", NETWORK]
    old, new = document("memory"), json_of(capsys, "memory", *asked)
    assert new.keys() == old.keys() - {"samples_per_s"}  # retired
    for field in ("within_nbytes", "ranks", "density"):
        assert new[field] == near(old[field])
    for row in old["modes"].values():
        del row["host_nbytes"]  # retired
    for field in ("modes", "largest_batch"):
        for mode in old[field].keys() - LEAN - RETIRED:
            assert new[field][mode] == near(old[field][mode])
    for mode in LEAN:  # whose slots are smaller since
        assert new["modes"][mode]["predicted_nbytes"] < old["modes"][mode]["predicted_nbytes"]
        assert new["largest_batch"][mode] >= old["largest_batch"][mode]
