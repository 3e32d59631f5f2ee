"""Which gradients shall leave a compiled model together: a cut costs computing, and a missing one delays a bucket."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from anabranch import planning as planners
from anabranch.planning.simulator import messages, schedule
from anabranch.tuning.calibration import as_recorded
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

LATE = "all gradients come at the end of backward, as when the whole model is one compiled graph"
MOST_PARTS = 16  # about as many as graphs are cut into at most; all of them are compared pair by pair
LEAST_COMPUTING = 0.1  # share of computing that is left at least, whatever cuts are said to cost
ROUNDING = 1e-9  # a cut that saves nothing is left out, also where sums are rounded

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


def one_each(parts: Parts) -> int:
    """The number of cuts where a graph can be cut between any two parts."""
    return len(parts) - 1


def needed_parts(
    trace: Trace,
    plan: Plan | None,
    network: Network | None,
    cut_s: float,
    cuts_for: Callable[[Parts], int] = one_each,
) -> Parts:
    """The parts for this plan, or for DDP's own buckets: a cut that saves less of a step than it costs is left out.

    A cut adds ``cut_s`` to computing, of which a step that ends with its messages may save a part only. ``cuts_for``:
    how many cuts graphs have for these parts. Where no network is known nothing can be predicted, and each bucket is a
    part.
    """
    parts: Parts = parts_of(_buckets(trace, plan))
    if network is None:
        return parts
    parts = _at_most(MOST_PARTS, trace, _without_cut(parts, cuts_for))
    most = cuts_for(parts)

    def step_s(parts: Parts) -> float:
        return step_in_parts_s(trace, plan, network, parts, cut_s * (most - cuts_for(parts)))

    shortest_s = step_s(parts)
    while len(parts) > 1:
        found_s, index = min((step_s(_merged(parts, index)), index) for index in range(len(parts) - 1))
        if found_s > (1 + ROUNDING) * shortest_s:
            break
        parts, shortest_s = _merged(parts, index), min(found_s, shortest_s)
    return parts


def step_in_parts_s(trace: Trace, plan: Plan | None, network: Network, parts: Parts, saved_s: float = 0.0) -> float:
    """The simulated step if the gradients of each part leave together, when the last of them is there.

    ``saved_s``: by how much computing is shorter than in the trace, forward and backward alike.
    """
    if plan is None:
        trace, network = as_recorded(trace), replace(network, delays={})  # which are in the trace, of DDP's own
    plan = _buckets(trace, plan)
    if saved_s:
        trace = trace.scaled(max(LEAST_COMPUTING, 1 - saved_s / (trace.forward_s + trace.backward_s)))
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


def _merged(parts: Parts, index: int) -> Parts:
    """The parts, this one and the next as one."""
    return [*parts[:index], [*parts[index], *parts[index + 1]], *parts[index + 2 :]]


def _without_cut(parts: Parts, cuts_for: Callable[[Parts], int]) -> Parts:
    """The parts, those as one between which graphs cannot be cut: their gradients leave together anyway."""
    cuts, index = cuts_for(parts), 0
    while index < len(parts) - 1:
        if cuts_for(merged := _merged(parts, index)) == cuts:
            parts = merged
        else:
            index += 1
    return parts


def _at_most(count: int, trace: Trace, parts: Parts) -> Parts:
    """Neighbouring parts merged until there are hardly more than so many, of about as many bytes each."""
    if len(parts) <= count:
        return parts
    sizes = {tensor.name: tensor.nbytes for tensor in trace.tensors}
    share = trace.nbytes / count
    merged: list[list[str]] = []
    nbytes = share  # of the last one: the first part begins a new one
    for names in parts:
        if nbytes >= share:
            merged.append([])
            nbytes = 0
        merged[-1] += names
        nbytes += sum(sizes[name] for name in names)
    return merged
