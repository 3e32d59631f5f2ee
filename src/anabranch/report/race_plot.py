"""The plot of a benchmark: for each model, steps relative to DDP's, predicted beside measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anabranch.extras import require
from anabranch.report.documents import BASELINE, COMPUTE, OURS, Benchmark, BenchmarkRow
from anabranch.report.formatting import count, plain
from anabranch.report.plot import COLOURS, Format, figure_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR_HEIGHT = 0.26
MIB_SUFFIX = "MiB"


def race_plot(benchmarks: Sequence[Benchmark], form: Format = "png") -> bytes:
    """Horizontal bars per model: DDP, DDP at the best bucket size that was tried, DataParallel; shorter is faster."""
    require("matplotlib", "report", "a plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.4 + 1.15 * len(benchmarks)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for place, benchmark in enumerate(benchmarks):
        _model(axes, place, benchmark, named=place == 0)
    axes.set_yticks(range(len(benchmarks)), [_label(benchmark) for benchmark in benchmarks], parse_math=False)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#888888", linewidth=0.8)
    axes.set_xlabel("time of a training step; DDP in the same round = 1, median over the rounds (shorter is faster)")
    axes.set_xlim(left=0)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    first = benchmarks[0]
    where = ", ".join(filter(None, (f"{first.ranks} workers: {first.network}", first.facts.get("device"))))
    figure.suptitle(plain(where), fontsize=11, parse_math=False)
    return figure_bytes(figure, form)


def _model(axes: "Axes", place: int, benchmark: Benchmark, named: bool) -> None:
    """The bars of one model, its predicted step and its computation; ``named`` adds them to the legend."""
    baseline, ours = benchmark.row(BASELINE), benchmark.row(OURS)
    sized = [row for row in benchmark.rows if row.name.startswith(BASELINE) and MIB_SUFFIX in row.name]
    best = min([baseline, *sized], key=lambda row: row.ratio_to(baseline))
    bars = {"DDP": baseline, "DDP with the best bucket size tried": best, "anabranch.DataParallel": ours}
    for number, (name, row) in enumerate(bars.items()):
        ratio, height = row.ratio_to(baseline), place + (number - 1) * BAR_HEIGHT
        axes.barh(height, ratio, BAR_HEIGHT * 0.9, color=COLOURS[(1, 4, 0)[number]], label=name if named else None)
        furthest = max(ratio, (row.predicted_s or 0.0) / baseline.step_s) if row is ours else ratio
        axes.annotate(f"{ratio:.2f}  ({row.step_s * 1e3:.0f} ms)", (furthest, height), (6, 0),
                      textcoords="offset points", va="center", fontsize=8,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    if ours.predicted_s is not None:
        axes.plot(ours.predicted_s / baseline.step_s, place + BAR_HEIGHT, "D", color="white", markeredgecolor="black",
                  markersize=5, label="predicted for DataParallel" if named else None)  # fmt: skip
    if compute := _row_named(benchmark, COMPUTE):
        ratio, reach = compute.ratio_to(baseline), 1.5 * BAR_HEIGHT
        axes.plot([ratio, ratio], [place - reach, place + reach], color="black", linewidth=1.2,
                  label="computing alone, nothing sent" if named else None)  # fmt: skip


def _row_named(benchmark: Benchmark, name: str) -> BenchmarkRow | None:
    return next((row for row in benchmark.rows if row.name == name), None)


def _label(benchmark: Benchmark) -> str:
    """The model, and how DataParallel sent its gradients."""
    ours = benchmark.row(OURS)
    sent = f"sent in {count(ours.buckets, 'message')}" if ours.buckets else "sent as by DDP"
    return f"{plain(benchmark.model)}\n{sent}" + (f", {ours.lanes} at a time" if (ours.lanes or 1) > 1 else "")
