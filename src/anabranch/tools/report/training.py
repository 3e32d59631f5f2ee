"""Trainings: files of JSON lines (metrics of ``ab.JsonLines``, losses, or both), as curves and as a table of stages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from anabranch.tools.report.chart import Chart, Layout, Series, axis, band, curve, layout, plotly_text
from anabranch.tools.report.documents import LEAST_GAIN, MAX_NUMBER, Count, Instant, Number
from anabranch.tools.report.formatting import shortened, time_scale
from anabranch.tools.report.tables import Cell, Table, number
from anabranch.values.errors import FileError
from anabranch.values.files import complaint, parse_json

MAX_LINES = 500_000  # which take about 1 GB of memory and 15 s
MAX_STAGES = 60
FEWEST_STEPS = 3  # whose median says something
MAX_RUNS = 8  # as many as there are colours and dashes
MAX_POINTS = 2000  # a curve with more steps is downsampled
BINS = 800  # of a downsampled curve: about as many as a wide screen has pixel columns
PANEL_PX, EDGE_PX = 160, 120
MIB = 1 << 20
PREDICTED = "predicted"
SMALLEST = 1e-30  # drawn as 0 below this: plotly draws no axis that ends below 1e-300


class StepLine(BaseModel):
    """A line of ``ab.JsonLines``, or of a file of losses; at least one of ``measured_s`` and ``loss`` is there."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)

    step: Count
    rank: Count = 0
    loss: Number | None = None
    measured_s: Instant | None = None
    predicted_s: Instant | None = None
    compute_s: Instant | None = None
    exposed_s: Instant | None = None
    overlap: Number | None = None
    sent_nbytes: Count | None = None
    density: Number | None = None
    plan: str | None = None
    buckets: Count | None = None
    lanes: Count | None = None
    stage: str = ""

    @property
    def has_data(self) -> bool:
        """Whether there is anything to draw."""
        return self.measured_s is not None or self.loss is not None


@dataclass(frozen=True, slots=True)
class Training:
    """The lines of one rank from one start of the program to its end, by rising step."""

    name: str
    lines: tuple[StepLine, ...]
    notes: tuple[str, ...] = ()


def trainings(text: bytes, where: str, name: str) -> list[Training]:
    """The trainings in a file of JSON lines, one per start of the program and rank; FileError for an unknown line.

    Left out, with a note, are: a last line without its end (the program still writes it, or died meanwhile), a line
    that such a death cut off before the next start appended to the file, and a loss that is not a number.
    """
    if (many := text.count(b"\n")) > MAX_LINES:
        raise FileError(
            f"{where}: has {many:,} lines: expected {MAX_LINES:,} at most; give the last of them, or every tenth"
        )
    rows = [(at, row) for at, row in enumerate(text.split(b"\n"), start=1) if row.strip(b" \t\r\0")]
    lines: list[StepLine] = []
    without_loss: list[int] = []
    truncated: list[int] = []
    for at, row in rows:
        place = f"{where}, line {at}"
        try:
            value = parse_json(row.strip(b"\0"), place, nan_as_none=True)
        except FileError:
            if not _is_truncated(row):
                raise
            truncated.append(at)
            continue
        line, loss_is_missing = _line(value, place)
        if loss_is_missing:
            without_loss.append(line.step)
        if line.has_data:
            lines.append(line)
    if len(truncated) > 1 + len(lines) + len(without_loss):
        raise FileError(
            f"{where}: {_numbers_are('line', truncated)} not complete; expected lines of ab.JsonLines, one object each"
        )
    if not lines:
        raise FileError(
            f"{where}: has no step whose loss is a number, so there is nothing to draw"
            if without_loss
            else f"{where}: holds no complete step; expected lines of ab.JsonLines, such as a run leaves behind"
        )
    return _runs(lines, name, _notes(name, truncated, rows[-1][0] if not text.endswith(b"\n") else 0, without_loss))


def _notes(name: str, truncated: Sequence[int], unended: int, without_loss: Sequence[int]) -> tuple[str, ...]:
    """What was left out; ``unended`` is the number of a last line that has no end."""
    notes = []
    if unended in truncated:
        notes.append(f"the last line of {name} is not complete and was left out")
    if inner := [at for at in truncated if at != unended]:
        notes.append(f"in {name}, {_numbers_are('line', inner)} not complete, as after a crash, and left out")
    if without_loss:
        notes.append(f"{_numbers_are('step', without_loss)} without a loss that can be drawn: it is not a number")
    return tuple(notes)


