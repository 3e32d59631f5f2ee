"""Trainings: files of JSON lines (metrics of ``ab.JsonLines``, losses, or both), as curves and as a table of stages."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from anabranch.tools.report.chart import Chart, Layout, Series, axis, band, curve, layout, plotly_text
from anabranch.tools.report.documents import MAX_NUMBER, Count, Instant, Number
from anabranch.tools.report.formatting import shortened, time_scale
from anabranch.tools.report.tables import Cell, Table, number
from anabranch.values.errors import FileError
from anabranch.values.files import complaint, parse_json

MAX_LINES = 500_000  # which take about 1 GB of memory and 15 s
MAX_STAGES = 60
MAX_RUNS = 8  # as many as there are colours and dashes
MAX_POINTS = 2000  # a curve with more steps is downsampled
BINS = 800  # of a downsampled curve: about as many as a wide screen has pixel columns
PANEL_PX, EDGE_PX, GAP = 160, 120, 0.07
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


# -------------------------------------------------------------------------------------------------------------- chart


@dataclass(frozen=True, slots=True)
class Downsampled:
    """A curve in bins of ``per_point`` steps: first and last step, median, minimum, maximum and its step.

    ``per_point`` is 1 where every step is kept.
    """

    steps: tuple[int, ...]
    median: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    high_at: tuple[int, ...]
    last: tuple[int, ...]
    per_point: int


def downsample(steps: Sequence[int], values: Sequence[float]) -> Downsampled:
    """A curve of at most ``MAX_POINTS`` points; no minimum and no maximum is lost."""
    if len(steps) <= MAX_POINTS:
        kept = tuple(values)
        return Downsampled(tuple(steps), kept, kept, kept, tuple(steps), tuple(steps), 1)
    per_point = -(-len(steps) // BINS)
    bins = [range(low, min(low + per_point, len(steps))) for low in range(0, len(steps), per_point)]
    highest = [max(part, key=values.__getitem__) for part in bins]
    return Downsampled(
        tuple(steps[part[0]] for part in bins),
        tuple(median(values[at] for at in part) for part in bins),
        tuple(min(values[at] for at in part) for part in bins),
        tuple(values[at] for at in highest),
        tuple(steps[at] for at in highest),
        tuple(steps[part[-1]] for part in bins),
        per_point,
    )


@dataclass(frozen=True, slots=True)
class _Panel:
    """One row of the chart, a curve per run; ``measured`` and ``predicted`` give the value of a line, if it has one."""

    title: str
    measured: Callable[[StepLine], float | None]
    digits: str = ".4g"
    from_zero: bool = True
    predicted: Callable[[StepLine], float | None] | None = None


def training_chart(runs: Sequence[Training]) -> Chart | None:
    """A panel for every quantity that any of the runs logged; None where there is none."""
    shown = runs[:MAX_RUNS]
    panels = [
        panel for panel in _panels(shown) if any(panel.measured(at) is not None for run in shown for at in run.lines)
    ]
    if not panels:
        return None
    data: list[Series] = []
    most_per_point = 1
    names = list(dict.fromkeys(run.name for run in shown))  # losses and metrics of one file look alike
    in_legend: set[str] = set()
    for place, panel in enumerate(panels):
        for run in shown:
            drawn, per_point = _measured(panel, run, names.index(run.name), place, len(names) > 1)
            drawn += _predicted(panel, run, place)
            most_per_point = max(most_per_point, per_point)
            for series in drawn:
                if series["name"] not in in_legend and (len(names) > 1 or series["name"] == PREDICTED):
                    series["showlegend"] = bool(series["name"])
                    in_legend.add(series["name"])
            data += drawn
    label = "Curves over the steps of the training: " + ", ".join(panel.title for panel in panels)
    height = PANEL_PX * len(panels) + EDGE_PX
    caption = _caption(runs, most_per_point)
    return Chart("training-chart", label, data, _layout(panels), height, caption, one_curve_at_a_time=True)


def _panels(runs: Sequence[Training]) -> list[_Panel]:
    scale = time_scale(at.measured_s for run in runs for at in run.lines if at.measured_s is not None)

    def timed(value_s: float | None) -> float | None:
        return None if value_s is None else value_s * scale.per_second

    return [
        _Panel("loss", lambda at: at.loss, ".5g", from_zero=False),
        _Panel(f"step time, {scale.unit}", lambda at: timed(at.measured_s), predicted=lambda at: timed(at.predicted_s)),
        _Panel(f"exposed communication, {scale.unit}", lambda at: timed(at.exposed_s)),
        _Panel("sent per step, MiB", lambda at: None if at.sent_nbytes is None else at.sent_nbytes / MIB),
        _Panel("elements exchanged (density), %", lambda at: None if at.density is None else 100 * at.density),
    ]


def _measured(panel: _Panel, run: Training, index: int, place: int, named: bool) -> tuple[list[Series], int]:
    """One run's curve, with a band from minimum to maximum where it was downsampled; and its steps per point."""
    known = [(at.step, value) for at in run.lines if (value := panel.measured(at)) is not None]
    if not known:
        return [], 1
    found = downsample([step for step, _ in known], [value for _, value in known])
    where = {"yaxis": _axis_name(place)}
    who = f"<b>{plotly_text(run.name, 40)}</b><br>" if named else ""
    hovers = [who + _hover(panel, found, at) for at in range(len(found.steps))]
    drawn = [curve(run.name, found.steps, _rounded(found.median), hovers, index, mode="lines", legendgroup=str(index),
                   showlegend=False, **where)]  # fmt: skip
    if found.per_point > 1:
        drawn.insert(0, band(found.steps, _rounded(found.low), _rounded(found.high), index, edge=1, **where))
    return drawn, found.per_point


