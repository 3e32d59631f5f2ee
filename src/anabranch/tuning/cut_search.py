"""Graph cuts: which gradients leave a compiled model together. A cut costs computing; a missing one delays a bucket.

While plans are tried, graphs are cut finely. Then two versions with fewer cuts are priced: the best plan with the cuts
that it needs, and DDP's own buckets with the cuts that torch makes for DDP. The faster one is compiled if it may gain,
and stays if it wins in turns with what was best. A policy may allow more compilations: then versions are priced once
more, by what a cut was measured to cost. If no version was worth it, DDP's is compiled where it would win at the
highest plausible price: graphs that stay cut finely shall not be slower than under compiled DDP.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from anabranch import planning as planners
from anabranch.planning.by_size import filled
from anabranch.planning.simulator import ends_s, messages
from anabranch.tuning.options import TuningPolicy
from anabranch.tuning.trial import Trial, as_recorded, predicted_s
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

LATE = "all gradients come at the end of backward, as when the whole model is one compiled graph"
MOST_PARTS = 16  # about as many as graphs are cut into at most; all of them are compared pair by pair
LEAST_COMPUTING = 0.1  # share of computing that is left at least, whatever cuts are said to cost
ROUNDING = 1e-9  # a cut that saves nothing is left out, also where sums are rounded
MOST_CUT_SHARE = 0.02  # of a step: twice what a cut is taken to cost
FEWER_CUTS = 0.02  # share of a step by which fewer cuts may look slower: noise, since they can hardly be

Parts = Sequence[Sequence[str]]  # names of gradients that leave together, in order


class Graphs(Protocol):
    """The graphs that torch.compile has made of a model, which may have none."""

    parts: Parts | None  # what graphs are cut for; None: as finely as at first

    @property
    def can_change(self) -> bool:
        """Whether there is a graph that can be compiled again."""

    def cuts_for(self, parts: Parts | None) -> int:
        """How many cuts there are in all graphs if they are cut for these parts; None: as finely as at first."""

    def would_change(self, parts: Parts) -> bool:
        """Whether ``cut_for`` would have a graph compiled again."""

    def cut_for(self, parts: Parts | None) -> None:
        """Let these gradients leave together, part by part, from the next forward on; None: as finely as at first."""

    def settle(self) -> None:
        """Keep the cuts in force for good."""

    def note_late(self, what: str) -> None:
        """All gradients came at the end of backward: remember why, or ``what`` if nobody knows, for explain()."""

    def lines(self) -> list[str]:
        """For explain(): how graphs are cut, and what prevents finer cuts."""


def parts_of(plan: Plan) -> Parts:
    """One part for each bucket."""
    return [bucket.names for bucket in plan.buckets]


def parts_of_ddp(trace: Trace) -> Parts:
    """One part for each of DDP's own buckets."""
    return parts_of(_plan_or_ddps(trace, None))


def one_each(parts: Parts | None) -> int:
    """The number of cuts where a graph can be cut between any two parts."""
    return len(parts or ()) - 1


def needed_parts(
    trace: Trace,
    plan: Plan | None,
    network: Network | None,
    cut_s: float,
    cuts_for: Callable[[Parts | None], int] = lambda _: 0,
) -> Parts:
    """The parts for this plan, or for DDP's own buckets: a cut that saves less of a step than it costs is left out.

    A cut adds ``cut_s`` to computing. Where no network is known nothing can be predicted, and each bucket is a part.
    ``cuts_for``: how many cuts graphs have for these parts. If they have none for None, these are the parts of later
    graphs, which can be cut between any two.
    """
    if not cuts_for(None):
        cuts_for = one_each
    parts: Parts = parts_of(_plan_or_ddps(trace, plan))
    if network is None:
        return parts
    parts = _merged_to_about(MOST_PARTS, trace, _uncut_merged(parts, cuts_for))
    most = cuts_for(parts)

    def step_s(parts: Parts) -> float:
        return step_in_parts_s(trace, plan, network, parts, cut_s * (most - cuts_for(parts)))

    shortest_s = step_s(parts)
    while len(parts) > 1:
        found_s, index = min((step_s(_with_next_merged(parts, index)), index) for index in range(len(parts) - 1))
        if found_s > (1 + ROUNDING) * shortest_s:
            break
        parts, shortest_s = _with_next_merged(parts, index), min(found_s, shortest_s)
    return parts


