"""anabranch reproduce: a paper's tables in a clone, and one line elsewhere."""

from pathlib import Path

import pytest
from benchmarks.papers import asc, mgwfbp
from benchmarks.papers.__main__ import PAPERS, _value
from benchmarks.papers.table import Figure

from anabranch.tools.cli import reproduce
from anabranch.tools.cli.main import main
from tools.cli.nouns import error_of, json_of


def test_json_is_what_the_library_says(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(capsys, "reproduce", "asc")
    assert document["command"] == "reproduce" and document["paper"] == asc.PAPER
    rows = [row for section in document["sections"] for row in section["figures"]]
    expected = list(asc.reproduce().figures())
    assert [(row["case"], row["what"], row["ours"]) for row in rows] == [(f.case, f.what, f.ours) for f in expected]
    assert all(row["how"] and row["word"] for row in rows)


def test_every_figure_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "mgwfbp"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(mgwfbp.PAPER) and "\x1b" not in out
    shown = [line for line in out.splitlines() if " MG-WFBP over WFBP " in line]
    assert len(shown) == 16 + 6 + 10
    assert "1.706×" in out  # the headline
    for heading in ("Ours: simulated: ", "figures agree within 10%"):
        assert out.count(heading) == 3
    assert out.count("Published: ") == 2 and out.count("Rerun: ") == 1  # whose points nobody could read in a paper


def test_a_published_percentage_keeps_its_digits() -> None:
    assert _value(Figure("", "", "%", 12.25, None, ""), 12.25) == "12.25%"
    assert _value(Figure("", "", "%", 150.0, None, ""), 150.0) == "150.0%"
    assert _value(Figure("", "", "s", 0.5243, None, ""), 0.5243) == "0.524"


def test_the_others_print_too(capsys: pytest.CaptureFixture[str]) -> None:
    for paper in set(PAPERS) - {"asc", "mgwfbp"}:
        assert main(["reproduce", paper]) == 0
        assert "Published: " in capsys.readouterr().out


def test_an_unknown_paper_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, "reproduce", "horovod")
    assert "'horovod'" in message and "mgwfbp" in message


def test_without_a_clone_it_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "find_spec", lambda name: None)
    assert "in a clone run: python -m benchmarks.papers asc" in error_of(capsys, "reproduce", "asc")
