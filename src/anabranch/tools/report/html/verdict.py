"""The sentence that a page opens with: how much was gained, or that nothing was; the strongest that its files allow."""

from collections.abc import Sequence
from statistics import median

from anabranch.tools.report.demo import headline
from anabranch.tools.report.documents import BASELINE, LEAST_GAIN, OURS
from anabranch.tools.report.formatting import factor, percent, seconds, size
from anabranch.tools.report.html.step_view import StepView
from anabranch.tools.report.runs.reading import Runs
from anabranch.tools.report.runs.training import Training

FEWEST_STEPS = 3  # whose median says something


def conditions(runs: Runs) -> str:
    """On what a demo was measured, to stand under its verdict; empty without a demo."""
    return next((f"Measured in this run: {demo.link}." for _, demo in runs.demos), "")


def verdict(runs: Runs, steps: Sequence[StepView]) -> str:
    """The first that can be said, what was measured before what was predicted; empty where there is none."""
    found = (
        _of_demo(runs), _of_benchmark(runs), _of_training(runs), _of_step(steps), _of_comparison(runs),
        _of_scaling(runs), _of_memory(runs),
    )  # fmt: skip
    return next(filter(None, found), "")


def _of_demo(runs: Runs) -> str:
    return next((headline(demo) for _, demo in runs.demos), "")


def _of_benchmark(runs: Runs) -> str:
    for benchmark in (one for _, found in runs.benches for one in found.benchmarks):
        if OURS not in {row.name for row in benchmark.rows}:
            continue
        row, base = benchmark.row(OURS), benchmark.row(BASELINE)
        times = f"{seconds(row.step_s)} a step, DDP {seconds(base.step_s)}"
        if benchmark.is_faster(row):
            return (
                f"{benchmark.model}: {row.name} is {factor(1 / benchmark.ratio_to_ddp(row))} as fast as DDP ({times})."
            )
        return f"{benchmark.model}: {row.name} is no faster than DDP beyond the noise ({times})."
    return ""


def _of_training(runs: Runs) -> str:
    return next((words for training in runs.trainings if (words := _gained(training))), "")


def _gained(training: Training) -> str:
    """The layout in force at the end beside DDP's own buckets in the same training; empty where it is too short."""
    timed = [line for line in training.lines if line.measured_s is not None]
    if len(timed) < FEWEST_STEPS:
        return ""
    last = timed[-1].plan
    own = [line.measured_s or 0.0 for line in timed if line.plan is None]
    kept = [line.measured_s or 0.0 for line in timed if line.plan == last]
    if last is None:
        return f"Nothing is gained: {training.name} ends with DDP's own buckets, {seconds(median(own))} a step."
    if min(len(own), len(kept)) < FEWEST_STEPS:
        return ""
    own_s, kept_s = median(own), median(kept)
    times = f"{seconds(kept_s)} a step, DDP's own buckets {seconds(own_s)}; medians of {training.name}"
    if kept_s > (1 - LEAST_GAIN) * own_s:
        return f"The plan in force is no faster than DDP's own buckets ({times})."
    return f"The plan in force is {factor(own_s / kept_s)} as fast as DDP's own buckets ({times})."


def _of_step(steps: Sequence[StepView]) -> str:
    view = next((view for view in reversed(steps) if view.timeline.iteration_s > 0), None)
    if view is None:
        return ""
    step = view.timeline
    return (
        f"Of a step of {seconds(step.iteration_s)}, {percent(step.exposed_s / step.iteration_s)} is exposed "
        f"communication ({'measured' if view.measured else 'predicted'})."
    )


def _of_comparison(runs: Runs) -> str:
    for _, found in runs.comparisons:
        best = next((row for row in found.rows if row.name == found.best), None)
        if best is not None and best.speedup is not None:
            return f"Predicted: {best.name}, the best dense plan, is {factor(best.speedup)} as fast as DDP's buckets."
    return ""


def _of_scaling(runs: Runs) -> str:
    return next((f"Predicted, {found.model}: {found.answer[0]}" for _, found in runs.scalings if found.answer), "")


def _of_memory(runs: Runs) -> str:
    for _, found in runs.memories:
        peaks = {mode: peak.predicted_nbytes for mode, peak in found.modes.items()}
        if len(peaks) > 1:
            listed = ", ".join(f"{mode} {size(nbytes)}" for mode, nbytes in sorted(peaks.items(), key=lambda at: at[1]))
            return f"Predicted peak memory of a rank, {found.model}: {listed}."
    return ""
