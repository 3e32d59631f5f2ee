"""anabranch list: the traces that come with the package, and the networks known by name."""

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from anabranch.tools.cli.options import JsonOption
from anabranch.tools.cli.output import print_json, show_tables
from anabranch.tools.network_presets import PRESETS, Preset
from anabranch.values.files import bundled_traces, load_bundled_trace
from anabranch.values.links import TwoLevel
from anabranch.values.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table

FACTS = ("model", "precision", "batch", "sequence_length", "device", "date")  # of a trace's meta


class What(StrEnum):
    """What can be listed."""

    traces = "traces"
    networks = "networks"


def list_(
    what: Annotated[What | None, Argument(help="List only these. Default: both.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """List the names that --trace and --network take: bundled traces, and networks with the source of their costs."""
    traces = {name: load_bundled_trace(name) for name in bundled_traces()} if what is not What.networks else {}
    networks = PRESETS if what is not What.traces else {}
    if as_json:
        rows = {
            "traces": [_trace_row(name, trace) for name, trace in traces.items()],
            "networks": [_network_row(name, preset) for name, preset in networks.items()],
        }
        print_json({"command": "list", **{kind: found for kind, found in rows.items() if what in (None, kind)}})
        return
    sources = "\n".join(f"{name} is {preset.origin}: {preset.source}." for name, preset in networks.items())
    tables = [_trace_table(traces)] if what is not What.networks else []
    show_tables(*tables, *((_network_table(), sources) if networks else ()))


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


def _trace_table(traces: dict[str, Trace]) -> "Table":
    from anabranch.tools.report.formatting import time_scale
    from anabranch.tools.report.tables import columns

    scale = time_scale([trace.forward_s + trace.backward_s for trace in traces.values()])
    headers = ("trace", "precision", "M params", "gradients", "batch", f"step, {scale.unit}", "device")
    table = columns("Traces, for --trace", *headers, left=["trace", "precision", "device"])
    for name, trace in traces.items():
        row = _trace_row(name, trace)
        batch = f"{row['batch']} × {row['sequence_length']}" if row["sequence_length"] else str(row["batch"])
        table.add_row(
            name, str(row["precision"]).partition(" ")[0], f"{row['parameters'] / 1e6:.1f}", str(len(trace)), batch,
            scale(trace.forward_s + trace.backward_s), str(row["device"]),
        )  # fmt: skip
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
