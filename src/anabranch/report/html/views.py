"""Step views: one training step, predicted or measured, with what is known of its buckets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from anabranch.errors import PlanError
from anabranch.plan import Bucket, Plan, bucket_label
from anabranch.report.runs.documents import PlannedStep
from anabranch.report.runs.reading import Runs
from anabranch.report.runs.window import RankStep
from anabranch.timeline import COMPUTE, Span, Timeline
from anabranch.trace import TensorSpec, Trace

NUMBER = re.compile(r"bucket (\d{1,9})\b", re.ASCII)
MOST_RANKS = 4  # of a window: more rows than that are for Perfetto


@dataclass(frozen=True)  # without slots, which leave no room for what is cached
class View:
    """``buckets`` are by number, as spans of lanes name them; ``trace`` has their gradients, where it is known."""

    title: str
    measured: bool
    timeline: Timeline
    buckets: Mapping[int, Bucket]
    trace: Trace | None = None

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """By name; none where no trace is known."""
        return {tensor.name: tensor for tensor in self.trace.tensors} if self.trace is not None else {}

    def number(self, span: Span) -> int | None:
        """Of the bucket that a span of a lane shows; None where it does not say."""
        found = NUMBER.match(span.name)
        return int(found[1]) if found else None


def views(runs: Runs, predicted: Sequence[tuple[str, Timeline, Plan, Trace]]) -> list[View]:
    """Predicted steps, then measured ones. ``predicted`` are those that the caller simulated."""
    found = [View(title, False, timeline, _numbered(plan), trace) for title, timeline, plan, trace in predicted]
    found += [_of_document(name, step, runs) for name, step in runs.steps]
    for name, timeline in runs.timelines:
        plan, trace = _fitting(timeline, runs)
        measured = timeline.meta.get("source") != "simulated"
        found.append(View(name, measured, timeline, _numbered(plan), trace))
    for name, ranks in runs.windows:
        found += [_of_rank(name, one) for one in ranks[:MOST_RANKS]]
    return sorted(found, key=lambda view: view.measured)


def fits(plan: Plan, trace: Trace) -> bool:
    """Whether a plan is one for this trace."""
    try:
        plan.check(trace)
    except PlanError:
        return False
    return True


def _numbered(plan: Plan | None) -> dict[int, Bucket]:
    return dict(enumerate(plan.buckets)) if plan is not None else {}


def _fitting(timeline: Timeline, runs: Runs) -> tuple[Plan | None, Trace | None]:
    """The plan and trace among the files whose buckets a timeline shows, by how its spans call them."""
    names = {span.name for span in timeline.communication}
    for _, plan in runs.plans:
        labels = {bucket_label(number, bucket.collective, bucket.names) for number, bucket in enumerate(plan.buckets)}
        if names <= labels:
            return plan, next((trace for _, trace in runs.traces if fits(plan, trace)), None)
    return None, None


def _of_document(name: str, step: PlannedStep, runs: Runs) -> View:
    """A step that plan or simulate predicted; its buckets come with it."""
    spans = [Span(COMPUTE, "forward", -step.forward_s, 0.0), Span(COMPUTE, "backward", 0.0, step.backward_s)]
    spans += [Span(f"lane {row.lane}", f"bucket {row.index}", row.start_s, row.end_s) for row in step.buckets]
    buckets = {row.index: Bucket(row.names, row.lane, row.collective) for row in step.buckets if row.names}
    planned = {name for bucket in buckets.values() for name in bucket.names}
    trace = next((trace for _, trace in runs.traces if {t.name for t in trace.tensors} == planned), None)
    title = f"{name}: {step.planner or step.plan or 'a plan'} on {step.world_size:,} ranks"
    return View(title, False, Timeline(tuple(spans), {"source": "simulated"}), buckets, trace)


def _of_rank(name: str, one: RankStep) -> View:
    buckets: dict[int, Bucket] = {}
    for label, names in one.tensors.items():
        number = NUMBER.match(label)
        if number and names:
            collective = label.partition(": ")[2].partition(",")[0] or "dense"
            buckets[int(number[1])] = Bucket(names, 0, collective)
    return View(f"{name}: step {one.step:,}, rank {one.rank}", True, one.timeline, buckets)
