"""Tables of a report: planners and contestants side by side, buckets with their gradients, stages of a training."""

from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import median

from anabranch.tools.predict.scaling.compression import about_sent
from anabranch.tools.report.comparison import PLANNER_NAMES, about_compressed, error
from anabranch.tools.report.documents import COMPUTE, Benchmark, CompareDocument, MemoryDocument
from anabranch.tools.report.formatting import count, factor, percent, seconds, size, time_scale
from anabranch.tools.report.html.elements import Cell, Table
from anabranch.tools.report.html.escaping import shortened
from anabranch.tools.report.html.step_view import StepView
from anabranch.tools.report.memory import DDP
from anabranch.tools.report.runs.training import StepLine, Training

NONE = Cell("–", float("inf"))  # sorts behind every number
MAX_STAGES = 60


def comparison_table(found: CompareDocument) -> Table:
    """Every planner, and the plan for every way to compress."""
    everything = [*found.rows, *found.compressed]
    scale = time_scale(row.iteration_s for row in everything)
    slowest = max((row.iteration_s for row in everything), default=1.0) or 1.0
    spread = any(row.iteration_high_s is not None for row in everything)
    headers = ["planner", "buckets", "lanes", *(f"{what}, {scale.unit}" for what in ("finish", "exposed", "iteration")),
               "speed-up", "above bound", "error", *(["fast – slow network"] if spread else [])]  # fmt: skip
    rows = []
    for row in everything:
        cells = [
            Cell(row.name), Cell(f"{row.buckets:,}", row.buckets), Cell(str(row.lanes), row.lanes),
            Cell(scale(row.finish_s), row.finish_s), Cell(scale(row.exposed_s), row.exposed_s),
            Cell(scale(row.iteration_s), row.iteration_s, row.iteration_s / slowest),
            Cell(factor(row.speedup), row.speedup) if row.speedup is not None else NONE,
            Cell(percent(row.above_bound), row.above_bound) if row in found.rows else NONE,
            Cell(error(row), row.error) if row.error is not None else NONE,
        ]  # fmt: skip
        if spread:
            low_s, high_s = row.iteration_low_s or 0.0, row.iteration_high_s or 0.0
            cells.append(Cell(f"{scale(low_s)} – {scale(high_s)}", high_s))
        rows.append(cells)
    of = f"{found.trace} on {found.network}" if found.trace and found.network else count(found.world_size, "rank")
    caption = (
        "Finish: end of communication, from the start of backward. Speed-up: iteration against by_bytes. Above "
        "bound: how much later than the earliest possible finish, on as many lanes, of plans that send everything in "
        f"full. {about_compressed(found)} {PLANNER_NAMES}"
    )
    return Table(f"Planners, predicted: {of}", headers, rows, caption, found.best)


def benchmark_table(found: Benchmark) -> Table:
    """Every contestant of a benchmark."""
    scale = time_scale(row.step_s for row in found.rows)
    slowest = max((row.step_s for row in found.rows), default=1.0) or 1.0
    counted = any(row.sent_nbytes is not None for row in found.rows)
    headers = ["contestant", "buckets", "lanes", f"step, {scale.unit}", "from – to", "step / DDP",
               f"predicted, {scale.unit}", "error", *(["sent, MB"] if counted else [])]  # fmt: skip
    rows = []
    for row in found.rows:
        cells = [
            Cell(row.name), _integer(row.buckets), _integer(row.lanes),
            Cell(scale(row.step_s), row.step_s, row.step_s / slowest),
            Cell(f"{scale(min(row.turns_s))} – {scale(max(row.turns_s))}", max(row.turns_s)),
            Cell(f"{found.ratio_to_ddp(row):.3f}", found.ratio_to_ddp(row)),
            _number(row.predicted_s, scale), _number(row.prediction_error, "{:+.1%}".format),
        ]  # fmt: skip
        rows.append([*cells, _number(row.sent_nbytes, lambda n: f"{n / 1e6:.2f}")] if counted else cells)
    about = "; ".join(f"{name}: {value}" for name, value in found.facts.items())
    title = f"Measured: {found.model}, {found.ranks} ranks, {found.batch} {found.unit} each"
    left_out = "".join(f" Left out: {reason}." for reason in found.skipped)
    caption = (
        f"Medians over the turns. A step that sends every gradient in full takes at least {seconds(found.bound_s)}. "
        f"Measured on {about}.{left_out}"
    )
    training = [row for row in found.rows if row.name != COMPUTE]  # which sends nothing
    return Table(title, headers, rows, caption, min(training, key=lambda row: row.step_s).name)


