"""The measurements in the package: complete, and the same numbers as in the reports that they come from."""

from pathlib import Path

import pytest
from benchmarks.papers.measurements import Measurements, ReportCell, measurements

ROOT = Path(__file__).parents[2]


def cell_of(text: str, cell: ReportCell) -> float:
    """The number in the first Markdown table, of the cell's section if it names one, that has its row and column."""
    within = text.partition(f"\n## {cell.section}")[2].partition("\n## ")[0] if cell.section else text
    lines = [[part.strip(" *") for part in line.strip("|\n ").split("|")] for line in within.splitlines()]
    header: list[str] = []
    for line in lines:
        if cell.column in line:
            header = line
        elif header and line[0] == cell.row and len(line) == len(header):
            return float(line[header.index(cell.column)].rstrip("×%"))
    raise LookupError(f"no row {cell.row!r} with a column {cell.column!r} in section {cell.section!r}")


def test_a_cell_is_looked_for_in_its_section() -> None:
    table = "| system | ms |\n|---|---:|\n| kept | {} |\n"
    text = f"# r\n\n## 1. one\n\n{table.format(3)}\n## 2. two\n\n{table.format('**12%**')}"
    assert [cell_of(text, ReportCell(section, "kept", "ms", 0.0)) for section in ("", "1", "2")] == [3, 3, 12]
    for missing in (ReportCell("3", "kept", "ms", 0.0), ReportCell("", "lost", "ms", 0.0)):
        with pytest.raises(LookupError, match="no row"):
            cell_of(text, missing)


@pytest.mark.parametrize("report", measurements().values(), ids=list(measurements()))
def test_every_figure_and_what_it_was_measured_on_is_that_of_its_report(report: Measurements) -> None:
    text = (ROOT / report.source).read_text(encoding="utf-8")
    for name, cell in report.figures.items():
        assert cell_of(text, cell) == cell.value, name
    for fact in (report.date, report.hardware, report.network, report.versions):
        assert fact and fact in text