def step_in_parts_s(trace: Trace, plan: Plan | None, network: Network, parts: Parts, saved_s: float = 0.0) -> float:
    """The simulated step if the gradients of each part leave together, when the last of them is there.

    ``saved_s``: by how much computing is shorter than in the trace, forward and backward alike.
    """
    if plan is None:
        trace, network = as_recorded(trace), replace(network, delays={})  # which are in the trace, of DDP's own
    plan = _plan_or_ddps(trace, plan)
    if saved_s:
        trace = trace.scaled(max(LEAST_COMPUTING, 1 - saved_s / (trace.forward_s + trace.backward_s)))
    ready_s = {tensor.name: tensor.ready_s for tensor in trace.tensors}
    late_s = {name: max(ready_s[other] for other in part) for part in parts for name in part}
    late, delays_s = [], 0.0
    for bucket, message in zip(plan.buckets, messages(trace, plan, network), strict=True):
        late.append(message._replace(ready_s=delays_s + max(late_s[name] for name in bucket.names)))
        delays_s += network.delay_s(bucket.collective)
    return trace.forward_s + max(trace.backward_s + delays_s, *ends_s(late, network.contention))


def _plan_or_ddps(trace: Trace, plan: Plan | None) -> Plan:
    """The plan, or DDP's own buckets."""
    return plan if plan is not None else planners.by_bytes(trace, Network.ring(2, 0.0, 0.0))  # needs no network


def _with_next_merged(parts: Parts, index: int) -> Parts:
    """The parts, this one and the next as one."""
    return [*parts[:index], [*parts[index], *parts[index + 1]], *parts[index + 2 :]]


def _uncut_merged(parts: Parts, cuts_for: Callable[[Parts | None], int]) -> Parts:
    """The parts, those as one between which graphs cannot be cut: their gradients leave together anyway."""
    cuts, index = cuts_for(parts), 0
    while index < len(parts) - 1:
        if cuts_for(merged := _with_next_merged(parts, index)) == cuts:
            parts = merged
        else:
            index += 1
    return parts


def _merged_to_about(count: int, trace: Trace, parts: Parts) -> Parts:
    """Neighbouring parts merged into about ``count`` parts of similar bytes."""
    if len(parts) <= count:
        return parts
    sizes = {tensor.name: tensor.nbytes for tensor in trace.tensors}
    share = trace.nbytes / count
    groups = filled(parts, lambda names: sum(sizes[name] for name in names), share, share, reached=True)
    return [[name for names in group for name in names] for group in groups]


@dataclass(frozen=True, slots=True)
class Version:
    """A layout with cuts for it. ``expected_s``: its step, at the price of a cut."""

    label: str
    plan: Plan | None
    parts: Parts
    expected_s: float


