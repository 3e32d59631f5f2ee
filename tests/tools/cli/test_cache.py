"""anabranch cache: the cached plans of a folder, and what show says of one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch.tools.cli import arguments
from anabranch.tools.cli.main import main
from anabranch.tuning.cache_files import CachedChoice, CacheKey, Entry, PlanCache
from tools.cli.nouns import HOSTILE, error_of, json_of, measured, small_trace

TRACE = replace(small_trace(), meta={"device": "NVIDIA H200"})
CHOICE = CachedChoice(
    label="optimal, refined",
    step_s=0.1,
    spread_s=0.01,
    default_step_s=0.15,
    date="2026-11-16",
    plan=ab.plan(TRACE, measured(), "optimal"),
    network=measured(),
    trace=TRACE,
)
KEY = CacheKey("ResNet", "input 8x3x224x224 float32", ("layer.0 (3, 4)",), ("torch 2.13.0",))


def filled(folder: Path, key: CacheKey = KEY, choice: CachedChoice = CHOICE) -> Path:
    PlanCache(folder).write(key, choice)
    return folder / key.file_name


def test_the_plans_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = filled(tmp_path)
    own = filled(tmp_path, replace(KEY, model="Own"), replace(CHOICE, plan=None, label="DDP's own buckets"))
    own.with_name("Broken-0123456789abcdef.json").write_text("{")
    assert main(["cache", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for word in ("ResNet", "NVIDIA H200", "optimal, refined", "1.50×", "2026-11-16", path.name, "DDP's own buckets"):
        assert word in out
    assert "Ignored: " in out and "is not valid JSON" in " ".join(out.split())
    document = json_of(capsys, "cache", str(tmp_path))
    broken, first, second = document["plans"]
    assert set(broken) == {"file", "ignored"} and second["label"] == "optimal, refined" == CHOICE.label
    assert (first["model"], first["ranks"], second["gain"]) == ("Own", 8, CHOICE.gain)
    assert (document["folder"], second["file"], document["deleted"]) == (str(tmp_path), str(path), 0)


def test_the_default_folder_is_that_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the plan cache is off (ANABRANCH_CACHE is 'off')" in error_of(capsys, "cache")
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "nowhere"))
    assert json_of(capsys, "cache")["plans"] == []
    filled(tmp_path / "nowhere")
    assert len(json_of(capsys, "cache")["plans"]) == 1


def test_clear_deletes_cached_plans_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = filled(tmp_path)
    path.with_name("Broken-0123456789abcdef.json").write_text("{")
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / "Net-0123456789abcdef.json").mkdir()
    assert json_of(capsys, "cache", str(tmp_path), "--clear")["deleted"] == 2
    assert sorted(left.name for left in tmp_path.iterdir()) == ["Net-0123456789abcdef.json", "notes.json"]
    assert main(["cache", str(tmp_path), "--clear"]) == 0
    assert capsys.readouterr().out == f"0 deleted in {tmp_path}\n"


@pytest.mark.parametrize("plan", [CHOICE.plan, None], ids=["a plan", "own buckets"])
def test_show_says_what_a_cached_plan_is(
    plan: ab.Plan | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = filled(tmp_path, choice=replace(CHOICE, plan=plan))
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    for word in ("Cached plan", "ResNet", "8x3x224x224 float32", "torch 2.13.0", "100.0 ms", "1.50× as fast"):
        assert word in out
    assert plan is None or plan.fingerprint in out
    document = json_of(capsys, "show", str(path))
    assert document["content"] == json.loads(path.read_text()) and document["summary"]["gain"] == CHOICE.gain


def test_a_cached_plan_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parse, parsed = filled(tmp_path), json.loads, []

    def counting(text: str, **options: Any) -> Any:
        parsed.append(text)
        return parse(text, **options)

    monkeypatch.setattr(json, "loads", counting)
    assert arguments.content(str(path)) == Entry(KEY, CHOICE)
    assert parsed == [path.read_text()]


def test_show_knows_a_cached_plan_however_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = filled(tmp_path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(document.items()))))
    assert json_of(capsys, "show", str(path))["content"] == document


def test_show_of_a_broken_one_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes()[:500])
    assert f"{path}: is not valid JSON" in error_of(capsys, "show", str(path))


def test_hostile_text_is_spelled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = replace(TRACE, meta={"device": HOSTILE})
    key = CacheKey(HOSTILE, f"input {HOSTILE}", (), (HOSTILE,))
    path = filled(tmp_path, key, replace(CHOICE, trace=trace))
    for argv in (["cache", str(tmp_path)], ["show", str(path)]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert "[red]\\x1b[2" in out and not set("\x1b\x07\u202e") & set(out)


def test_an_entry_is_what_the_file_says(tmp_path: Path) -> None:
    assert Entry.read(filled(tmp_path)) == Entry(KEY, CHOICE)
