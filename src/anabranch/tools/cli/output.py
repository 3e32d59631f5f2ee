"""Output of all commands: tables or one JSON document on stdout, progress on stderr, files that are not overwritten."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from anabranch.values.errors import FileError
from anabranch.values.extras import require
from anabranch.values.files import write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from anabranch.tools.report.documents import Document

Item = TypeVar("Item")

PIPED_WIDTH = 240  # of tables in a file or a pipe, which have no edge
PROSE_WIDTH = 100  # of sentences there

JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document instead of tables; names end in their unit (_s: seconds)."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite output files that are already there.")]


def show_tables(*parts: "RenderableType") -> None:
    """Print to stdout, an empty line between the parts. No text is read as markup, wherever it came from.

    In a pipe or a file tables may be ``PIPED_WIDTH`` wide, but sentences are wrapped at ``PROSE_WIDTH``.
    """
    from rich.console import Console

    piped = not sys.stdout.isatty()
    console = Console(width=PIPED_WIDTH if piped else None, markup=False, emoji=False, highlight=False)
    for index, part in enumerate(parts):
        if index:
            console.print()
        for piece in _flat(part):
            console.print(piece, width=PROSE_WIDTH if piped and _is_prose(piece) else None)


def _flat(part: "RenderableType") -> "Iterator[RenderableType]":
    """The members of a rich Group, of groups in it too; anything else as it is."""
    from rich.console import Group

    if isinstance(part, Group):
        for member in part.renderables:
            yield from _flat(member)
    else:
        yield part


def _is_prose(part: "RenderableType") -> bool:
    from rich.text import Text

    return isinstance(part, str | Text)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document in ASCII, so that no terminal and no locale changes what a program reads."""
    print(json.dumps(document, indent=1, allow_nan=False))


def check_free(paths: Iterable[str | os.PathLike[str] | None], force: bool) -> None:
    """Refuse an output file that exists, before any work is done."""
    for path in paths:
        # Not Path.exists, which fails on a name that is too long; writing will say so.
        if path is not None and not force and os.path.exists(path):  # noqa: PTH110
            raise FileError(f"{path}: is already there; choose another name, or overwrite it with --force")


def check_other(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to overwrite an input file, even with --force."""
    for path in inputs:
        try:
            same = path.samefile(output)
        except OSError:  # one of them is not there
            continue
        if same:
            raise FileError(f"-o is {output}, which is also read ({path}): choose another name, or it would be lost")


def progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items, with a progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(items, total=total, description=what)


@contextmanager
def progress_bar() -> "Iterator[Callable[[str, int, int], None] | None]":
    """A function to call with (what, done, total), which draws a bar on stderr; None where that is no terminal.

    Each new ``what`` gets a bar of its own. All are gone at the end.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield update


def check_plot(plot: Path | None) -> None:
    """Refuse, before any work is done, a plot that would not be a page."""
    if plot is not None:
        require("plotly", "report", "--plot")
        if plot.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--plot is {plot}: a plot is an HTML page, expected a name that ends in .html")


def write_plot(document: "Document", plot: Path, force: bool) -> None:
    """Write the page of what a command prints with --json."""
    from anabranch.tools.report.page import report_page
    from anabranch.tools.report.runs import Runs

    runs = Runs()
    runs.add(f"anabranch {document.command} --json", document)
    write_text(report_page(f"anabranch {document.command}", runs), plot, force)
