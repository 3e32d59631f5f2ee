"""Prints a paper's figures and what this project gets for each: ``python -m benchmarks.papers asc [--json]``."""

import argparse
from importlib import import_module
from typing import Any

from benchmarks.papers.table import WITHIN, Figure, Reproduction, Section
from rich.text import Text

from anabranch.tools.cli.output import print_json, show_tables
from anabranch.tools.report.tables import columns

PAPERS = ("mgwfbp", "asc", "oktopk", "laysa")


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.papers", description=__doc__)
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    asked = parser.parse_args(argv)
    print_paper(asked.paper, asked.json)


def print_paper(paper: str, as_json: bool) -> None:
    """Print the tables of one paper, or all of them as one JSON document."""
    if paper not in PAPERS:
        raise ValueError(f"paper is {paper!r}: expected one of {', '.join(PAPERS)}")
    # One by one: only two of them need torch.
    found: Reproduction = import_module(f"benchmarks.papers.{paper}").reproduce()
    if as_json:
        print_json({"command": "reproduce", **found.document()})
    else:
        show_tables(Text(found.paper, style="bold"), *(part for section in found.sections for part in _parts(section)))


def _parts(section: Section) -> list[Any]:
    words = ["", "figure", "word"]
    table = columns(section.title, "", "figure", section.against, "ours", "ratio", "word", left=words)
    case = ""
    for figure in section.figures:
        shown, case = ("" if figure.case == case else figure.case), figure.case
        cells = [shown, figure.what, _value(figure, figure.published), _value(figure, figure.ours)]
        ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
        table.add_row(*map(Text, [*cells, ratio, figure.word]))
    about = [
        f"{section.against.capitalize()}: {section.source}.",
        f"Ours: {section.how}.",
        *(f"* {note}." for note in section.notes),
    ]
    if any(figure.ratio is not None for figure in section.figures):
        about.append(f"Ratio: ours over {section.against}; figures agree within {WITHIN:.0%}.")
    return [table, Text("\n".join(about))]


def _value(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    digits = 1 if abs(value) >= 100 else 2 if figure.unit == "%" else 3
    return f"{value:.{digits}f}" + (figure.unit if figure.unit in ("×", "%") else "")


if __name__ == "__main__":
    main()
