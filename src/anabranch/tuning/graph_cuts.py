"""Which gradients shall leave a compiled model together: a cut costs computing, and a missing one delays a bucket."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from anabranch import planners
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.sim.iteration import Message, messages, schedule
from anabranch.trace import Trace

LATE = "all gradients come at the end of backward, as when the whole model is one compiled graph"
MOST_PARTS = 16  # about as many as graphs are cut into at most; all of them are compared pair by pair

Parts = Sequence[Sequence[str]]  # names of gradients that leave together, in order


class Graphs(Protocol):
    """The graphs that torch.compile has made of a model."""

    @property
    def parts(self) -> Parts | None:
        """What graphs are cut for; None: as finely as at first."""
        ...

    @property
    def can_change(self) -> bool:
        """Whether there is a graph that can be compiled again."""
        ...

    def cuts_for(self, parts: Parts | None) -> int:
        """How many cuts there are in all graphs if they are cut for these parts; None: as finely as at first."""
        ...

    def would_change(self, parts: Parts) -> bool:
        """Whether ``cut_for`` would have a graph compiled again."""
        ...

    def cut_for(self, parts: Parts | None) -> None:
        """Let these gradients leave together, part by part, from the next forward on; None: as finely as at first."""
        ...

    def settle(self) -> None:
        """Keep the cuts in force for good."""
        ...

    def step_ended(self) -> None:
        """A step has ended: what it took, if something was compiled in it, counts as compiling."""
        ...

    def note_late(self, what: str) -> None:
        """All gradients came at the end of backward: remember why, or ``what`` if nobody knows, for explain()."""
        ...

    def lines(self) -> list[str]:
        """For explain(): how graphs are cut, and what stands in the way."""
        ...


class NotCompiled:
    """The graphs of a model that has none."""

    parts: Parts | None = None
    can_change = False

    def cuts_for(self, parts: Parts | None) -> int:  # noqa: ARG002
        return 0

    def would_change(self, parts: Parts) -> bool:  # noqa: ARG002
        return False

    def cut_for(self, parts: Parts | None) -> None:
        """No-op: there is nothing to cut."""

    def settle(self) -> None:
        """No-op, too."""

    def step_ended(self) -> None:
        """No-op: nothing was compiled."""

    def note_late(self, what: str) -> None:
        """No-op: only compiled models have reasons."""

    def lines(self) -> list[str]:
        return []


NOT_COMPILED = NotCompiled()


def parts_of(plan: Plan) -> Parts:
    """One part for each bucket."""
    return [bucket.names for bucket in plan.buckets]


def parts_of_ddp(trace: Trace) -> Parts:
    """One part for each of DDP's own buckets."""
    return parts_of(_buckets(trace, None))


def needed_parts(trace: Trace, plan: Plan | None, network: Network | None, cut_s: float) -> Parts:
    """The parts for this plan, or for DDP's own buckets: a cut that saves less than it costs, ``cut_s``, is left out.

    Where no network is known nothing can be predicted, and each bucket is a part.
    """
    buckets = _buckets(trace, plan)
    parts = [list(bucket.names) for bucket in buckets.buckets]
    if network is None:
        return parts
    network = network if plan is not None else replace(network, delays={})  # which are in the trace, of DDP's own
    ends = [[message] for message in messages(trace, buckets, network)]  # by part
    parts, ends = _at_most(MOST_PARTS, trace, parts, ends)

    def finish_s(ends: Sequence[Sequence[Message]]) -> float:
        late = [message._replace(ready_s=max(other.ready_s for other in part)) for part in ends for message in part]
        return max(end_s for _, end_s in schedule(late, network.contention))

    longest_s = finish_s(ends)
    while len(parts) > 1:
        longest_s += cut_s
        merged = [[*ends[:i], [*ends[i], *ends[i + 1]], *ends[i + 2 :]] for i in range(len(ends) - 1)]
        least_s, index = min((finish_s(option), i) for i, option in enumerate(merged))
        if least_s > longest_s:
            break
        ends = merged[index]
        parts[index : index + 2] = [[*parts[index], *parts[index + 1]]]
    return parts


def step_in_parts_s(trace: Trace, plan: Plan | None, network: Network, parts: Parts) -> float:
    """The simulated step if the gradients of each part leave together, when the last of them is there."""
    network = network if plan is not None else replace(network, delays={})
    plan = _buckets(trace, plan)
    ready_s = {tensor.name: tensor.ready_s for tensor in trace.tensors}
    late_s = {name: max(ready_s[other] for other in part) for part in parts for name in part}
    late, delays_s = [], 0.0
    for bucket, message in zip(plan.buckets, messages(trace, plan, network), strict=True):
        late.append(message._replace(ready_s=delays_s + max(late_s[name] for name in bucket.names)))
        delays_s += network.delay_s(bucket.collective)
    ends_s = [end_s for _, end_s in schedule(late, network.contention)]
    return trace.forward_s + max(trace.backward_s + delays_s, *ends_s)


def _buckets(trace: Trace, plan: Plan | None) -> Plan:
    """The plan, or DDP's own buckets."""
    return plan if plan is not None else planners.by_bytes(trace, Network.ring(2, 0.0, 0.0))  # needs no network


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
