"""Docstrings with columns (a name, spaces, what it means) keep their columns in the API reference."""

import re
from typing import Any

import griffe

COLUMN = re.compile(r"^[\w, ]*\w {2,}\S", re.MULTILINE)
AS_CODE = ("```text\n", "\n```")


class Columns(griffe.Extension):
    """Turns paragraphs of columns into text blocks, which keep their spaces."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of every object that has a docstring."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = aligned(obj.docstring.value)


def aligned(text: str) -> str:
    """The same with every paragraph of columns as a text block."""
    paragraphs = re.split(r"\n{2,}", text)
    return "\n\n".join(p.join(AS_CODE) if len(COLUMN.findall(p)) > 1 else p for p in paragraphs)
