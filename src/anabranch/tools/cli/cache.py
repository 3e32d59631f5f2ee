"""anabranch cache: the plans that earlier trainings have kept."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from anabranch.tools.cli.options import JsonOption
from anabranch.tools.cli.output import print_json, show_tables
from anabranch.tuning.plan_cache import VARIABLE, Entry, PlanCache, default_folder
from anabranch.values.errors import FileError

if TYPE_CHECKING:
    from rich.console import RenderableType

FOLDER = Argument(metavar="FOLDER", help=f"The cache. Default: ${VARIABLE}, or the user's own.", show_default=False)


def cache(
    folder: Annotated[Path | None, FOLDER] = None,
    clear: Annotated[bool, Option("--clear", help="Delete them, so that the next trainings search again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the plans that earlier trainings have kept for their next start."""
    folder = folder if folder is not None else default_folder()
    if folder is None:
        raise FileError(f"the plan cache is off ({VARIABLE} is {os.environ.get(VARIABLE)!r}): give its FOLDER")
    files = PlanCache(folder).files()
    if clear:
        for file in files:
            file.unlink(missing_ok=True)
    rows = [] if clear else [_row(file) for file in files]
    if as_json:
        print_json({"command": "cache", "folder": str(folder), "plans": rows, "deleted": len(files) if clear else 0})
    elif clear:
        print(f"{len(files)} deleted in {folder}")
    else:
        show_tables(*_tables(folder, rows))


def choice_figures(entry: Entry) -> dict[str, Any]:
    """The numbers and words that describe a cached choice, by name."""
    choice = entry.choice
    return {
        "model": entry.key.model,
        "ranks": choice.network.world_size,
        "device": choice.trace.meta.get("device"),
        "label": choice.label,
        "step_s": choice.step_s,
        "spread_s": choice.spread_s,
        "default_step_s": choice.default_step_s,
        "gain": choice.gain,
        "date": choice.date,
        "versions": list(entry.key.versions),
    }


def _row(file: Path) -> dict[str, Any]:
    """The figures of a file, or the reason why it will be ignored."""
    try:
        return {**choice_figures(Entry.read(file)), "file": str(file)}
    except (FileError, OSError) as error:
        return {"file": str(file), "ignored": str(error)}


def _tables(folder: Path, rows: list[dict[str, Any]]) -> "Iterator[RenderableType]":
    from anabranch.tools.report.formatting import factor, label, plain, time_scale
    from anabranch.tools.report.tables import columns

    known = [row for row in rows if "ignored" not in row]
    scale = time_scale([row["step_s"] for row in known])
    headers = ("model", "ranks", "device", "choice", f"step, {scale.unit}", "gain", "date", "file")
    table = columns(f"Plans in {plain(str(folder))}", *headers, left=["model", "device", "choice", "file"])
    for row in known:
        model, device, choice = (label(str(row[name])) for name in ("model", "device", "label"))
        step, gain, file = scale(row["step_s"]), factor(row["gain"]), plain(Path(row["file"]).name)
        table.add_row(model, str(row["ranks"]), device, choice, step, gain, row["date"], file)
    yield table
    if ignored := [f"Ignored: {plain(row['ignored'])}" for row in rows if "ignored" in row]:
        yield "\n".join(ignored)