def _runs(lines: Sequence[StepLine], name: str, notes: tuple[str, ...]) -> list[Training]:
    """Metrics and losses apart, each rank apart, each start of the program apart.

    A GPU's metrics come some steps late, so that losses in the same file are ahead of them. A start is where the step
    number falls, since a logger appends to an old file.
    """
    own: dict[tuple[bool, int], list[StepLine]] = {}
    for line in lines:
        own.setdefault((line.measured_s is None, line.rank), []).append(line)
    found: list[Training] = []
    for (_, rank), own_lines in sorted(own.items(), key=lambda item: item[0]):
        starts: list[list[StepLine]] = []
        for line in own_lines:
            if not starts or line.step <= starts[-1][-1].step:
                starts.append([])
            starts[-1].append(line)
        title = f"{name}, rank {rank}" if rank else name
        for at, start in enumerate(starts, start=1):
            found.append(Training(f"{title}, start {at}" if len(starts) > 1 else title, tuple(start), notes))
    return found


def _is_truncated(row: bytes) -> bool:
    """Whether a line begins as a JSON object and is cut off, or runs into the next one."""
    try:
        json.loads(row)
    except json.JSONDecodeError:
        return row.lstrip(b" \t\0").startswith(b"{")
    except (ValueError, RecursionError):
        pass
    return False


def _numbers_are(thing: str, numbers: Sequence[int]) -> str:
    """Line 7 is; lines 7, 9, … (12 in all) are."""
    if len(numbers) == 1:
        return f"{thing} {numbers[0]:,} is"
    more = f" … ({len(numbers):,} in all)" if len(numbers) > 3 else ""
    return f"{thing}s {', '.join(f'{number:,}' for number in numbers[:3])}{more} are"


def _line(value: Any, where: str) -> tuple[StepLine, bool]:
    """The line, and whether it had a loss that cannot be drawn."""
    without_loss = False
    if isinstance(value, dict) and "loss" in value:
        loss = value["loss"]
        without_loss = loss is None or (isinstance(loss, float) and not abs(loss) <= MAX_NUMBER)
        value["loss"] = None if without_loss else loss
    try:
        line = StepLine.model_validate(value)
    except ValidationError as error:
        wrong = complaint(error.errors(include_url=False)[:1], "line")
        raise FileError(
            f"{where}: {wrong}; expected a line of ab.JsonLines, or step and loss: take this line out"
        ) from error
    if not without_loss and not line.has_data:
        raise FileError(f"{where}: has neither measured_s nor loss: expected a line of ab.JsonLines, or step and loss")
    return line, without_loss


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

    @property
    def faster(self) -> bool:
        """Whether the layout at the end is so by more than noise."""
        return self.kept_s <= (1 - LEAST_GAIN) * self.own_s


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


@dataclass(frozen=True, slots=True)
class Downsampled:
    """A curve in bins of ``per_point`` steps, 1 where every step is kept: the first and last step of each bin, its
    median, its minimum, its maximum, and the step of its maximum."""

    steps: Sequence[int]
    median: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    high_at: Sequence[int]
    last: Sequence[int]
    per_point: int


