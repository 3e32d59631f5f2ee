"""anabranch list: the traces that come with the package, and the networks known by name."""

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.tools.cli.output import JsonOption, print_json, show_tables
from anabranch.tools.network_presets import PRESETS
from anabranch.values.files import bundled_traces, load_bundled_trace
from anabranch.values.links import AlphaBeta, TwoLevel

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


class What(StrEnum):
    """What can be listed."""

    traces = "traces"
    networks = "networks"


WhatArgument = Annotated[What | None, typer.Argument(help="List only these. Default: both.", show_default=False)]


def list_(what: WhatArgument = None, as_json: JsonOption = False) -> None:
    """List the names that --trace and --network take: bundled traces, and networks with the source of their costs."""
    listed: dict[str, list[dict[str, Any]]] = {}
    if what is not What.networks:
        listed["traces"] = [_trace(name) for name in bundled_traces()]
    if what is not What.traces:
        listed["networks"] = [_network(name) for name in PRESETS]
    if as_json:
        print_json({"command": "list", **listed})
        return
    parts: list[RenderableType] = []
    if "traces" in listed:
        parts.append(_trace_table(listed["traces"]))
    if "networks" in listed:
        sources = "\n".join(f"{row['name']} is {row['origin']}: {row['source']}." for row in listed["networks"])
        parts += [_network_table(), sources]
    show_tables(*parts)


def _trace(name: str) -> dict[str, Any]:
    trace = load_bundled_trace(name)
    return {
        "name": name,
        "model": trace.meta.get("model"),
        "precision": trace.meta.get("precision"),
        "parameters": sum(tensor.numel for tensor in trace.tensors),
        "gradients": len(trace),
        "nbytes": trace.nbytes,
        "batch": trace.meta.get("batch"),
        "sequence_length": trace.meta.get("sequence_length"),
        "forward_s": trace.forward_s,
        "backward_s": trace.backward_s,
        "device": trace.meta.get("device"),
        "date": trace.meta.get("date"),
    }


def _network(name: str) -> dict[str, Any]:
    preset = PRESETS[name]
    return {
        "name": name,
        "origin": preset.origin,
        "source": preset.source,
        "spread": preset.spread,
        "model": asdict(preset.model),
        "low": asdict(preset.low),
        "high": asdict(preset.high),
    }


def _trace_table(rows: list[dict[str, Any]]) -> "Table":
    from anabranch.tools.report.formatting import time_scale
    from anabranch.tools.report.tables import columns

    steps_s = [row["forward_s"] + row["backward_s"] for row in rows]
    scale = time_scale(steps_s)
    headers = ("trace", "precision", "M params", "gradients", "batch", f"step, {scale.unit}", "device")
    table = columns("Traces, for --trace", *headers, left=["trace", "precision", "device"])
    for row, step_s in zip(rows, steps_s, strict=True):
        batch = f"{row['batch']} × {row['sequence_length']}" if row["sequence_length"] else str(row["batch"])
        table.add_row(
            row["name"], str(row["precision"]).partition(" ")[0], f"{row['parameters'] / 1e6:.1f}",
            str(row["gradients"]), batch, scale(step_s), str(row["device"]),
        )  # fmt: skip
    return table


def _network_table() -> "Table":
    from anabranch.tools.report.tables import columns

    headers = ("network", "hop, µs", "Gbit/s", "in nodes of", "hop, µs", "Gbit/s")
    table = columns("Networks, for --network: 10gbe:ranks=16 (of scale: 10gbe)", *headers, left=["network"])
    for name, preset in PRESETS.items():
        model = preset.model
        if isinstance(model, TwoLevel):
            table.add_row(name, *_costs(model.across), str(model.ranks_per_node), *_costs(model.inside))
        else:
            table.add_row(name, *_costs(model))
    return table


def _costs(links: AlphaBeta) -> tuple[str, str]:
    return f"{links.alpha_s * 1e6:.1f}", f"{8e-9 / links.beta_s_per_byte:.1f}"
