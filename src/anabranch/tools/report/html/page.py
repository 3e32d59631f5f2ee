"""One HTML file with everything in it: words, numbers, style, script and plotly.js."""

import base64
import gzip
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from itertools import groupby
from string import Template

from anabranch.tools.report.formatting import count
from anabranch.tools.report.html.chart import Chart
from anabranch.tools.report.html.elements import (
    BulletList,
    Part,
    Section,
    Table,
    Verbatim,
    list_html,
    table_html,
    tile_html,
    verbatim_html,
)
from anabranch.tools.report.html.escaping import escaped, json_block
from anabranch.tools.report.html.sections import sections
from anabranch.tools.report.html.step_view import Predicted, step_views
from anabranch.tools.report.html.verdict import conditions, verdict
from anabranch.tools.report.runs.reading import Runs
from anabranch.values.extras import require
from anabranch.values.version import __version__

SCRIPTS = ("theme.js", "tables.js", "charts.js")
TOOLS = (("in", "+", "zoom in"), ("out", "−", "zoom out"), ("left", "←", "earlier"), ("right", "→", "later"),
         ("all", "all", "show all of it"))  # fmt: skip


def report_page(title: str, runs: Runs, predicted: Sequence[Predicted]) -> str:
    """The page. What it shows of files is text and numbers; nothing of theirs can run, and nothing is fetched.

    Scripts are allowed by their hashes alone, so that even a mistake in escaping would show a tag and not obey it.
    """
    steps = step_views(runs, predicted)
    tiles, parts = sections(runs, steps)
    figures = [part.figure for section in parts for part in section.parts if isinstance(part, Chart)]
    script = "\n".join(_asset(name) for name in SCRIPTS)
    library = _plotly() if figures else ""
    return Template(_asset("page.html")).substitute(
        title=escaped(title),
        policy=_policy(script, library),
        style=_asset("style.css"),
        subtitle=escaped(
            f"{count(len(runs.files), 'file')}, read on {datetime.now(UTC):%d %B %Y} by anabranch {__version__}"
        ),
        contents="".join(f'<li><a href="#{section.key}">{escaped(section.title)}</a></li>' for section in parts),
        verdict=_paragraph("headline", verdict(runs, steps)) + _paragraph("note", conditions(runs)),
        tiles=f"<dl class=tiles>{''.join(tile_html(tile) for tile in tiles)}</dl>" if tiles else "",
        sections="".join(_section(section) for section in parts),
        figures=json_block(figures),
        plotly=base64.b64encode(gzip.compress(library.encode(), 9, mtime=0)).decode() if library else "",
        script=script,
    )


def _paragraph(kind: str, words: str) -> str:
    return f"<p class={kind}>{escaped(words)}</p>" if words else ""


def _plotly() -> str:
    require("plotly", "report", "anabranch report")
    from plotly.offline import get_plotlyjs

    library: str = get_plotlyjs()
    return library


def _asset(name: str) -> str:
    return (resources.files("anabranch.tools.report.html") / "assets" / name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """A browser that keeps to this runs these scripts and no other, and talks to nobody."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts if text]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    rules = (
        "default-src 'none'",
        f"script-src {allowed}",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(rules)


def _section(section: Section) -> str:
    about = f"<p>{escaped(section.about)}</p>" if section.about else ""
    inner = ""
    for half_width, parts in groupby(section.parts, key=lambda part: isinstance(part, Chart) and part.half_width):
        drawn = "".join(_part(part) for part in parts)
        inner += f"<div class=pairs>{drawn}</div>" if half_width else drawn
    head = f'<h2 id="{section.key}-title">{escaped(section.title)}</h2>'
    return f'<section id="{section.key}" aria-labelledby="{section.key}-title">{head}{about}{inner}</section>'


def _part(part: Part) -> str:
    if isinstance(part, Table):
        return table_html(part)
    if isinstance(part, Verbatim):
        return verbatim_html(part)
    if isinstance(part, BulletList):
        return list_html(part)
    return _chart(part)


def _chart(chart: Chart) -> str:
    tools = "".join(
        f'<button type=button data-tool={tool} title="{words}" aria-label="{words}">{sign}</button>'
        for tool, sign, words in TOOLS
    )
    caption = f"<figcaption>{escaped(chart.caption)}</figcaption>" if chart.caption else ""
    title = f"<h3>{escaped(chart.title)}</h3>" if chart.title else ""
    return (
        f'<figure class=chart id="{chart.key}">{title}<div class=plot tabindex=0 role=application '
        f'aria-label="{escaped(chart.label)}" style="height:{chart.height}px"></div>'
        f'<div class=tools role=group aria-label="Zoom">{tools}</div>'
        f"<p class=spoken aria-live=polite></p>{caption}</figure>"
    )
