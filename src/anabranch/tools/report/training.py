"""Trainings: files of JSON lines (metrics of ``ab.JsonLines``, losses, or both), as curves and as a table of stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from anabranch.tools.report.chart import Chart, PlotLayout, Series, axis, curve, layout, plotly_text
from anabranch.tools.report.documents import MAX_NUMBER, Count, Instant, Number
from anabranch.tools.report.formatting import shortened, time_scale
from anabranch.tools.report.tables import Cell, Table, number
from anabranch.values.errors import FileError
from anabranch.values.files import complaint, parse_json

MAX_LINES = 500_000  # which take about 1 GB of memory and 15 s
MAX_STAGES = 60
FEWEST_STEPS = 3  # whose median says something
MAX_RUNS = 8  # as many as there are colours and dashes
MAX_POINTS = 2000  # a curve with more steps is downsampled: a wide screen has about as many pixel columns
MAX_LEFT_OUT = 3  # that a note names
PANEL_PX, EDGE_PX = 160, 120
MIB = 1 << 20
PREDICTED = "predicted"
SMALLEST = 1e-30  # drawn as 0 below this: plotly draws no axis that ends below 1e-300


def _drawable(loss: Any) -> Any:
    """None for a loss that no axis has room for: of a training that diverged."""
    return loss if not isinstance(loss, float) or abs(loss) <= MAX_NUMBER else None


class StepLine(BaseModel):
    """A line of ``ab.JsonLines``, or of a file of losses; at least one of ``measured_s`` and ``loss`` is there."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)

    step: Count
    rank: Count = 0
    loss: Annotated[Number | None, BeforeValidator(_drawable)] = None
    measured_s: Instant | None = None
    predicted_s: Instant | None = None
    exposed_s: Instant | None = None
    sent_nbytes: Count | None = None
    plan: str | None = None
    buckets: Count | None = None
    stage: str = ""

    @property
    def has_data(self) -> bool:
        """Whether there is anything to draw."""
        return self.measured_s is not None or self.loss is not None


@dataclass(frozen=True, slots=True)
class Training:
    """The lines of one rank from one start of the program to its end, by rising step; ``note``: what was left out."""

    name: str
    lines: tuple[StepLine, ...]
    note: str = ""


def trainings(text: bytes, where: str, name: str) -> list[Training]:
    """The trainings in a file of JSON lines, one per start of the program and rank; FileError for an unknown line.

    Left out, with a note, are: a last line without its end (the program still writes it, or died meanwhile), a line
    that such a death cut off before the next start appended to the file, and a loss that is not a number.
    """
    if (many := text.count(b"\n")) > MAX_LINES:
        raise FileError(
            f"{where}: has {many:,} lines: expected {MAX_LINES:,} at most; give the last of them, or every tenth"
        )
    lines: list[StepLine] = []
    left_out: list[str] = []
    truncated = 0
    for at, row in enumerate(text.split(b"\n"), start=1):
        if not row.strip(b" \t\r\0"):
            continue
        place = f"{where}, line {at}"
        try:
            value = parse_json(row.strip(b"\0"), place, nan_as_none=True)
        except FileError:
            if not row.lstrip(b" \t\0").startswith(b"{"):
                raise
            truncated += 1
            left_out.append(f"line {at:,}, which is not complete")
            continue
        line = _line(value, place)
        if "loss" in line.model_fields_set and line.loss is None:
            left_out.append(f"the loss of step {line.step:,}, which is not a number")
        lines.append(line)
    if truncated > 1 + len(lines):
        raise FileError(f"{where}: {truncated:,} lines are not complete; expected lines of ab.JsonLines")
    if not any(line.has_data for line in lines):
        found = left_out[0] if left_out else "nothing"
        raise FileError(f"{where}: holds no step that can be drawn, but {found}; expected lines of ab.JsonLines")
    more = f", and {len(left_out) - MAX_LEFT_OUT:,} more" if len(left_out) > MAX_LEFT_OUT else ""
    note = f"Left out of {name}: {'; '.join(left_out[:MAX_LEFT_OUT])}{more}." if left_out else ""
    return _runs([line for line in lines if line.has_data], name, note)


