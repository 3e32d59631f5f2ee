"""The parts of a page beside charts: sections, tiles, sortable tables, bullet lists, preformatted text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from anabranch.tools.report.html.chart import Chart
from anabranch.tools.report.html.escaping import escaped


class Cell(NamedTuple):
    """One cell. Sorting goes by ``value``, or by the text where it is None; ``share``, 0 to 1, is drawn as a bar."""

    text: str
    value: float | None = None
    share: float | None = None


class Tile(NamedTuple):
    """One of the numbers at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first cell is the row's name.

    The row named ``best`` is highlighted. A ``folded`` table is hidden until its title is clicked.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    best: str | None = None
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text with its line breaks, as a program printed it."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class BulletList:
    """A heading and a list of sentences."""

    title: str
    sentences: Sequence[str]


Part = Chart | Table | Verbatim | BulletList


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, an introduction, and charts, tables and text."""

    key: str
    title: str
    about: str
    parts: Sequence[Part]


def list_html(part: BulletList) -> str:
    """The heading and its list."""
    items = "".join(f"<li>{escaped(sentence)}</li>" for sentence in part.sentences)
    return f"<h3>{escaped(part.title)}</h3><ul>{items}</ul>"


def tile_html(tile: Tile) -> str:
    """A number with its name above and a note below."""
    note = f"<span>{escaped(tile.note)}</span>" if tile.note else ""
    return f"<div class=tile><dt>{escaped(tile.label)}</dt><dd>{escaped(tile.value)}{note}</dd></div>"


def table_html(table: Table) -> str:
    """A table that is sorted by a click on a column's header, where scripts run."""
    heads = "".join(
        f"<th scope=col><button type=button>{escaped(header)}<span class=arrow aria-hidden=true></span></button></th>"
        for header in table.headers
    )
    body = "".join(_row(row, row[0].text == table.best) for row in table.rows)
    caption = f"<p class=note>{escaped(table.caption)}</p>" if table.caption else ""
    inner = (
        f'<div class=scroll tabindex=0 role=region aria-label="{escaped(table.title)}"><table class=sortable>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{caption}"
    )
    return _folded(table.title, inner) if table.folded else f"<h3>{escaped(table.title)}</h3>{inner}"


def verbatim_html(part: Verbatim) -> str:
    """The lines in a folded block."""
    lines = "\n".join(escaped(line) for line in part.text.splitlines())
    return _folded(part.title, f"<pre tabindex=0>{lines}</pre>")


def _folded(title: str, inner: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>{inner}</details>"


def _row(row: Sequence[Cell], strong: bool) -> str:
    first, *rest = row
    mark = " class=strong" if strong else ""
    head = f"<th scope=row{_value(first)}>{escaped(first.text)}{' <em>best</em>' if strong else ''}</th>"
    return f"<tr{mark}>{head}{''.join(_cell(cell) for cell in rest)}</tr>"


def _cell(cell: Cell) -> str:
    kind = "" if cell.value is not None else " class=words"
    bar = f' style="--share:{100 * min(1.0, max(0.0, cell.share)):.1f}%"' if cell.share is not None else ""
    return f"<td{kind}{_value(cell)}{bar}>{escaped(cell.text)}</td>"


def _value(cell: Cell) -> str:
    return "" if cell.value is None else f" data-value={str(cell.value).replace('inf', 'Infinity')}"
