"""Figures out of the committed reports, where the source of the project is at hand."""

from pathlib import Path

from anabranch.errors import FileError

OKTOPK_REPORT = "benchmarks/sparse_h200_lab_10gbit_2026-11-15.md"
LEAN_REPORT = "benchmarks/lean_h200_2026-11-15.md"
ROOT = Path(__file__).parents[3]


def cell(report: str, row: str, column: str, section: str = "", root: Path = ROOT) -> float | None:
    """A number in the first table of a section (of the whole report, if none is given) that has both.

    None where the report is not here: an installed package has none.
    """
    path = root / report
    if not path.is_file():
        return None
    text = path.read_text("utf-8")
    within = text.partition(f"\n## {section}")[2].partition("\n## ")[0] if section else text
    lines = [[cell.strip(" *") for cell in line.strip("|\n ").split("|")] for line in within.splitlines()]
    header: list[str] = []
    for line in lines:
        if column in line:
            header = line
        elif header and line[0] == row and len(line) == len(header):
            return float(line[header.index(column)].rstrip("×%"))
    raise FileError(f"{path}: has no row {row!r} with a column {column!r}: expected the report as committed")