def _predicted(panel: _Panel, run: Training, place: int) -> list[Series]:
    """The predicted curve, drawn as steps: a prediction holds until the layout changes."""
    predicted = panel.predicted or (lambda _: None)
    known = [(at.step, value) for at in run.lines if (value := predicted(at)) is not None]
    stairs = [
        (step, value)
        for at, (step, value) in enumerate(known)
        if at in (0, len(known) - 1) or value != known[at - 1][1] or value != known[at + 1][1]
    ]
    if not stairs:
        return []
    if len(stairs) > MAX_POINTS:  # one that changes at nearly every step
        thin = downsample(*zip(*stairs, strict=True))
        stairs = list(zip(thin.steps, thin.median, strict=True))
    hovers = [f"step {step:,}: predicted {value:{panel.digits}}" for step, value in stairs]
    values = _rounded([value for _, value in stairs])
    style = {"color": "--ink", "dash": "dot", "width": 2, "shape": "hv"}
    return [curve(PREDICTED, [step for step, _ in stairs], values, hovers, 0, mode="lines", line=style,
                  legendgroup=PREDICTED, showlegend=False, yaxis=_axis_name(place))]  # fmt: skip


def _axis_name(place: int) -> str:
    return f"y{place + 1}" if place else "y"


def _hover(panel: _Panel, curve: Downsampled, at: int) -> str:
    value = format(curve.median[at], panel.digits)
    if curve.per_point == 1:
        return f"step {curve.steps[at]:,}: {panel.title} {value}"
    low, high = format(curve.low[at], panel.digits), format(curve.high[at], panel.digits)
    return (
        f"steps {curve.steps[at]:,} – {curve.last[at]:,}<br>{panel.title}: median {value}"
        f"<br>{low} to {high} (step {curve.high_at[at]:,})"
    )


def _layout(panels: Sequence[_Panel]) -> Layout:
    height = (1 - GAP * (len(panels) - 1)) / len(panels)
    shape = layout(axis("step", anchor=_axis_name(len(panels) - 1)), {}, annotations=[])
    shape["legend"]["y"] = 1.0 + 26 / (PANEL_PX * len(panels))
    for place, panel in enumerate(panels):
        top = 1 - place * (height + GAP)
        shape[_axis_name(place).replace("y", "yaxis")] = {
            "domain": [max(0.0, top - height), top], "fixedrange": True, "nticks": 5,
            "rangemode": "tozero" if panel.from_zero else "normal",
        }  # fmt: skip
        shape["annotations"].append({
            "xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom",
            "showarrow": False, "text": f"<b>{panel.title}</b>",
        })  # fmt: skip
    return shape


def _caption(runs: Sequence[Training], per_point: int) -> str:
    parts = []
    if per_point > 1:
        parts.append(
            f"Each point of a line is the median of up to {per_point} steps; the band shows their minimum and maximum, "
            "so that no outlier is lost."
        )
    if len(runs) > MAX_RUNS:
        parts.append(f"The first {MAX_RUNS} of {len(runs)} runs are drawn.")
    parts.append("Step time: from the start of forward to averaged gradients, without the optimizer.")
    parts += dict.fromkeys(f"Note: {note}." for run in runs for note in run.notes)
    return " ".join(parts)


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") if abs(value) > SMALLEST else 0.0 for value in values]
