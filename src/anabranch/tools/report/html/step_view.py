"""StepView: one training step, predicted or measured, with its buckets where they are known."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from anabranch.tools.predict.scaling.compression import sent_nbytes
from anabranch.tools.report.documents import PlanDocument, SimulateDocument
from anabranch.tools.report.runs.reading import Runs
from anabranch.tools.report.runs.window import RankStep, Wait
from anabranch.values.errors import PlanError
from anabranch.values.plan import Bucket, Plan, bucket_label
from anabranch.values.timeline import COMPUTE, Span, Timeline
from anabranch.values.trace import TensorSpec, Trace

BUCKET_NUMBER = re.compile(r"bucket (\d{1,9})\b", re.ASCII)
Predicted = tuple[str, Timeline, Plan, Trace]  # a title, and a step that was simulated
MAX_RANKS = 4  # of a window; Perfetto shows more


@dataclass(frozen=True)  # no slots: cached_property needs a __dict__
class StepView:
    """One step. ``buckets`` by the number in the names of spans; ``trace`` holds their gradients, where it is known.

    ``waits``: for which rank the messages waited at first, by the name of their span.
    """

    title: str
    measured: bool
    timeline: Timeline
    buckets: Mapping[int, Bucket]
    trace: Trace | None = None
    waits: Mapping[str, Wait] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """The gradients by name; empty without a trace."""
        return {tensor.name: tensor for tensor in self.trace.tensors} if self.trace is not None else {}

    @property
    def waited_s(self) -> dict[int, float]:
        """How long it waited for each of the ranks that it waited for."""
        found: dict[int, float] = {}
        for span in self.timeline.communication:
            if (wait := self.waits.get(span.name)) is not None:
                found[wait.rank] = found.get(wait.rank, 0.0) + min(wait.until_s, span.end_s) - span.start_s
        return found

    def sent_nbytes(self, bucket: Bucket) -> int | None:
        """What one rank sends for a bucket; None where the number of ranks, a gradient or the collective is unknown."""
        ranks = self.timeline.meta.get("world_size")
        known = [self.tensors[name] for name in bucket.names if name in self.tensors]
        if not isinstance(ranks, int) or ranks < 1 or len(known) < len(bucket.names):
            return None
        return sent_nbytes(bucket.collective, known, ranks)

    def number(self, span: Span) -> int | None:
        """The number of the bucket that a span of a lane shows; None where its name has none."""
        found = BUCKET_NUMBER.match(span.name)
        return int(found[1]) if found else None


def step_views(runs: Runs, predicted: Sequence[Predicted]) -> list[StepView]:
    """Predicted steps, then measured ones; ``predicted`` are the steps that the caller simulated."""
    found = [StepView(title, False, timeline, _by_number(plan), trace) for title, timeline, plan, trace in predicted]
    found += [_predicted_view(name, step, runs) for name, step in runs.steps]
    for name, timeline in runs.timelines:
        plan, trace = _matching_plan(timeline, runs)
        measured = timeline.meta.get("source") != "simulated"
        found.append(StepView(name, measured, timeline, _by_number(plan), trace))
    for name, ranks in runs.windows:
        found += [_rank_view(name, one) for one in ranks[:MAX_RANKS]]
    return sorted(found, key=lambda view: view.measured)


def plan_fits(plan: Plan, trace: Trace) -> bool:
    """Whether the plan has exactly the gradients of this trace."""
    try:
        plan.check(trace)
    except PlanError:
        return False
    return True


def _by_number(plan: Plan | None) -> dict[int, Bucket]:
    return dict(enumerate(plan.buckets)) if plan is not None else {}


def _matching_plan(timeline: Timeline, runs: Runs) -> tuple[Plan | None, Trace | None]:
    """The plan and trace among the files that belong to a timeline, by the names of its spans."""
    names = {span.name for span in timeline.communication}
    for _, plan in runs.plans:
        labels = {bucket_label(number, bucket.collective, bucket.names) for number, bucket in enumerate(plan.buckets)}
        if names <= labels:
            return plan, next((trace for _, trace in runs.traces if plan_fits(plan, trace)), None)
    return None, None


def _predicted_view(name: str, step: PlanDocument | SimulateDocument, runs: Runs) -> StepView:
    """A step that the commands plan or simulate predicted."""
    spans = [Span(COMPUTE, "forward", -step.forward_s, 0.0), Span(COMPUTE, "backward", 0.0, step.backward_s)]
    spans += [Span(f"lane {row.lane}", f"bucket {row.index}", row.start_s, row.end_s) for row in step.buckets]
    buckets = {row.index: Bucket(row.names, row.lane, row.collective) for row in step.buckets if row.names}
    planned = {name for bucket in buckets.values() for name in bucket.names}
    trace = next((trace for _, trace in runs.traces if {t.name for t in trace.tensors} == planned), None)
    timeline = Timeline(tuple(spans), {"source": "simulated", "world_size": step.world_size})
    title = f"{name}: {_plan_name(step)} on {step.world_size:,} ranks"
    return StepView(title, False, timeline, buckets, trace)


def _rank_view(name: str, one: RankStep) -> StepView:
    buckets: dict[int, Bucket] = {}
    for label, names in one.tensors.items():
        number = BUCKET_NUMBER.match(label)
        if number and names:
            collective = label.partition(": ")[2].partition(",")[0] or "dense"
            buckets[int(number[1])] = Bucket(names, 0, collective)
    return StepView(f"{name}: step {one.step:,}, rank {one.rank}", True, one.timeline, buckets, waits=one.waits)


def _plan_name(step: PlanDocument | SimulateDocument) -> str:
    return step.planner or (step.plan if isinstance(step, SimulateDocument) else None) or "a plan"