@dataclass
class CutSearch:
    """The versions of one model's graphs that are worth compiling, given the best layout on finely cut graphs.

    It compiles and times nothing: for each of the ``offers()`` the tuner tries the version that rank 0 chose, if it
    chose one, and says how it went with ``note()``.

    best     the fastest trial, which is in force
    trials   of this search and before it
    lines    what cuts cost, for explain()
    """

    graphs: Graphs
    policy: TuningPolicy
    best: Trial
    trials: Sequence[Trial]
    trace: Trace
    network: Network | None
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._planned = self.best  # on graphs that are cut finely, as is the next one
        own = next((trial for trial in self.trials if trial.plan is None), None)
        self._own = own if self.best.plan is not None else None
        self._tried: list[tuple[Plan | None, int]] = []  # plans with their numbers of cuts
        self._cut_s = self.policy.cut_share * self.best.step_s
        self._measured_cut_s = 0.0  # in the last trial; 0 if it is not known

    def offers(self) -> Iterator[tuple[Sequence[Version], int]]:
        """Versions, and the number of the one to compile next, from 1 on; 0 if none is expected to gain enough."""
        allowed = self.policy.recompilations
        for done in range(allowed):
            versions = self._versions(self._cut_s)
            yield versions, self._choice(versions)
            if len(self._tried) <= done:
                break
            self._cut_s = self._measured_cut_s if self._measured_cut_s > 0 else self._cut_s  # below zero it is noise
        if allowed and not self._tried:
            versions = self._versions(MOST_CUT_SHARE * self._planned.step_s)
            yield versions, self._choice(versions, first=2)

    def min_gain(self, version: Version) -> float:
        """What a version must gain to stay: the same plan with fewer cuts stays unless it is clearly slower."""
        return self.policy.min_gain - FEWER_CUTS * (version.plan == self.best.plan)

    def note(self, version: Version, before: Parts | None, again: Trial, tried: Trial, faster: bool) -> None:
        """A version was ``tried`` in turns with the best, which ran ``again`` on graphs cut for ``before``."""
        many, few = self.graphs.cuts_for(before), self.graphs.cuts_for(version.parts)
        ratio = again.step_s / tried.step_s
        tried = replace(tried, result=f"{ratio:.2f}× as fast as {self.best.label} with {many} cuts", doubtful=False)
        longer = self.best.with_more(again)
        self.trials = [*(longer if trial is self.best else trial for trial in self.trials), tried]
        self.best = tried if faster else longer
        self._tried.append((version.plan, few))
        self.lines.append(
            f"Compiled: with {many} cuts computing takes {again.computing_s * 1e3:.2f} ms, with {few} "
            f"{tried.computing_s * 1e3:.2f} ms (medians, in turns)."
        )
        self._measured_cut_s = (again.computing_s - tried.computing_s) / (many - few) if many > few else 0.0

    def end(self) -> None:
        """Keep graphs as they are, for good, and say what was left out."""
        graphs, policy = self.graphs, self.policy
        versions = self._versions(self._cut_s)
        if not self._tried and graphs.would_change(versions[0].parts):
            few, many = graphs.cuts_for(versions[0].parts), graphs.cuts_for(None)
            self.lines.append(
                f"Compiled: with {few} cuts instead of {many} a step is "
                f"expected to gain less than {policy.min_gain:.0%}, so nothing was compiled again."
            )
        if len(self._tried) >= policy.recompilations and (number := self._choice(versions)):
            untried = versions[number - 1]
            self.lines.append(
                f"Compiled: {untried.label} (cuts: {graphs.cuts_for(untried.parts)}) may take "
                f"{untried.expected_s * 1e3:.2f} ms, if a cut costs {self._cut_s * 1e3:.3f} ms; "
                f"TuningPolicy(recompilations={policy.recompilations + 1}) would try it."
            )
        keep_cuts(graphs, self._planned.plan, self.trace, self.network, policy)

    def _versions(self, price_s: float) -> list[Version]:
        """The best plan with the cuts that it needs, and DDP's own buckets with DDP's, if a cut costs ``price_s``."""
        graphs, trace, network = self.graphs, self.trace, self.network

        def version(label: str, finely: Trial, parts: Parts) -> Version:
            saved_s = price_s * (graphs.cuts_for(None) - graphs.cuts_for(parts))  # of computing
            gain_s = saved_s
            if network is not None:  # of the step: what its messages leave of that
                simulated_s = step_in_parts_s(trace, finely.plan, network, parts, saved_s)
                gain_s = predicted_s(trace, finely.plan, network) - simulated_s
            return Version(label, finely.plan, parts, finely.step_s - gain_s)

        other = ", other cuts" if self._tried else ""
        planned, own = self._planned, self._own
        parts = needed_parts(trace, planned.plan, network, price_s, graphs.cuts_for)
        versions = [version(f"{planned.label}, graphs cut for it{other}", planned, parts)]
        if own is not None:
            versions.append(version(f"{own.label}, DDP's cuts", own, parts_of_ddp(trace)))
        return versions

    def _choice(self, versions: Sequence[Version], first: int = 1) -> int:
        """The number, from ``first`` on, of the fastest version that was not tried; 0 if it may not gain enough."""
        best, graphs = self.best, self.graphs
        new = [
            (version.expected_s, number)
            for number, version in enumerate(versions, 1)
            if number >= first
            and (version.plan != best.plan or graphs.would_change(version.parts))
            and (version.plan, graphs.cuts_for(version.parts)) not in self._tried
        ]
        expected_s, fastest = min(new, default=(inf, 0))
        return fastest if 1 - expected_s / best.step_s > self.policy.min_gain else 0


def keep_cuts(graphs: Graphs, plan: Plan | None, trace: Trace, network: Network | None, policy: TuningPolicy) -> None:
    """Keep these graphs as they are; later graphs follow the plan only if these do."""
    step_s = 0.0 if network is None else predicted_s(trace, plan, network)
    parts = needed_parts(trace, plan, network, policy.cut_share * step_s, graphs.cuts_for)
    if graphs.parts is None and not graphs.would_change(parts):
        graphs.cut_for(parts)
    graphs.settle()
