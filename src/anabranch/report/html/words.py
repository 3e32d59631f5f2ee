"""Text from files in a page: shown as it is, never obeyed."""

import html
import json
from collections.abc import Sequence
from typing import Any

from anabranch.report.formatting import plain

MAX_LETTERS = 64  # of a name in a chart, where there is no room to wrap
HOVER_NAMES = 14  # that fit on a phone


def shown(text: str) -> str:
    """``text`` as the content of an HTML element or attribute."""
    return html.escape(plain(text), quote=True)


def drawn(text: str, longest: int = MAX_LETTERS) -> str:
    """``text`` as plotly is to draw it: plotly obeys a few tags and reads entities, so both are spelled out."""
    return html.escape(shortened(plain(text), longest), quote=False)


def shortened(text: str, longest: int) -> str:
    """The ends of a long name: its middle tells least."""
    return text if len(text) <= longest else text[: longest // 2] + "…" + text[1 - longest // 2 :]


def hover(*lines: str) -> str:
    """Lines that are already safe, one under the other."""
    return "<br>".join(line for line in lines if line)


def name_lines(names: Sequence[str]) -> list[str]:
    """The first gradients of a bucket, as plotly is to draw them, and how many there are beside."""
    lines = [drawn(name, 48) for name in names[:HOVER_NAMES]]
    more = len(names) - HOVER_NAMES
    return [*lines, f"… and {more:,} more"] if more > 0 else lines


def data_block(value: Any) -> str:
    """JSON inside a ``<script type="application/json">``: no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
