"""Which gradients shall leave a compiled model together: a cut costs computing, and a missing one delays a bucket."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from anabranch import planners
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.sim.iteration import Message, messages, schedule
from anabranch.trace import Trace
from anabranch.tuning.live_trials import LiveTrials, Schedule, steps
from anabranch.tuning.policy import TuningPolicy
from anabranch.tuning.trial import Trial

LATE = "all gradients come at the end of backward, as when the whole model is one compiled graph"
MOST_PARTS = 16  # about as many as graphs are cut into at most; all of them are compared pair by pair
CUT_SHARE = 0.001  # of a step: a cut that saves less is left out, since it costs launches and fusion

Parts = Sequence[Sequence[str]]  # names of gradients that leave together, in order


class Graphs(Protocol):
    """The graphs that torch.compile has made of a model."""

    def would_change(self, parts: Parts) -> bool:
        """Whether ``cut_for`` would have a graph compiled again."""
        ...

    def cut_for(self, parts: Parts | None) -> None:
        """Let these gradients leave together, part by part, from the next forward on; None: as finely as at first."""
        ...

    def settle(self) -> None:
        """Keep the cuts in force for good."""
        ...

    def note_late(self, what: str) -> None:
        """All gradients came at the end of backward: remember why, or ``what`` if nobody knows, for explain()."""
        ...

    def lines(self) -> list[str]:
        """For explain(): how graphs are cut, and what stands in the way."""
        ...


class NotCompiled:
    """The graphs of a model that has none."""

    def would_change(self, parts: Parts) -> bool:  # noqa: ARG002
        return False

    def cut_for(self, parts: Parts | None) -> None:
        """No-op: there is nothing to cut."""

    def settle(self) -> None:
        """No-op, too."""

    def note_late(self, what: str) -> None:
        """No-op: only compiled models have reasons."""

    def lines(self) -> list[str]:
        return []


NOT_COMPILED = NotCompiled()


def parts_of(plan: Plan) -> Parts:
    """One part for each bucket."""
    return [bucket.names for bucket in plan.buckets]


def needed_parts(trace: Trace, plan: Plan | None, network: Network | None) -> Parts:
    """The parts for this plan, or for DDP's own buckets: as few as let it end as early as one for each bucket would.

    Where no network is known nothing can be predicted, and each bucket is a part.
    """
    if plan is None:
        plan = planners.by_bytes(trace, network or Network.ring(2, 0.0, 0.0))  # which does not ask the network
    parts = [list(bucket.names) for bucket in plan.buckets]
    if network is None:
        return parts
    ends = [[message] for message in messages(trace, plan, network)]  # by part
    parts, ends = _at_most(MOST_PARTS, trace, parts, ends)

    def finish_s(ends: Sequence[Sequence[Message]]) -> float:
        late = [message._replace(ready_s=max(other.ready_s for other in part)) for part in ends for message in part]
        return max(end_s for _, end_s in schedule(late, network.contention))

    longest_s = finish_s(ends)
    cut_s = CUT_SHARE * (trace.forward_s + longest_s)
    while len(parts) > 1:
        longest_s += cut_s
        merged = [[*ends[:i], [*ends[i], *ends[i + 1]], *ends[i + 2 :]] for i in range(len(ends) - 1)]
        least_s, index = min((finish_s(option), i) for i, option in enumerate(merged))
        if least_s > longest_s:
            break
        ends = merged[index]
        parts[index : index + 2] = [[*parts[index], *parts[index + 1]]]
    return parts


def _at_most(
    count: int, trace: Trace, parts: list[list[str]], ends: list[list[Message]]
) -> tuple[list[list[str]], list[list[Message]]]:
    """Neighbouring parts merged until there are hardly more than so many, of about as many bytes each."""
    if len(parts) <= count:
        return parts, ends
    sizes = {tensor.name: tensor.nbytes for tensor in trace.tensors}
    share = trace.nbytes / count
    merged: list[list[str]] = []
    merged_ends: list[list[Message]] = []
    nbytes = share  # of the last one: the first part begins a new one
    for names, messages_of in zip(parts, ends, strict=True):
        if nbytes >= share:
            merged.append([])
            merged_ends.append([])
            nbytes = 0
        merged[-1] += names
        merged_ends[-1] += messages_of
        nbytes += sum(sizes[name] for name in names)
    return merged, merged_ends


def settled(
    graphs: Graphs, best: Trial, parts: Parts, again: bool, live: LiveTrials, policy: TuningPolicy
) -> Schedule[tuple[list[Trial], Trial]]:
    """Settle where graphs are cut; ``again``: for these parts, in turns with the fine cuts, if that is faster.

    Returns the trials of the best layout, and the faster of them, which is in force. The first step compiles the model
    once more, which no trial counts.
    """
    if not again:
        if not graphs.would_change(parts):
            graphs.cut_for(parts)  # for graphs that torch makes later
        graphs.settle()
        return [best], best
    graphs.cut_for(parts)
    yield from steps(policy.warmup_steps)
    graphs.cut_for(None)
    yield from steps(policy.settle_steps)
    finely, tried, faster = yield from live.challenge(
        best,
        f"{best.label}, graphs cut for it",
        best.plan,
        change=lambda ours: graphs.cut_for(parts if ours else None),
    )
    graphs.settle()
    tried = replace(tried, doubtful=best.doubtful)
    return [finely, tried], tried if faster else finely