def bucket_table(view: StepView) -> Table:
    """All buckets with all their gradients, for which the chart has no room."""
    scale = time_scale(span.end_s for span in view.timeline.communication)
    tensors = view.tensors
    spans = {number: span for span in view.timeline.communication if (number := view.number(span)) is not None}
    rows = []
    for number, bucket in view.buckets.items():
        known = [tensors[name] for name in bucket.names if name in tensors]
        all_known = len(known) == len(bucket.names)
        span = spans.get(number)
        rows.append([
            Cell(str(number), number), Cell(str(bucket.lane), bucket.lane), Cell(bucket.collective),
            Cell(f"{len(bucket.names):,}", len(bucket.names)),
            _number(sum(t.nbytes for t in known) if all_known else None, lambda n: size(int(n))),
            _number(view.sent_nbytes(bucket), lambda n: size(int(n))),
            _number(max((t.ready_s for t in known), default=None) if all_known else None, scale),
            _number(span.start_s if span else None, scale), _number(span.end_s if span else None, scale),
            Cell(", ".join(bucket.names)),
        ])  # fmt: skip
    headers = ["bucket", "lane", "collective", "tensors", "size", "a rank sends",
               *(f"{what}, {scale.unit}" for what in ("ready", "starts", "ends")), "gradients"]  # fmt: skip
    title = f"All {count(len(rows), 'bucket')} with their gradients ({view.title})"
    caption = about_sent(bucket.collective for bucket in view.buckets.values())
    return Table(title, headers, rows, caption, folded=True)


def memory_table(found: MemoryDocument) -> Table:
    """The numbers behind the bars, and the largest batch that fits."""
    modes = list(found.modes)
    kinds = list(dict.fromkeys(kind for mode in found.modes.values() for kind in mode.kinds))
    rows = [[Cell(kind), *(_nbytes(found.modes[mode].kinds.get(kind, 0)) for mode in modes)] for kind in kinds]
    rows.append([Cell("predicted peak"), *(_nbytes(found.modes[mode].predicted_nbytes) for mode in modes)])
    if DDP in found.modes and len(modes) > 1:
        ddp_nbytes = found.modes[DDP].predicted_nbytes
        rows.append(
            [Cell("more than DDP"), *(_more(found.modes[mode].predicted_nbytes - ddp_nbytes) for mode in modes)]
        )
    if any(found.modes[mode].measured_nbytes for mode in modes):
        rows.append([Cell("measured peak"), *(_nbytes(found.modes[mode].measured_nbytes or 0) for mode in modes)])
    if any(found.modes[mode].host_nbytes for mode in modes):
        rows.append([Cell("in host memory"), *(_nbytes(found.modes[mode].host_nbytes) for mode in modes)])
    if found.largest_batch:
        rows.append([Cell("largest batch"), *(_integer(found.largest_batch.get(mode)) for mode in modes)])
    if found.samples_per_s:
        speeds = [_number(found.samples_per_s.get(mode), "{:.1f}".format) for mode in modes]
        rows.append([Cell("samples/s, all ranks"), *speeds])
    title = f"Memory of {found.model}, batch {found.batch_size}, {found.optimizer}, {found.ranks} ranks"
    return Table(title, ["", *modes], rows, folded=True)


def stage_table(training: Training) -> Table | None:
    """The stages of tuning with their first and last step; None where the lines hold no metrics."""
    lines = [line for line in training.lines if line.measured_s is not None]

    def stage(line: StepLine) -> tuple[str, str | None]:
        return (line.stage, line.plan)

    parts = [list(part) for _, part in groupby(lines, key=stage)]
    if not parts:
        return None
    times = [
        (median(at.measured_s or 0.0 for at in part), median(at.exposed_s or 0.0 for at in part)) for part in parts
    ]
    scale = time_scale(step_s for step_s, _ in times)
    rows: list[Sequence[Cell]] = [
        [Cell(_from_to(part[0].step, part[-1].step), part[0].step), Cell(shortened(part[0].stage, 120) or "–"),
         Cell(part[0].plan or "DDP's own"), _integer(part[0].buckets), Cell(scale(step_s), step_s),
         Cell(scale(exposed_s), exposed_s)]
        for part, (step_s, exposed_s) in zip(parts[:MAX_STAGES], times, strict=False)
    ]  # fmt: skip
    headers = ["steps", "stage", "plan", "buckets", f"median step, {scale.unit}", f"exposed, {scale.unit}"]
    more = f"The first {MAX_STAGES} of {len(parts)} stages." if len(parts) > MAX_STAGES else ""
    return Table(f"Stages of tuning ({training.name})", headers, rows, more)


def _from_to(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} – {last:,}"


def _integer(number: int | None) -> Cell:
    return NONE if number is None else Cell(f"{number:,}", number)


def _number(number: float | None, show: Callable[[float], str]) -> Cell:
    return NONE if number is None else Cell(show(number), number)


def _more(nbytes: int) -> Cell:
    return Cell(f"{'+' if nbytes > 0 else '−'}{size(abs(nbytes))}" if nbytes else "–", nbytes)


def _nbytes(nbytes: int) -> Cell:
    return Cell(size(nbytes) if nbytes else "–", nbytes)
