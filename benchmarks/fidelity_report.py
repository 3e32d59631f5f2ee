"""The curves of ``fidelity.py`` as a Markdown table, on stdout, and as pictures beside it.

    python -m benchmarks.fidelity_report curves.jsonl --times times.jsonl --pictures benchmarks/fidelity_h200_2026-11-16

A final value is the mean of the last three points. Over time, a step counts as long as ``fidelity_times.py`` measured
it on a network. "Reaches dense's" is when the mean of three points in a row is at most 0.3 % above dense's final loss;
"at equal time" is the loss when the fastest of all has done its last step: learning rates of the others have not fallen
to the end then, which makes them look worse than trainings planned for that time.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.convergence_report import Curve, curves_plot, spread, table, tasks

DENSE, SIXTEEN = "dense", "bf16"
CLOSE = 1.003  # by which a loss may be above dense's to count as the same


def read(paths: Sequence[Path]) -> list[Curve]:
    """All runs in some files; a run that was begun twice counts from its last beginning."""
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            point = json.loads(line)
            run = runs[point["task"], point["contestant"], point["seed"]]
            if point["step"] == 0:
                run.clear()
            run.append(point)
    return [Curve(task, name, seed, "virtual", tuple(points)) for (task, name, seed), points in runs.items()]


def by_contestant(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """In the order in which they came, dense and its 16-bit rival first."""
    names = sorted(dict.fromkeys(c.contestant for c in curves), key=lambda name: (name != DENSE, name != SIXTEEN))
    return {name: [curve for curve in curves if curve.contestant == name] for name in names}


def ratios(runs: Sequence[Curve], rivals: Sequence[Curve]) -> list[float]:
    """Final loss by that of the rival with the same seed, at the same number of steps."""
    known = {rival.seed: rival for rival in rivals}
    return [run.final() / known[run.seed].final(step=run.steps) for run in runs if run.seed in known]


def equal_steps(curves: Sequence[Curve]) -> str:
    """Final losses, as they are and by those of dense and of bf16."""
    runs = by_contestant(curves)
    rows = []
    for name, own in runs.items():
        rows.append([
            name, str(len(own)), " / ".join(sorted({str(run.steps) for run in own})),
            spread([run.final() for run in own], ".4f"),
            *(_percent(ratios(own, runs.get(rival, []))) for rival in (DENSE, SIXTEEN)),
        ])  # fmt: skip
    return table(["", "seeds", "steps", "final loss", "above dense", "above bf16"], rows)


def _percent(found: Sequence[float]) -> str:
    return spread([100 * (ratio - 1) for ratio in found], "+.2f") + " %" if found else "-"


def over_time(curves: Sequence[Curve], step_ms: dict[str, float]) -> str:
    """What the steps take on one network, and when each reaches dense's final loss, mean of the seeds."""
    dense = {curve.seed: curve for curve in curves if curve.contestant == DENSE}
    rows, fastest_ms = [], min(step_ms[c.contestant] * c.steps for c in curves if c.contestant in step_ms)
    for name, runs in by_contestant(curves).items():
        if name not in step_ms or DENSE not in step_ms:
            continue
        reached = [there for run in runs if (there := run.reached(CLOSE * dense[run.seed].final()))]
        step = mean(there["step"] for there in reached) if len(reached) == len(runs) else None
        first = mean(point["step"] for curve in dense.values() if (point := curve.reached(CLOSE * curve.final())))
        faster = step_ms[DENSE] * first / (step_ms[name] * step) if step else None
        then = [run.final(step=int(fastest_ms / step_ms[name])) for run in runs]
        rows.append([name, f"{step_ms[name]:.1f}", f"{step_ms[name] / step_ms[DENSE]:.3f}", spread(then, ".4f"),
                     f"{step:.0f}" if step else "never", f"{faster:.1f}×" if faster else "-"])  # fmt: skip
    head = ["", "ms per step", "/ dense", "loss at equal time", "reaches dense's final loss at step",
            "sooner than dense"]  # fmt: skip
    return table(head, rows) if rows else ""


def step_times(told: Mapping[str, float], task: str, rate: str) -> dict[str, float]:
    """By contestant. A plan that "auto" chose on this network is called by the task and the rate, too."""
    return {**told, **{f"{name.replace(':', '-')}-{task}-{rate}": step_ms for name, step_ms in told.items()}}


def main() -> None:
    """Print the tables and draw the pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--times", type=Path, nargs="*", default=[])
    parser.add_argument("--pictures", help="path without its ending")
    options = parser.parse_args()
    curves = read(options.files)
    times: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for path in options.times:
        for line in path.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)
            times[told["task"], told["rate"]][told["contestant"]] = told["step_ms"]
    for task in tasks(curves):
        own = [curve for curve in curves if curve.task == task]
        print(f"## {task}, equal steps\n\n{equal_steps(own)}\n")
        for (name, rate), step_ms in times.items():
            if name == task and (text := over_time(own, step_times(step_ms, task, rate))):
                print(f"## {task}, over time at {rate}\n\n{text}\n")
    if options.pictures:
        panels = [("validation_loss", "step", f"{task}: validation loss (logarithmic)", "step",
                   [curve for curve in curves if curve.task == task]) for task in tasks(curves)]  # fmt: skip
        drawn = curves_plot(panels, "Over steps, 4 ranks: mean of the seeds, and their range")
        Path(f"{options.pictures}_steps.svg").write_bytes(drawn)


if __name__ == "__main__":
    main()
