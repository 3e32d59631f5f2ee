"""The curves of ``convergence.py`` as Markdown tables, on stdout, and as pictures beside them.

    python -m benchmarks.convergence_report curves.jsonl ... --pictures benchmarks/convergence_char_digits_2026-11-15

A final value is the mean of the last three points; a loss is reached where the mean of three points in a row is.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from benchmarks.bench_plot import COLOURS, MARKERS, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAST = 3  # points that make a value: one alone is noisy
DENSE = "dense"


@dataclass(frozen=True)
class Curve:
    """One run, point by point."""

    task: str
    contestant: str
    seed: int
    how: str  # "real", "virtual" or "timed"
    points: tuple[dict[str, Any], ...]

    def final(self, name: str = "validation_loss", step: int | None = None) -> float:
        """The mean of the last points, or of the last ones up to a step."""
        found = [point[name] for point in self.points if step is None or point["step"] <= step]
        return float(mean(found[-LAST:]))

    @property
    def steps(self) -> int:
        """How many there were."""
        return int(self.points[-1]["step"])

    def smooth(self, name: str = "validation_loss") -> list[float]:
        """At every point the mean of it and the ones before; the first points have fewer."""
        values = [point[name] for point in self.points]
        return [mean(values[max(0, i + 1 - LAST) : i + 1]) for i in range(len(values))]

    def reached(self, loss: float) -> dict[str, Any] | None:
        """The first point where the loss is reached; None if it never is."""
        found = (point for point, value in zip(self.points, self.smooth(), strict=True) if value <= loss)
        return next(found, None)


def read(paths: Iterable[Path]) -> list[Curve]:
    """All runs in some files; a run that was begun twice counts from its last beginning."""
    runs: dict[tuple[str, str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            point = json.loads(line)
            how = "virtual" if point.get("virtual") else "timed" if point.get("timed") else "real"
            run = runs[point["task"], point["contestant"], point["seed"], how]
            if point["step"] == 0:
                run.clear()
            run.append(point)
    twice = {key[:3] for key in runs if key[3] == "real"}  # real ranks count, where there are both
    return [Curve(*k, tuple(points)) for k, points in runs.items() if k[3] != "virtual" or k[:3] not in twice]


def named(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """By contestant, dense first."""
    found: dict[str, list[Curve]] = {}
    for curve in sorted(curves, key=lambda c: (c.contestant != DENSE, -_density(c.contestant), c.contestant, c.seed)):
        found.setdefault(curve.contestant, []).append(curve)
    return found


def _density(contestant: str) -> float:
    text = contestant.partition(":")[2].partition(",")[0]
    return float(text) if text.replace(".", "").isdigit() else 1.0


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and from where to where."""
    if not values:
        return "-"
    whole = f"{mean(values):{form}}"
    return whole if len(values) == 1 else f"{whole} ({min(values):{form}} – {max(values):{form}})"


def equal_steps(curves: Sequence[Curve]) -> str:
    """Final values, and their ratio to dense's at the same step with the same seed."""
    dense = {curve.seed: curve for curve in curves if curve.contestant == DENSE}
    head = ["contestant", "ranks by seed", "steps", "final loss", "/ dense", "accuracy, %", "points to dense",
            "norm waiting", "age, steps", "kB per step"]  # fmt: skip
    rows = []
    for name, runs in named(curves).items():
        pairs = [(run, dense[run.seed]) for run in runs if run.seed in dense and dense[run.seed].steps >= run.steps]
        ratios = [run.final() / rival.final(step=run.steps) for run, rival in pairs]
        sent = [run.points[-1]["sent_nbytes"] / run.steps for run in runs if run.how == "real"]
        rows.append([
            name, ", ".join(run.how for run in runs), " / ".join(sorted({str(run.steps) for run in runs})),
            spread([run.final() for run in runs], ".4f"), spread(ratios, ".3f"),
            *_accuracy(runs, pairs), f"{mean(run.points[-1]['residual_norm'] for run in runs):.3g}",
            f"{mean(run.points[-1]['age_steps'] for run in runs):.0f}", f"{mean(sent) / 1e3:.0f}" if sent else "-",
        ])  # fmt: skip
    if "validation_accuracy" not in curves[0].points[-1]:
        head, rows = head[:5] + head[7:], [row[:5] + row[7:] for row in rows]
    return table(head, rows)


def _accuracy(runs: Sequence[Curve], pairs: Sequence[tuple[Curve, Curve]]) -> tuple[str, str]:
    """In percent, and how many points that is from dense's."""
    name = "validation_accuracy"
    if name not in runs[0].points[-1]:
        return "-", "-"
    away = [100 * (run.final(name) - rival.final(name)) for run, rival in pairs]
    return spread([100 * run.final(name) for run in runs], ".2f"), spread(away, "+.2f")


