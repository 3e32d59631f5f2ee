"""anabranch reproduce: a paper's tables with what this project gets beside every figure."""

from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.tools.cli.output import JsonOption, print_json, show_tables

if TYPE_CHECKING:
    from benchmarks.papers.table import Figure, Reproduction, Section


class Paper(StrEnum):
    """Whose tables there are."""

    mgwfbp = "mgwfbp"
    asc = "asc"
    oktopk = "oktopk"
    laysa = "laysa"


PaperArgument = Annotated[Paper, typer.Argument(help="Whose tables.", show_default=False)]


def reproduce(paper: PaperArgument, as_json: JsonOption = False) -> None:
    """Print a paper's figures beside what this project gets: how, the ratio, and a word where and why they differ."""
    # One by one: only two of them need torch.
    found: Reproduction = import_module(f"benchmarks.papers.{paper.value}").reproduce()
    if as_json:
        print_json({"command": "reproduce", **found.document()})
    else:
        from rich.text import Text

        show_tables(Text(found.paper, style="bold"), *(part for section in found.sections for part in _parts(section)))


def _parts(section: "Section") -> list[Any]:
    from benchmarks.papers.table import WITHIN
    from rich.text import Text

    from anabranch.tools.report.tables import columns

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


def _value(figure: "Figure", value: float | None) -> str:
    if value is None:
        return "-"
    digits = 1 if abs(value) >= 100 else 2 if figure.unit == "%" else 3
    return f"{value:.{digits}f}" + (figure.unit if figure.unit in ("×", "%") else "")
