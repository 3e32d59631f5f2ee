"""A benchmark as a terminal table, as Markdown, and as the closing lines that scripts for Horovod's benchmark read."""

from collections.abc import Sequence
from statistics import fmean, stdev

from rich.console import Group, RenderableType
from rich.text import Text

from anabranch.tools.report.documents import BASELINE, COMPILED, COMPUTE, OURS, Benchmark
from anabranch.tools.report.formatting import plain, seconds, time_scale
from anabranch.tools.report.tables import columns, facts

COMPILING = "compiling"  # the name of a fact
OWN_CACHES = "each contestant with caches of its own, empty at first"
SHARED_CACHES = "with torch's caches, in which contestants find what others have compiled"


def _cells(benchmark: Benchmark) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the table; the first column holds names."""
    scale = time_scale(row.step_s for row in benchmark.rows)
    headers = [
        "contestant", "buckets", "lanes", f"step {scale.unit}", "from – to", "step / DDP", "step / bound",
        f"predicted {scale.unit}", "error", *(["sent MB"] if _has_sent_bytes(benchmark) else []),
        *(["compiled s"] if _has_compiled(benchmark) else []),
    ]  # fmt: skip
    table = []
    for row in benchmark.rows:
        error = row.prediction_error
        table.append([
            row.name,
            str(row.buckets or "-"),
            str(row.lanes or "-"),
            scale(row.step_s),
            f"{scale(min(row.turns_s))} – {scale(max(row.turns_s))}",
            f"{benchmark.ratio_to_ddp(row):.3f}",
            f"{row.step_s / benchmark.bound_s:.2f}",
            "-" if row.predicted_s is None else scale(row.predicted_s),
            "-" if error is None else f"{error:+.1%}",
            *([f"{(row.sent_nbytes or 0.0) / 1e6:.2f}"] if _has_sent_bytes(benchmark) else []),
            *([" + ".join(f"{step_s:.1f}" for step_s in row.compile_s) or "-"] if _has_compiled(benchmark) else []),
        ])  # fmt: skip
    return headers, table


def benchmark_report(benchmark: Benchmark) -> RenderableType:
    """The table, with the conditions of the measurement above and the meaning of its columns below."""
    headers, rows = _cells(benchmark)
    table = columns(_title(benchmark), *(header.replace(" ", "\n", 1) for header in headers), left=headers[:1])
    for cells in rows:
        table.add_row(*map(Text, cells), style="bold" if cells[0] == OURS else None)
    table.caption = Text(_legend(benchmark))
    about = facts("Measured on", [(name, plain(value)) for name, value in benchmark.facts.items()])
    left_out = [Text("Left out: " + plain(reason)) for reason in benchmark.skipped]
    compiled = [Text(line) for line in compiled_lines(benchmark)]
    return Group(about, Text(), table, *compiled, *left_out)


def closing_lines(benchmark: Benchmark) -> list[str]:
    """The last lines of Horovod's synthetic benchmark, in its format."""
    rates = benchmark.rates(OURS)
    mean, spread = fmean(rates), 1.96 * stdev(rates) if len(rates) > 1 else 0.0
    kind = "CPU" if benchmark.facts.get("device", "").startswith("CPU") else "GPU"
    unit = benchmark.unit.capitalize()
    total = f"{mean * benchmark.ranks:.1f} +-{spread * benchmark.ranks:.1f}"
    return [
        f"{OURS}:",
        f"{unit}/sec per {kind}: {mean:.1f} +-{spread:.1f}",
        f"Total {benchmark.unit}/sec on {benchmark.ranks} {kind}(s): {total}",
    ]


def compiled_lines(benchmark: Benchmark) -> list[str]:
    """What compiling gains each contestant: its step, beside those that it competes with; and what compiling takes,
    where nothing that another has compiled was found in a cache."""
    names = {row.name for row in benchmark.rows}
    alone, stock = f"{COMPUTE}{COMPILED}", f"{BASELINE}{COMPILED}"
    lines = []
    for row in benchmark.rows:
        if not row.name.endswith(COMPILED) or row.name == alone:
            continue
        others = [other for other in (stock, row.name.removesuffix(COMPILED), alone) if other != row.name]
        ratios = [f"{row.ratio_to(benchmark.row(other)):.3f} × {other}" for other in others if other in names]
        comparable = alone in names and benchmark.facts.get(COMPILING) == OWN_CACHES
        alone_s = sum(benchmark.row(alone).compile_s) if comparable else 0.0
        times = " + ".join(f"{step_s / alone_s:.1f}" for step_s in row.compile_s) if alone_s else ""
        took = f"; compiling {times} × as long as without cuts" if times else ""
        lines.append(f"{row.name}: a step takes {', '.join(ratios)}{took}.")
    return lines


def markdown(title: str, benchmarks: Sequence[Benchmark]) -> str:
    """A report for benchmarks/: the conditions, a table per model, and the output of ``explain()``."""
    lines = [f"# {title}", ""]
    lines += [f"* {name}: {value}" for name, value in benchmarks[0].facts.items()]
    for benchmark in benchmarks:
        headers, rows = _cells(benchmark)
        lines += ["", f"## {_title(benchmark)}", "", _line(headers), "|---" + "|---:" * (len(headers) - 1) + "|"]
        lines += [_line([f"**{cell}**" for cell in row] if row[0] == OURS else row) for row in rows]
        lines += ["", _legend(benchmark), ""]
        lines += [f"{line}\n" for line in compiled_lines(benchmark)]
        lines += [f"Left out: {reason}.\n" for reason in benchmark.skipped]
        lines += [*closing_lines(benchmark), "", "```", benchmark.explanation, "```"]
    return "\n".join(lines) + "\n"


def _title(benchmark: Benchmark) -> str:
    return f"{plain(benchmark.model)}, {benchmark.ranks} ranks, {benchmark.batch} {benchmark.unit} each"


def _has_sent_bytes(benchmark: Benchmark) -> bool:
    return any(row.sent_nbytes is not None for row in benchmark.rows)


def _has_compiled(benchmark: Benchmark) -> bool:
    return any(row.compile_s for row in benchmark.rows)


def _legend(benchmark: Benchmark) -> str:
    sent = (
        " Sent: a step, by the busiest rank's host, as its network cards count it."
        if _has_sent_bytes(benchmark)
        else ""
    )
    caches = benchmark.facts.get(COMPILING, SHARED_CACHES)
    compiled = (
        f" Compiled: the steps in which torch compiled, each as a whole, {caches}." if _has_compiled(benchmark) else ""
    )
    return (
        "Medians over the turns, and their range: differences within the ranges mean nothing. step / DDP: median over "
        "the rounds of the ratio to DDP's default in "
        f"the same round. Bound: {seconds(benchmark.bound_s)}, computing alone, compiled where that is faster, or its "
        "forward part and all bytes at the link's rate where that is longer; only fewer bytes can beat it. Predicted: "
        "the simulator's, from the recorded backward and the network as DataParallel measured it and corrected it by "
        f"its own trials.{sent}{compiled}"
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
