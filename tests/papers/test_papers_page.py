"""The sentences of docs/papers.md on the four papers, held against what is computed."""

from pathlib import Path

import pytest
from benchmarks.papers import asc, mgwfbp, oktopk
from benchmarks.papers.table import AGREES, Figure

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs/ is not beside the tests")


def text() -> str:
    section = PAGE.read_text(encoding="utf-8").partition("## Reproduce them")[2].partition("\n## ")[0]
    return " ".join(section.split())


def ends(figures: list[Figure]) -> tuple[float, float]:
    values = [figure.ours for figure in figures if figure.ours is not None]
    return min(values), max(values)


def test_mgwfbp() -> None:
    sixteen = mgwfbp.sixteen().figures
    gains = [figure for figure in sixteen if figure.what == "MG-WFBP over SyncEASGD"]
    agreeing = sum(figure.word == AGREES for figure in gains)
    assert f"agrees in {agreeing} of {len(gains)} cases" in text()
    shortest = min(figure.ratio for figure in sixteen if figure.unit == "s" and figure.ratio)
    assert f"up to {1 - shortest:.0%} shorter".replace("%", " %") in text()
    lost = [figure for figure in mgwfbp.reproduce().figures() if figure.what == "exact optimum over MG-WFBP"]
    assert f"up to {ends(lost)[1]:.2f} times as fast as the published rule" in text()


def test_asc() -> None:
    published, alike = asc.as_published().figures, asc.same_constants().figures
    over_each = ends([figure for figure in published if figure.what == "ASC-WFBP over WFBP"])
    over_merged = ends([figure for figure in published if figure.what == "ASC-WFBP over MG-WFBP"])
    capped = ends([figure for figure in alike if figure.what == "ASC-WFBP over MG-WFBP"])
    assert f"{over_each[0]:.2f} to {over_each[1]:.2f} times as fast as WFBP" in text()
    assert f"{over_merged[0]:.2f} to {over_merged[1]:.2f} as MG-WFBP" in text()
    assert f"{capped[0]:.2f} to {capped[1]:.2f} over MG-WFBP" in text()


def test_oktopk() -> None:
    least, most = ends([figure for figure in oktopk.throughput().figures if figure.what.startswith("over ")])
    assert f"on 256 workers {least:.2f} to {most:.1f} times the throughput" in text()
