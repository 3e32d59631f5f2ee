"""Where results go: tables or one JSON document on stdout, progress on stderr, files only where none is."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from anabranch.errors import FileError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from anabranch.report.plot import Format

Item = TypeVar("Item")

PIPED_WIDTH = 240  # a file or another program has no edge at which to fold

JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document instead of tables; names end in their unit (_s: seconds)."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite output files that are already there.")]


def show_tables(*parts: "RenderableType") -> None:
    """Print to stdout, an empty line between the parts. No text is read as markup, wherever it came from."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    for index, part in enumerate(parts):
        if index:
            console.print()
        console.print(part)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document in ASCII, so that no terminal and no locale changes what a program reads."""
    print(json.dumps(document, indent=1, allow_nan=False))


def check_free(paths: Iterable[str | os.PathLike[str] | None], force: bool) -> None:
    """Refuse, before any work is done, an output file that is already there."""
    for path in paths:
        # Not Path.exists, which fails on a name that is too long; writing will say so.
        if path is not None and not force and os.path.exists(path):  # noqa: PTH110
            raise FileError(f"{path}: is already there; choose another name, or overwrite it with --force")


def check_other(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse, even with --force, to write over what is read."""
    for path in inputs:
        try:
            same = path.samefile(output)
        except OSError:  # one of them is not there
            continue
        if same:
            raise FileError(f"-o is {output}, which is also read ({path}): choose another name, or it would be lost")


def progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items, with a bar on stderr while they come, if that is a terminal."""
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


def plot_format(plot: Path | None) -> "Format | None":
    """What kind of picture a file of this name holds."""
    if plot is None:
        return None
    if plot.suffix.lower() == ".png":
        return "png"
    if plot.suffix.lower() == ".svg":
        return "svg"
    raise ValueError(f"--plot is {plot}: expected a name that ends in .png or .svg")