def _runs(lines: Sequence[StepLine], name: str, note: str) -> list[Training]:
    """Metrics and losses apart, each rank apart, each start of the program apart.

    A GPU's metrics come some steps late, so that losses in the same file are ahead of them. A start is where the step
    number falls, since a logger appends to an old file.
    """
    own: dict[tuple[bool, int], list[list[StepLine]]] = {}
    for line in lines:
        starts = own.setdefault((line.measured_s is None, line.rank), [])
        if not starts or line.step <= starts[-1][-1].step:
            starts.append([])
        starts[-1].append(line)
    found: list[Training] = []
    for (_, rank), starts in sorted(own.items(), key=lambda item: item[0]):
        title = f"{name}, rank {rank}" if rank else name
        for at, start in enumerate(starts, start=1):
            found.append(Training(f"{title}, start {at}" if len(starts) > 1 else title, tuple(start), note))
    return found


def _line(value: Any, where: str) -> StepLine:
    try:
        line = StepLine.model_validate(value)
    except ValidationError as error:
        wrong = complaint(error.errors(include_url=False)[:1], "line")
        raise FileError(
            f"{where}: {wrong}; expected a line of ab.JsonLines, or step and loss: take this line out"
        ) from error
    if not line.has_data and "loss" not in line.model_fields_set:
        raise FileError(f"{where}: has neither measured_s nor loss: expected a line of ab.JsonLines, or step and loss")
    return line


def stage_table(training: Training) -> Table | None:
    """The stages of tuning with their first and last step; None where the lines hold no metrics."""
    lines = [line for line in training.lines if line.measured_s is not None]
    parts = [list(part) for _, part in groupby(lines, key=lambda line: (line.stage, line.plan))]
    if not parts:
        return None
    times = [
        (median(at.measured_s or 0.0 for at in part), median(at.exposed_s or 0.0 for at in part)) for part in parts
    ]
    scale = time_scale(step_s for step_s, _ in times)
    rows = [
        [Cell(" – ".join(f"{at:,}" for at in dict.fromkeys((part[0].step, part[-1].step))), part[0].step),
         Cell(shortened(part[0].stage, 120) or "–"), Cell(part[0].plan or "DDP's own"), number(part[0].buckets),
         number(step_s, scale), number(exposed_s, scale)]
        for part, (step_s, exposed_s) in zip(parts[:MAX_STAGES], times, strict=False)
    ]  # fmt: skip
    headers = ["steps", "stage", "plan", "buckets", f"median step, {scale.unit}", f"exposed, {scale.unit}"]
    more = f"The first {MAX_STAGES} of {len(parts)} stages." if len(parts) > MAX_STAGES else ""
    return Table(f"Stages of tuning ({training.name})", headers, rows, more)


class LayoutGain(NamedTuple):
    """Median steps of a training: under DDP's own buckets and under the layout in force at its end, None if DDP's."""

    name: str
    plan: str | None
    own_s: float
    kept_s: float


def layout_gain(run: Training) -> LayoutGain | None:
    """What the search gained; None where too few steps tell."""
    timed = [line for line in run.lines if line.measured_s is not None]
    if not timed:
        return None
    own, kept = ([line.measured_s or 0.0 for line in timed if line.plan == plan] for plan in (None, timed[-1].plan))
    if min(len(own), len(kept)) < FEWEST_STEPS:
        return None
    return LayoutGain(run.name, timed[-1].plan, median(own), median(kept))


# -------------------------------------------------------------------------------------------------------------- chart

Point = tuple[int, float]  # a step and its value


def downsample(points: Sequence[Point]) -> Sequence[Point]:
    """At most ``MAX_POINTS`` of the points: the lowest and the highest of each bin, so that no extreme is lost."""
    if len(points) <= MAX_POINTS:
        return points
    per_bin = -(-len(points) // (MAX_POINTS // 2))
    bins = [points[low : low + per_bin] for low in range(0, len(points), per_bin)]
    extremes = ({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))} for part in bins)
    return [point for pair in extremes for point in sorted(pair)]


