"""A benchmark as a table, a chart and Markdown, and as the closing lines that scripts for Horovod's benchmark read."""

from collections.abc import Sequence
from statistics import fmean, stdev

from rich.console import RenderableType
from rich.text import Text

from anabranch.tools.report.chart import Chart, bar_chart, bar_style, bars, hover_text, plotly_text, series
from anabranch.tools.report.documents import COMPUTE, OURS, Benchmark
from anabranch.tools.report.formatting import count, percent, plain, seconds, time_scale
from anabranch.tools.report.tables import Cell, Table, facts, number, terminal


def benchmark_table(found: Benchmark) -> Table:
    """Every contestant; the best is the fastest that trains on all ranks."""
    scale = time_scale(row.step_s for row in found.rows)
    slowest = max(row.step_s for row in found.rows)
    counted = any(row.card_nbytes is not None for row in found.rows)
    compiled = any(row.compile_s for row in found.rows)
    headers = [
        "contestant", "buckets", "lanes", f"step\n{scale.unit}", "from\n– to", "step\n/ DDP", "step\n/ bound",
        f"predicted\n{scale.unit}", "error", *(["card\nMB", "card\n/ DDP"] if counted else []),
        *(["compiled\ns"] if compiled else []),
    ]  # fmt: skip
    rows = []
    for row in found.rows:
        cells = [
            Cell(row.name), number(row.buckets), number(row.lanes), number(row.step_s, scale, slowest),
            Cell(f"{scale(min(row.turns_s))} – {scale(max(row.turns_s))}", max(row.turns_s)),
            number(found.ratio_to_ddp(row), "{:.3f}".format),
            number(row.step_s / found.bound_s if found.bound_s else None, "{:.2f}".format),
            number(row.predicted_s, scale), number(row.prediction_error, "{:+.1%}".format),
        ]  # fmt: skip
        if counted:
            cells.append(number(row.card_nbytes, lambda nbytes: f"{nbytes / 1e6:.2f}"))
            cells.append(number(found.card_to_ddp(row), "{:.3f}".format))
        if compiled:
            times = " + ".join(f"{step_s:.1f}" for step_s in row.compile_s)
            cells.append(Cell(times or "–", sum(row.compile_s)))
        rows.append(cells)
    title = f"{plain(found.model)}, {_ranks(found)}, {found.batch} {found.unit} each"
    fastest = min((row for row in found.rows if not row.name.startswith(COMPUTE)), key=lambda row: row.step_s)
    return Table(title, headers, rows, _legend(found, counted, compiled), fastest.name)


def benchmark_report(found: Benchmark) -> list[RenderableType]:
    """The table for a terminal, with the conditions of the measurement above it."""
    about = facts("Measured on", [(name, plain(value)) for name, value in found.facts.items()])
    return [about, terminal(benchmark_table(found)), *(Text(plain(f"Left out: {reason}")) for reason in found.skipped)]


def benchmark_chart(key: str, label: str, found: Benchmark, caption: str = "") -> Chart:
    """A bar per contestant: computing alone, and what its step takes on top of it; a diamond where it was predicted."""
    alone_s = next((row.step_s for row in found.rows if row.name == COMPUTE), 0.0)
    rows = [row for row in found.rows if row.name != COMPUTE]
    scale = time_scale(row.step_s for row in rows)
    unit, places = scale.per_second, range(len(rows))
    computing = [min(row.step_s, alone_s) for row in rows]
    rest = [row.step_s - own_s for row, own_s in zip(rows, computing, strict=True)]
    hovers = [
        hover_text(f"<b>{plotly_text(row.name)}</b>: step {seconds(row.step_s)}",
                   f"computing alone {seconds(own_s)}, the rest {seconds(rest_s)} ({percent(rest_s / row.step_s)})",
                   f"predicted {seconds(row.predicted_s)}" if row.predicted_s is not None else "")
        for row, own_s, rest_s in zip(rows, computing, rest, strict=True)
    ]  # fmt: skip
    name, style = ("exposed", bar_style("--exposed", "/")) if alone_s else ("step", bar_style("--wire", ""))
    parts = [bars(name, [at_s * unit for at_s in rest], places, hovers, style)]
    if alone_s:
        lengths = [at_s * unit for at_s in computing]
        parts.insert(0, bars("computing", lengths, places, hovers, bar_style("--compute", "")))
    known = {at: row.predicted_s for at, row in enumerate(rows) if row.predicted_s is not None}
    hovers = [f"predicted {seconds(at_s)}" for at_s in known.values()]
    marks = series("predicted", [at_s * unit for at_s in known.values()], list(known), hovers) if known else None
    return bar_chart((key, label, caption), f"{scale.unit} a step", [row.name for row in rows], parts, marks)


def closing_lines(found: Benchmark) -> list[str]:
    """The last lines of Horovod's synthetic benchmark, in its format."""
    rates = [found.batch / turn_s for turn_s in found.row(OURS).turns_s]
    mean, spread = fmean(rates), 1.96 * stdev(rates) if len(rates) > 1 else 0.0
    kind = "CPU" if found.facts.get("device", "").startswith("CPU") else "GPU"
    total = f"{mean * found.ranks:.1f} +-{spread * found.ranks:.1f}"
    return [
        f"{OURS}:",
        f"{found.unit.capitalize()}/sec per {kind}: {mean:.1f} +-{spread:.1f}",
        f"Total {found.unit}/sec on {found.ranks} {kind}(s): {total}",
    ]


def markdown(title: str, benchmarks: Sequence[Benchmark]) -> str:
    """A report for benchmarks/: the conditions, a table per model, and the output of ``explain()``."""
    lines = [f"# {title}", "", *(f"* {name}: {value}" for name, value in benchmarks[0].facts.items())]
    for found in benchmarks:
        table = benchmark_table(found)
        headers = [header.replace("\n", " ") for header in table.headers]
        lines += ["", f"## {table.title}", "", _line(headers), "|---" + "|---:" * (len(headers) - 1) + "|"]
        for row in table.rows:
            mark = "**" if row[0].text == OURS else ""
            lines.append(_line([f"{mark}{cell.text}{mark}" for cell in row]))
        lines += ["", table.caption, "", *(f"Left out: {reason}\n" for reason in found.skipped), *closing_lines(found)]
        lines += ["", "```", found.explanation, "```"]
    return "\n".join(lines) + "\n"


def _ranks(found: Benchmark) -> str:
    """Such as "4 ranks", or "2 hosts × 4 ranks" where hosts have several."""
    if found.ranks_per_host == 1:
        return f"{found.ranks} ranks"
    return f"{count(found.ranks // found.ranks_per_host, 'host')} × {found.ranks_per_host} ranks"


def _legend(found: Benchmark, counted: bool, compiled: bool) -> str:
    words = (
        "Medians over the turns, and their range: differences within the ranges mean nothing. step / DDP: median over "
        f"the rounds of the ratio to DDP's default in the same round. Bound: {seconds(found.bound_s)}, computing "
        "alone, compiled where that is faster, or its forward part and all bytes at the link's rate where that is "
        "longer; only fewer bytes can beat it. Predicted: the simulator's, from the recorded backward and the network "
        "as DataParallel measured it and corrected it by its own trials."
    )
    if counted:
        words += (
            " Card: what passes a host's network card in a step, as it counts that, the way on which it is more; "
            "mean over the hosts."
        )
    if compiled:
        words += (
            " Compiled: the steps in which torch compiled, each as a whole, with torch's caches, in which contestants "
            "find what others have compiled."
        )
    return words


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
