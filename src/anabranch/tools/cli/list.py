"""anabranch list: the traces that come with the package, and the networks known by name."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from anabranch.tools.cli.options import JsonOption
from anabranch.tools.cli.output import print_json, show_tables
from anabranch.tools.network_presets import PRESETS, Preset
from anabranch.values.files import bundled_traces, load_bundled_trace
from anabranch.values.links import TwoLevel
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table

FACTS = ("model", "precision", "batch", "sequence_length", "device", "date")  # of a trace's meta


def list_(as_json: JsonOption = False) -> None:
    """List the names that --trace and --network take: bundled traces, and networks with the source of their costs."""
    traces = [_trace_row(name, load_bundled_trace(name)) for name in bundled_traces()]
    if as_json:
        networks = [_network_row(name, preset) for name, preset in PRESETS.items()]
        print_json({"command": "list", "traces": traces, "networks": networks})
    else:
        sources = "\n".join(f"{name} is {preset.origin}: {preset.source}." for name, preset in PRESETS.items())
        show_tables(_trace_table(traces), _network_table(), sources)


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


def _network_row(name: str, preset: Preset) -> dict[str, Any]:
    fields = preset._asdict()
    return {"name": name, **fields, **{part: asdict(fields[part]) for part in ("low", "model", "high")}}


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