class _Panel(NamedTuple):
    """One row of the chart: a quantity of a line, and its prediction; times its factor in ``scale``."""

    title: str
    measured: str
    predicted: str = ""
    scale: float = 1.0

    def known(self, run: Training, name: str) -> Sequence[Point]:
        """The steps that have the quantity, and its values; those next to zero are zero."""
        pairs = [(line.step, getattr(line, name)) for line in run.lines] if name else []
        return downsample([(at, v * self.scale if abs(v) > SMALLEST else 0.0) for at, v in pairs if v is not None])


def training_chart(runs: Sequence[Training]) -> Chart | None:
    """A panel for every quantity that any of the runs logged; None where there is none."""
    shown = runs[:MAX_RUNS]
    scale = time_scale(at.measured_s for run in shown for at in run.lines if at.measured_s is not None)
    panels = [
        _Panel("loss", "loss"),
        _Panel(f"step time, {scale.unit}", "measured_s", "predicted_s", scale.per_second),
        _Panel(f"exposed communication, {scale.unit}", "exposed_s", scale=scale.per_second),
        _Panel("sent per step, MiB", "sent_nbytes", scale=1 / MIB),
    ]
    panels = [panel for panel in panels if any(panel.known(run, panel.measured) for run in shown)]
    if not panels:
        return None
    names = list(dict.fromkeys(run.name for run in shown))  # losses and metrics of one file look alike
    data: list[Series] = []
    for place, panel in enumerate(panels):
        style: dict[str, Any] = {"mode": "lines", "yaxis": f"y{place + 1}" if place else "y"}
        for run in shown:
            index = names.index(run.name)
            if points := panel.known(run, panel.measured):
                data.append(_series(run.name, panel, points, index, {**style, "legendgroup": str(index)}))
            if points := panel.known(run, panel.predicted):  # which holds until the layout changes
                line = {"color": "--ink", "dash": "dot", "width": 2, "shape": "hv"}
                data.append(_series(PREDICTED, panel, points, index, {**style, "line": line}))
    in_legend = {PREDICTED, *(map(plotly_text, names) if len(names) > 1 else ())}
    for series in data:
        series["showlegend"] = series["name"] in in_legend
        in_legend.discard(series["name"])
    label = "Curves over the steps of the training: " + ", ".join(panel.title for panel in panels)
    height = PANEL_PX * len(panels) + EDGE_PX
    return Chart("training-chart", label, data, _layout(panels), height, _caption(runs), one_curve_at_a_time=True)


def _series(name: str, panel: _Panel, points: Sequence[Point], index: int, style: dict[str, Any]) -> Series:
    steps, values = zip(*points, strict=True)
    about = f"<b>{plotly_text(name, 40)}</b><br>"
    hovers = [f"{about}step {step:,}: {panel.title} {value:.5g}" for step, value in points]
    return curve(name, steps, values, hovers, index, **style)


def _layout(panels: Sequence[_Panel]) -> PlotLayout:
    grid = {"rows": len(panels), "columns": 1, "pattern": "coupled", "ygap": 0.35}
    shape = layout(axis("step"), {}, grid=grid, annotations=[])
    shape["legend"]["y"] = 1.0 + 26 / (PANEL_PX * len(panels))
    for place, panel in enumerate(panels):
        number = place + 1 if place else ""
        lowest = {"rangemode": "normal" if panel.measured == "loss" else "tozero"}
        shape[f"yaxis{number}"] = {"fixedrange": True, "nticks": 5, **lowest}
        shape["annotations"].append({
            "xref": "paper", "yref": f"y{number} domain", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom",
            "showarrow": False, "text": f"<b>{panel.title}</b>",
        })  # fmt: skip
    return shape


def _caption(runs: Sequence[Training]) -> str:
    parts = ["Step time: from the start of forward to averaged gradients, without the optimizer."]
    if any(len(run.lines) > MAX_POINTS for run in runs):
        parts.append(f"Above {MAX_POINTS} steps, the lowest and the highest value of every few are drawn.")
    if len(runs) > MAX_RUNS:
        parts.append(f"The first {MAX_RUNS} of {len(runs)} runs are drawn.")
    return " ".join([*parts, *dict.fromkeys(run.note for run in runs if run.note)])
