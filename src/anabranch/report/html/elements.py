"""The parts of a page beside charts: tiles, tables that can be sorted, text as it was written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from anabranch.report.html.words import shown


class Cell(NamedTuple):
    """``value`` is what sorting goes by (text itself where there is none), ``share`` of one fills a bar behind it."""

    text: str
    value: float | None = None
    share: float | None = None


class Tile(NamedTuple):
    """One number worth reading first."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first column has the row's name. A row whose name is in ``strong`` stands out."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    strong: str | None = None
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Words as someone's program printed them."""

    title: str
    words: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, or a heading, and sentences under it."""

    title: str
    sentences: Sequence[str]


def answer_html(answer: Answer) -> str:
    """A short list."""
    items = "".join(f"<li>{shown(sentence)}</li>" for sentence in answer.sentences)
    return f"<h3>{shown(answer.title)}</h3><ul>{items}</ul>"


def tile_html(tile: Tile) -> str:
    """A number with its name above and a word below."""
    note = f"<span>{shown(tile.note)}</span>" if tile.note else ""
    return f"<div class=tile><dt>{shown(tile.label)}</dt><dd>{shown(tile.value)}{note}</dd></div>"


def table_html(table: Table) -> str:
    """Buttons in the header sort it; without script it is a table."""
    heads = "".join(
        f"<th scope=col><button type=button>{shown(header)}<span class=arrow aria-hidden=true></span></button></th>"
        for header in table.headers
    )
    body = "".join(_row(row, row[0].text == table.strong) for row in table.rows)
    caption = f"<p class=note>{shown(table.caption)}</p>" if table.caption else ""
    inner = (
        f'<div class=scroll tabindex=0 role=region aria-label="{shown(table.title)}"><table class=sortable>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{caption}"
    )
    return _folded(table.title, inner) if table.folded else f"<h3>{shown(table.title)}</h3>{inner}"


def text_html(text: Text) -> str:
    """Lines as they are, folded away."""
    lines = "\n".join(shown(line) for line in text.words.splitlines())
    return _folded(text.title, f"<pre tabindex=0>{lines}</pre>")


def _folded(title: str, inner: str) -> str:
    return f"<details><summary>{shown(title)}</summary>{inner}</details>"


def _row(row: Sequence[Cell], strong: bool) -> str:
    first, *rest = row
    mark = " class=strong" if strong else ""
    head = f"<th scope=row{_value(first)}>{shown(first.text)}{' <em>best</em>' if strong else ''}</th>"
    return f"<tr{mark}>{head}{''.join(_cell(cell) for cell in rest)}</tr>"


def _cell(cell: Cell) -> str:
    kind = "" if cell.value is not None else " class=words"
    bar = f' style="--share:{100 * min(1.0, max(0.0, cell.share)):.1f}%"' if cell.share is not None else ""
    return f"<td{kind}{_value(cell)}{bar}>{shown(cell.text)}</td>"


def _value(cell: Cell) -> str:
    return "" if cell.value is None else f" data-value={str(cell.value).replace('inf', 'Infinity')}"