def over_time(curves: Sequence[Curve]) -> str:
    """When each run reached what dense ended with, on the same network with the same seed."""
    dense = {curve.seed: curve for curve in curves if curve.contestant == DENSE}
    head = ["contestant", "seed", "steps", "seconds", "ms per step, median", "final loss", "dense's reached at step",
            "after s", "/ dense's whole time", "/ dense's time to it", "MB sent"]  # fmt: skip
    rows = []
    for name, runs in named(curves).items():
        for run in runs:
            end, rival = run.points[-1], dense.get(run.seed)
            row = [name, str(run.seed), str(end["step"]), f"{end['time_s']:.0f}", f"{1e3 * _step_s(run):.0f}",
                   f"{run.final():.4f}"]  # fmt: skip
            there = run.reached(rival.final()) if rival else None
            first = rival.reached(rival.final()) if rival else None
            if there and first and rival:
                row += [str(there["step"]), f"{there['time_s']:.0f}",
                        f"{there['time_s'] / rival.points[-1]['time_s']:.2f}",
                        f"{there['time_s'] / first['time_s']:.2f}"]  # fmt: skip
            else:
                row += ["never" if rival else "-", "-", "-", "-"]
            rows.append([*row, f"{end['sent_nbytes'] / 1e6:.0f}"])
    return table(head, rows)


def _step_s(run: Curve) -> float:
    """The median over the stretches between points."""
    pairs = zip(run.points[:-1], run.points[1:], strict=True)
    rates = sorted((b["time_s"] - a["time_s"]) / (b["step"] - a["step"]) for a, b in pairs)
    return float(rates[len(rates) // 2])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def curves_plot(panels: Sequence[tuple[str, str, str, str, Sequence[Curve]]], title: str) -> bytes:
    """A panel each of (what to draw, over what, its labels, runs): the mean of the seeds, their range as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(panels), 4.6), dpi=120, layout="constrained")
    styles: dict[str, int] = {}
    drawn = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (what, over, unit, across, runs) in zip(drawn, panels, strict=True):
        for name, group in named(runs).items():
            _line(axes, name, styles.setdefault(name, len(styles)), group, what, over)
        axes.set_xlabel(across)
        axes.set_title(unit, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        if what == "validation_loss":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value:.2g}")
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11, parse_math=False)
    return svg_of(figure)


def _line(axes: "Axes", name: str, style: int, group: Sequence[Curve], what: str, over: str) -> None:
    """One contestant; runs over time have clocks of their own, so each is a line."""
    colour, marker = COLOURS[style % len(COLOURS)], MARKERS[style % len(MARKERS)]
    dashes = "-" if style < len(COLOURS) else "--"
    values = [run.smooth(what)[1:] for run in group]
    if over == "step":
        across = [point["step"] for point in group[0].points[1:]]
        every = list(zip(*values, strict=False))
        axes.plot(across[: len(every)], [mean(column) for column in every], color=colour, marker=marker, markersize=4,
                  markevery=10, linewidth=1.3, linestyle=dashes, label=name)  # fmt: skip
        axes.fill_between(across[: len(every)], [min(c) for c in every], [max(c) for c in every], color=colour,
                          alpha=0.2, linewidth=0)  # fmt: skip
        return
    for number, (run, column) in enumerate(zip(group, values, strict=True)):
        axes.plot([point[over] for point in run.points[1:]], column, color=colour, marker=marker, markersize=4,
                  markevery=10, linewidth=1.3, linestyle=dashes, label=None if number else name)  # fmt: skip


def tasks(curves: Sequence[Curve]) -> list[str]:
    """In the order in which they came."""
    return list(dict.fromkeys(curve.task for curve in curves))


def pictures(curves: Sequence[Curve], path: str, shown: Callable[[str], bool]) -> None:
    """Over steps, over time, and the residual."""
    steps = [c for c in curves if c.how != "timed" and shown(c.contestant)]
    char = [c for c in steps if c.task == "char"]
    digits = [c for c in steps if c.task == "digits"]
    panels: list[tuple[str, str, str, str, Sequence[Curve]]]
    panels = [("validation_loss", "step", "characters: validation loss, nats (logarithmic)", "step", char)]
    if digits:
        panels.append(("validation_accuracy", "step", "digits: share of unseen digits read", "step", digits))
    if steps:
        drawn = curves_plot(panels, "Over steps, 4 ranks: mean of the seeds, and their range")
        Path(f"{path}_steps.svg").write_bytes(drawn)
    sparse = [c for c in char if c.contestant != DENSE and "weigh" not in c.contestant]  # which has other units
    panels = [("residual_norm", "step", "norm of the residual on a rank", "step", sparse),
              ("age_steps", "step", "its age in steps, weighted by magnitude", "step", sparse)]  # fmt: skip
    if sparse:
        Path(f"{path}_waiting.svg").write_bytes(curves_plot(panels, "Residual, characters: means over 4 ranks"))
    timed = [c for c in curves if c.how == "timed"]
    panels = [("validation_loss", over, f"{task}: validation loss (logarithmic)", across, group)
              for task in tasks(timed) for over, across in (("step", "step"), ("time_s", "seconds"))
              if (group := [c for c in timed if c.task == task])]  # fmt: skip
    if panels:
        Path(f"{path}_time.svg").write_bytes(curves_plot(panels, "Over time on a network that binds dense training"))


def main() -> None:
    """Print the tables and draw the pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--pictures", help="path without its ending")
    parser.add_argument("--shown", nargs="*", help="contestants in the pictures; all, if not given")
    options = parser.parse_args()
    curves = read(options.files)
    for task in tasks(curves):
        if chosen := [c for c in curves if c.task == task and c.how != "timed"]:
            print(f"{task}, equal steps\n\n{equal_steps(chosen)}\n")
        if chosen := [c for c in curves if c.task == task and c.how == "timed"]:
            print(f"{task}, over time\n\n{over_time(chosen)}\n")
    if options.pictures:
        pictures(curves, options.pictures, lambda name: options.shown is None or name in options.shown)


if __name__ == "__main__":
    main()
