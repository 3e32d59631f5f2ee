"""Figures out of the committed reports, where the source of the project is at hand."""

from pathlib import Path

from anabranch.errors import FileError

OKTOPK_REPORT = "benchmarks/sparse_h200_lab_10gbit_2026-11-15.md"
COLUMN = "over DDP"
ROOT = Path(__file__).parents[3]


def speedup_over_ddp(model: str, root: Path = ROOT) -> float | None:
    """Of the sparse step, from the report's first table; None where the report is not here."""
    path = root / OKTOPK_REPORT
    if not path.is_file():
        return None
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in path.read_text("utf-8").splitlines()]
    header = next((row for row in rows if COLUMN in row), [])
    found = next((row for row in rows if row[0] == model and len(row) == len(header)), None)
    if found is None:
        raise FileError(f"{path}: has no row {model!r} with a column {COLUMN!r}: expected the report as committed")
    return float(found[header.index(COLUMN)].rstrip("×"))
