"""What ``anabranch bench --json`` printed as an SVG: for each model, steps relative to DDP's, predicted and measured.

python -m benchmarks.bench_plot bench.json ... -o steps.svg
"""

import argparse
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.tools.report.documents import BASELINE, COMPILED, COMPUTE, OURS, Benchmark, BenchmarkRow
from anabranch.tools.report.formatting import count, plain
from anabranch.tools.report.runs import read_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers differ, too, also where colours repeat.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "h")
BARS_SHARE = 0.8  # of a model's share of the height: its bars
BAR_INCHES = 0.22  # of a bar
MIB_SUFFIX = "MiB"
DRAWN_OF_DDP = ("hook", "PowerSGD rank 4", COMPILED)  # ends of their names
COLOUR_ORDER = (1, 4, 3, 0, 5, 2, 7, 6)  # in which neighbours differ; bars beyond these are hatched
HATCH = "///"
BEST_SIZE = "DDP with the best bucket size tried"


def bench_plot(benchmarks: Sequence[Benchmark]) -> bytes:
    """Horizontal bars per model; shorter is faster.

    DDP, DDP at the best bucket size if some were tried, DDP's hooks, DataParallel with every compression, and DDP
    and DataParallel compiled.
    """
    from matplotlib.figure import Figure

    bars = [_bars(benchmark) for benchmark in benchmarks]
    names = list(dict.fromkeys(name for one in bars for name in one))
    figure = Figure(
        figsize=(10, 1.4 + BAR_INCHES / BARS_SHARE * len(names) * len(benchmarks)), dpi=120, layout="constrained"
    )
    axes = figure.subplots()
    for place, benchmark in enumerate(benchmarks):
        _model(axes, place, benchmark, {name: bars[place].get(name) for name in names})
    axes.set_yticks(range(len(benchmarks)), [_label(benchmark) for benchmark in benchmarks], parse_math=False)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#888888", linewidth=0.8)
    axes.set_xlabel("time of a training step; DDP in the same round = 1, median over the rounds (shorter is faster)")
    axes.set_xlim(left=0)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    first, facts = benchmarks[0], benchmarks[0].facts
    network = facts.get("network", "as it is")
    where = ", ".join(filter(None, (f"{first.ranks} workers: {network}", facts.get("device"))))
    figure.suptitle(plain(where), fontsize=11, parse_math=False)
    return svg_of(figure)


def svg_of(figure: "Figure") -> bytes:
    """The bytes of a figure's SVG file; the same figure gives the same bytes."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "anabranch"}):
        warnings.filterwarnings("ignore", message="Glyph")  # letters that the font lacks are drawn as boxes
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def _bars(benchmark: Benchmark) -> dict[str, BenchmarkRow]:
    """The rows to draw, by their names in the legend."""
    baseline = benchmark.row(BASELINE)
    sized = [row for row in benchmark.rows if row.name.startswith(BASELINE) and MIB_SUFFIX in row.name]
    best = {BEST_SIZE: min([baseline, *sized], key=lambda row: row.ratio_to(baseline))} if sized else {}
    stock = [row for row in benchmark.rows if row.name.startswith(BASELINE) and row.name.endswith(DRAWN_OF_DDP)]
    own = {f"anabranch.{row.name}": row for row in benchmark.rows if row.name.split(", ")[0] == OURS}
    return {BASELINE: baseline, **best, **{row.name: row for row in stock}, **own}


def _model(axes: "Axes", place: int, benchmark: Benchmark, bars: Mapping[str, BenchmarkRow | None]) -> None:
    """The bars of one model, its predicted steps and its computation."""
    baseline, thick = benchmark.row(BASELINE), BARS_SHARE / len(bars)
    for number, (name, row) in enumerate(bars.items()):
        colour, height = COLOURS[COLOUR_ORDER[number % len(COLOURS)]], place + (number + 0.5) * thick - BARS_SHARE / 2
        ratio = row.ratio_to(baseline) if row is not None else 0.0
        axes.barh(height, ratio, thick * 0.9, color=colour, label=_once(axes, name), edgecolor="white", linewidth=0,
                  hatch=HATCH * (number // len(COLOURS)))  # fmt: skip
        if row is None:
            continue
        predicted_s = row.predicted_s if name.startswith("anabranch.") else None
        furthest = max(ratio, (predicted_s or 0.0) / baseline.step_s)
        axes.annotate(f"{ratio:.2f}  ({row.step_s * 1e3:.0f} ms)", (furthest, height), (6, 0),
                      textcoords="offset points", va="center", fontsize=8,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
        if predicted_s is not None:
            axes.plot(predicted_s / baseline.step_s, height, "D", color="white", markeredgecolor="black", markersize=4,
                      label=_once(axes, "predicted"))  # fmt: skip
    if compute := _row_named(benchmark, COMPUTE):
        ratio = compute.ratio_to(baseline)
        axes.plot([ratio, ratio], [place - BARS_SHARE / 2, place + BARS_SHARE / 2], color="black", linewidth=1.2,
                  label=_once(axes, "computing alone, nothing sent"))  # fmt: skip


def _once(axes: "Axes", label: str) -> str | None:
    """The label, unless the legend has it already."""
    return None if label in axes.get_legend_handles_labels()[1] else label


def _row_named(benchmark: Benchmark, name: str) -> BenchmarkRow | None:
    return next((row for row in benchmark.rows if row.name == name), None)


def _label(benchmark: Benchmark) -> str:
    """The model, and how DataParallel sent its gradients."""
    ours = benchmark.row(OURS)
    sent = f"sent in {count(ours.buckets, 'message')}" if ours.buckets else "sent as by DDP"
    return f"{plain(benchmark.model)}\n{sent}" + (f", {ours.lanes} at a time" if (ours.lanes or 1) > 1 else "")


def main() -> None:
    """Draw the benchmarks of some files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    found = [document for _, document in read_runs(options.files).benches]
    options.output.write_bytes(bench_plot([benchmark for document in found for benchmark in document.benchmarks]))


if __name__ == "__main__":
    main()