def downsample(steps: Sequence[int], values: Sequence[float]) -> Downsampled:
    """A curve of at most ``MAX_POINTS`` points; no minimum and no maximum is lost."""
    if len(steps) <= MAX_POINTS:
        return Downsampled(steps, values, values, values, steps, steps, 1)
    per_point = -(-len(steps) // BINS)
    bins = [range(low, min(low + per_point, len(steps))) for low in range(0, len(steps), per_point)]
    highest = [max(part, key=values.__getitem__) for part in bins]
    return Downsampled(
        [steps[part[0]] for part in bins],
        [median(values[at] for at in part) for part in bins],
        [min(values[at] for at in part) for part in bins],
        [values[at] for at in highest],
        [steps[at] for at in highest],
        [steps[part[-1]] for part in bins],
        per_point,
    )


@dataclass(frozen=True, slots=True)
class _Panel:
    """One row of the chart: a quantity of a line, if it has it, and its prediction; times its factor in ``scale``."""

    title: str
    measured: str
    predicted: str = ""
    scale: float = 1.0
    digits: str = ".4g"

    def known(self, run: Training, name: str) -> list[tuple[int, float]]:
        """The steps that have the quantity, and its values; those next to zero are zero."""
        pairs = [(line.step, getattr(line, name, None)) for line in run.lines]
        return [
            (step, value * self.scale if abs(value) > SMALLEST else 0.0) for step, value in pairs if value is not None
        ]


def training_chart(runs: Sequence[Training]) -> Chart | None:
    """A panel for every quantity that any of the runs logged; None where there is none."""
    shown = runs[:MAX_RUNS]
    scale = time_scale(at.measured_s for run in shown for at in run.lines if at.measured_s is not None)
    panels = [
        _Panel("loss", "loss", digits=".5g"),
        _Panel(f"step time, {scale.unit}", "measured_s", "predicted_s", scale.per_second),
        _Panel(f"exposed communication, {scale.unit}", "exposed_s", scale=scale.per_second),
        _Panel("sent per step, MiB", "sent_nbytes", scale=1 / MIB),
        _Panel("elements exchanged (density), %", "density", scale=100),
    ]
    panels = [panel for panel in panels if any(panel.known(run, panel.measured) for run in shown)]
    if not panels:
        return None
    names = list(dict.fromkeys(run.name for run in shown))  # losses and metrics of one file look alike
    data: list[Series] = []
    per_point = 1
    for place, panel in enumerate(panels):
        for run in shown:
            for what in (panel.measured, panel.predicted):
                if known := panel.known(run, what):
                    found = downsample(*zip(*known, strict=True))
                    per_point = max(per_point, found.per_point)
                    is_prediction = what == panel.predicted
                    data += _series(panel, found, None if is_prediction else names.index(run.name), run.name, place)
    in_legend = {PREDICTED, *(map(plotly_text, names) if len(names) > 1 else ())}
    for series in data:
        series["showlegend"] = series["name"] in in_legend
        in_legend.discard(series["name"])
    label = "Curves over the steps of the training: " + ", ".join(panel.title for panel in panels)
    height, caption = PANEL_PX * len(panels) + EDGE_PX, _caption(runs, per_point)
    return Chart("training-chart", label, data, _layout(panels), height, caption, one_curve_at_a_time=True)


def _series(panel: _Panel, found: Downsampled, index: int | None, name: str, place: int) -> list[Series]:
    """A run's curve, with a band from minimum to maximum where it was downsampled; a prediction where index is None."""
    where = {"yaxis": f"y{place + 1}" if place else "y"}
    hovers = [_hover(panel, found, at, "predicted " if index is None else "") for at in range(len(found.steps))]
    if index is None:  # holds until the layout changes
        style = {"color": "--ink", "dash": "dot", "width": 2, "shape": "hv"}
        return [curve(PREDICTED, found.steps, found.median, hovers, 0, mode="lines", line=style, **where)]
    hovers = [f"<b>{plotly_text(name, 40)}</b><br>{hover}" for hover in hovers]
    drawn = [curve(name, found.steps, found.median, hovers, index, mode="lines", legendgroup=str(index), **where)]
    return [*([band(found.steps, found.low, found.high, index, 1, **where)] if found.per_point > 1 else []), *drawn]


def _hover(panel: _Panel, found: Downsampled, at: int, what: str) -> str:
    value, low, high = (format(each[at], panel.digits) for each in (found.median, found.low, found.high))
    if found.per_point == 1:
        return f"step {found.steps[at]:,}: {what}{panel.title} {value}"
    return (
        f"steps {found.steps[at]:,} – {found.last[at]:,}<br>{what}{panel.title}: median {value}"
        f"<br>{low} to {high} (step {found.high_at[at]:,})"
    )


def _layout(panels: Sequence[_Panel]) -> Layout:
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


def _caption(runs: Sequence[Training], per_point: int) -> str:
    parts = ["Step time: from the start of forward to averaged gradients, without the optimizer."]
    if per_point > 1:
        parts.append(
            f"Each point of a line is the median of up to {per_point} steps; the band shows their minimum and maximum, "
            "so that no outlier is lost."
        )
    if len(runs) > MAX_RUNS:
        parts.append(f"The first {MAX_RUNS} of {len(runs)} runs are drawn.")
    return " ".join([*parts, *dict.fromkeys(f"Note: {note}." for run in runs for note in run.notes)])
