"""Docstrings with columns (a name, spaces, what it means) as lists in the API reference."""

import re
from typing import Any

import griffe

COLUMN = re.compile(r"(\w[\w, ]*?) {2,}(\S.*)")


class Columns(griffe.Extension):
    """Turns paragraphs of columns into lists, which keep a line for each name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of every object that has a docstring."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """The same text with every paragraph of columns as a list."""
    return "\n\n".join(map(_paragraph, re.split(r"\n{2,}", text)))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    columns = [COLUMN.fullmatch(line) for line in lines]
    if sum(column is not None for column in columns) < 2 or columns[0] is None:
        return text
    items: list[str] = []
    for line, column in zip(lines, columns, strict=True):
        if column is not None:
            items.append(f"* `{column[1]}`: {column[2]}")
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(items)
