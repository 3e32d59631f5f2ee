"""Text from files, escaped for HTML, for plotly and for JSON inside a script element."""

import html
import json
from collections.abc import Sequence
from typing import Any

from anabranch.tools.report.formatting import plain

MAX_LETTERS = 64  # of a name in a chart, where there is no room to wrap
HOVER_NAMES = 14  # that fit on a phone


def escaped(text: str) -> str:
    """``text`` for the content of an HTML element or for an attribute; control characters are spelled out."""
    return html.escape(plain(text), quote=True)


def plotly_text(text: str, longest: int = MAX_LETTERS) -> str:
    """``text`` for a plotly label: plotly interprets some HTML tags and entities, so both are escaped."""
    return html.escape(shortened(plain(text), longest), quote=False)


def shortened(text: str, longest: int) -> str:
    """A long text without its middle, which tells least of a parameter's name."""
    return text if len(text) <= longest else text[: longest // 2] + "…" + text[1 - longest // 2 :]


def hover_text(*lines: str) -> str:
    """Lines that are already escaped, one under the other, for a hover box."""
    return "<br>".join(line for line in lines if line)


def name_lines(names: Sequence[str]) -> list[str]:
    """The names of a bucket's first gradients for a hover box, and how many more there are."""
    lines = [plotly_text(name, 48) for name in names[:HOVER_NAMES]]
    more = len(names) - HOVER_NAMES
    return [*lines, f"… and {more:,} more"] if more > 0 else lines


def json_block(value: Any) -> str:
    """JSON for a ``<script type="application/json">`` element: no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
