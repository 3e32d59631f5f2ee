"""Output of all commands: tables or one JSON document on stdout, progress on stderr, files that are not overwritten."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.values.errors import FileError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from anabranch.tools.report.documents import Document

PIPED_WIDTH = 240  # of tables in a file or a pipe, which have no edge
PROSE_WIDTH = 100  # of sentences there


def show_tables(*parts: "RenderableType") -> None:
    """Print to stdout, with an empty line between the parts. No text is read as markup, wherever it came from.

    In a pipe or a file tables may be ``PIPED_WIDTH`` wide, but sentences are wrapped at ``PROSE_WIDTH``.
    """
    from rich.console import Console
    from rich.text import Text

    piped = not sys.stdout.isatty()
    console = Console(width=PIPED_WIDTH if piped else None, markup=False, emoji=False, highlight=False)
    for index, part in enumerate(parts):
        if index:
            console.print()
        console.print(part, width=PROSE_WIDTH if piped and isinstance(part, str | Text) else None)


def print_document(document: "Document", as_json: bool, tables: "Callable[[], Iterable[RenderableType]]") -> None:
    """Print what a command has found: one JSON document, or tables."""
    from anabranch.tools.report.documents import printed

    if as_json:
        print_json(printed(document))
    else:
        show_tables(*tables())


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document in ASCII, so that no terminal and no locale changes what a program reads."""
    print(json.dumps(document, indent=1, allow_nan=False))


def say(words: str) -> None:
    """Print a line of progress to stderr, since stdout may be read by a program."""
    from anabranch.tools.report.formatting import plain

    print(plain(words), file=sys.stderr, flush=True)


def check_free(paths: Iterable[str | os.PathLike[str] | None], force: bool) -> None:
    """Refuse an output file that exists, before any work is done."""
    for path in paths:
        # Not Path.exists, which fails on a name that is too long; writing will say so.
        if path is not None and not force and os.path.exists(path):  # noqa: PTH110
            raise FileError(f"{path}: is already there; choose another name, or overwrite it with --force")


def check_other(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to overwrite an input file, even with --force."""
    for path in inputs:
        with suppress(OSError):  # one of them is not there
            if path.samefile(output):
                raise FileError(
                    f"-o is {output}, which is also read ({path}): choose another name, or it would be lost"
                )


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with (what, done, total), which draws a bar for each ``what`` on stderr if it is a terminal.

    All bars are gone at the end.
    """
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield update
