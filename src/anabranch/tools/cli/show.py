"""anabranch list, show and cache: the names that options take, what is in a file, the plans of earlier trainings."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from anabranch.tools.cli import arguments
from anabranch.tools.cli.output import print_json, show_tables
from anabranch.tools.cli.shared_options import JsonOption
from anabranch.tools.network_presets import PRESETS
from anabranch.tuning.cache_files import VARIABLE, Entry, PlanCache, default_folder
from anabranch.values.errors import FileError
from anabranch.values.files import bundled_traces, dumps, load_bundled_trace
from anabranch.values.links import TwoLevel
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.sharded import ShardedTrace, ShardingPlan
from anabranch.values.timeline import Timeline
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

FACTS = ("model", "precision", "batch", "sequence_length", "device", "date")  # of a trace's meta

FILE = Argument(
    metavar="FILE",
    help="A trace, network, plan, timeline, cached plan, sharded trace or sharding plan; also a bundled trace, or a "
    "description.",
)
FOLDER = Argument(metavar="FOLDER", help=f"The cache. Default: ${VARIABLE}, or the user's own.", show_default=False)


def list_(as_json: JsonOption = False) -> None:
    """List the names that --trace and --network take: bundled traces, and networks with the source of their costs."""
    traces = [_trace_row(name, load_bundled_trace(name)) for name in bundled_traces()]
    if as_json:
        networks: list[dict[str, Any]] = [{"name": name, **preset._asdict()} for name, preset in PRESETS.items()]
        for row in networks:
            row |= {part: asdict(row[part]) for part in ("low", "model", "high")}
        print_json({"command": "list", "traces": traces, "networks": networks})
    else:
        sources = "\n".join(f"{name} is {preset.origin}: {preset.source}." for name, preset in PRESETS.items())
        show_tables(_trace_table(traces), _network_table(), sources)


def show(file: Annotated[str, FILE], as_json: JsonOption = False) -> None:
    """Show a trace, network, plan or timeline; with --json its summary and its content."""
    found = arguments.content(file)
    summary, report = _described(found)
    if not as_json:
        show_tables(*report)
        return
    text = found.text() if isinstance(found, Entry) else dumps(found)
    print_json({"command": "show", "summary": summary, "content": json.loads(text)})


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
    rows = [] if clear else [_cache_row(file) for file in files]
    if as_json:
        print_json({"command": "cache", "folder": str(folder), "plans": rows, "deleted": len(files) if clear else 0})
    elif clear:
        print(f"{len(files)} deleted in {folder}")
    else:
        show_tables(*_cache_tables(folder, rows))


def print_saved(
    command: str, noun: Trace | Network, output: Path, as_json: bool, notes: Sequence[str], more: Mapping[str, Any]
) -> None:
    """Print what is in a noun that was written to ``output``: tables and notes, or JSON with ``more`` fields."""
    from anabranch.tools.report.formatting import plain

    summary, report = _described(noun)
    if as_json:
        print_json({"command": command, **summary, **more, "written": str(output)})
    else:
        show_tables(*report, *map(plain, notes), f"Written to {output}.")


# ------------------------------------------------------------------------------------------------------ what there is


def _trace_row(name: str, trace: Trace) -> dict[str, Any]:
    return {
        "name": name,
        **{fact: trace.meta.get(fact) for fact in FACTS},
        "parameters": sum(tensor.numel for tensor in trace.tensors),
        "gradients": len(trace),
        "nbytes": trace.nbytes,
        "forward_s": trace.forward_s,
        "backward_s": trace.backward_s,
    }


def _trace_table(rows: list[dict[str, Any]]) -> "Table":
    from anabranch.tools.report.formatting import time_scale
    from anabranch.tools.report.tables import columns

    scale = time_scale([row["forward_s"] + row["backward_s"] for row in rows])
    headers = ("trace", "precision", "M params", "gradients", "batch", f"step, {scale.unit}", "device")
    table = columns("Traces, for --trace", *headers, left=["trace", "precision", "device"])
    for row in rows:
        batch = f"{row['batch']} × {row['sequence_length']}" if row["sequence_length"] else str(row["batch"])
        precision, parameters = str(row["precision"]).partition(" ")[0], f"{row['parameters'] / 1e6:.1f}"
        step = scale(row["forward_s"] + row["backward_s"])
        table.add_row(row["name"], precision, parameters, str(row["gradients"]), batch, step, str(row["device"]))
    return table


def _network_table() -> "Table":
    from anabranch.tools.report.tables import columns

    headers = ("network", "hop, µs", "Gbit/s", "in nodes of", "hop, µs", "Gbit/s")
    table = columns("Networks, for --network: 10gbe:ranks=16 (of scale: 10gbe)", *headers, left=["network"])
    for name, preset in PRESETS.items():
        nodes = preset.model if isinstance(preset.model, TwoLevel) else None
        across = preset.model.across if isinstance(preset.model, TwoLevel) else preset.model
        links = [across, nodes.inside] if nodes else [across]
        costs = [(f"{link.alpha_s * 1e6:.1f}", f"{8e-9 / link.beta_s_per_byte:.1f}") for link in links]
        table.add_row(name, *costs[0], *([str(nodes.ranks_per_node), *costs[1]] if nodes else []))
    return table


def _cache_row(file: Path) -> dict[str, Any]:
    """The figures of a file, or the reason why it will be ignored."""
    try:
        return {**_choice_figures(Entry.read(file)), "file": str(file)}
    except (FileError, OSError) as error:
        return {"file": str(file), "ignored": str(error)}


def _cache_tables(folder: Path, rows: list[dict[str, Any]]) -> "list[RenderableType]":
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
    ignored = "\n".join(f"Ignored: {plain(row['ignored'])}" for row in rows if "ignored" in row)
    return [table, *([ignored] if ignored else [])]


# -------------------------------------------------------------------------------------------------- what is in a file


def _described(found: Any) -> "tuple[dict[str, Any], list[RenderableType]]":
    """The summary of a file's content, and the tables to print."""
    from anabranch.tools.report import figures, tables
    from anabranch.tools.report.formatting import count, seconds, size

    if isinstance(found, Entry):
        return _choice_figures(found), _cached_report(found)
    if isinstance(found, ShardedTrace):
        blocks = f"{count(len(found), 'block')}, {size(found.nbytes)} with {size(found.rest_nbytes)} in none"
        computing = f"{seconds(found.compute_s)}; of it {seconds(found.update_s)} for the update"
        pairs = [("blocks", blocks), ("computing", computing), *tables.meta_pairs(found.meta)]
        summary: dict[str, Any] = {"blocks": len(found), "nbytes": found.nbytes, "compute_s": found.compute_s}
        return summary, [tables.facts("Sharded trace", pairs)]
    if isinstance(found, ShardingPlan):
        freed = sum(unit.reshard for unit in found.units)
        summary = {"units": len(found), "blocks": len(found.names), "freed": freed, "prefetch": found.prefetch}
        return summary, [tables.facts("Sharding plan", [("units", found.described())])]
    of_kind: dict[type, tuple[Any, Any]] = {
        Trace: (figures.trace_figures, tables.trace_report),
        Network: (figures.network_figures, tables.network_report),
        Plan: (figures.plan_figures, tables.plan_report),
        Timeline: (figures.timeline_figures, tables.timeline_report),
    }
    summarise, report = of_kind[type(found)]
    return summarise(found), report(found)


def _choice_figures(entry: Entry) -> dict[str, Any]:
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


def _cached_report(entry: Entry) -> "list[RenderableType]":
    """What was chosen for which training and why, and the plan; the training's own lines are for --json."""
    from anabranch.tools.report import tables
    from anabranch.tools.report.formatting import factor, label, seconds

    choice = entry.choice
    pairs: list[tuple[str, str | Text]] = [
        ("model", label(entry.key.model)),
        ("ranks", str(choice.network.world_size)),
        ("input", label(entry.key.input.removeprefix("input "))),
        ("versions", label(", ".join(entry.key.versions))),
        ("choice", label(choice.label)),
        ("step", f"{seconds(choice.step_s)}, spread {seconds(choice.spread_s)}"),
        ("own buckets", f"{seconds(choice.default_step_s)}: the choice is {factor(choice.gain)} as fast"),
        ("date", choice.date),
    ]
    plan = tables.plan_report(choice.plan) if choice.plan is not None else []
    return [tables.facts("Cached plan, for the next start of this training", pairs), *plan]
