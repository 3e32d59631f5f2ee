"""Trials of where a compiled model is cut: each cut costs computing, and a missing one delays a bucket.

While plans are tried, graphs are cut finely. Then two versions with fewer cuts are priced, before anything is compiled:
the best plan with the cuts that it needs, and DDP's own buckets with the cuts that torch makes for DDP. The faster of
them is compiled if it is expected to gain, and runs in turns with what was best: the version stays that was measured to
be faster. That is the one compilation after planning. A policy may allow more: then versions are priced once more, by
what a cut was measured to cost. If no version was worth it, DDP's is compiled where it would win at the highest price
that is plausible: graphs that stay cut finely shall not be slower than under compiled DDP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from anabranch.tuning.candidates import predicted_s
from anabranch.tuning.graph_cuts import Graphs, Parts, needed_parts, one_each, parts_of_ddp, step_in_parts_s
from anabranch.tuning.live_trials import LiveTrials, Schedule, steps
from anabranch.tuning.policy import TuningPolicy
from anabranch.tuning.trial import Trial
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

MOST_CUT_SHARE = 0.02  # of a step: twice what a cut is taken to cost
FEWER_CUTS = 0.02  # share of a step by which fewer cuts may look slower: noise, since they can hardly be


@dataclass(frozen=True, slots=True)
class Version:
    """A layout with cuts for it. ``expected_s``: its step, at the price of a cut."""

    label: str
    plan: Plan | None
    parts: Parts
    expected_s: float


class CutTrials:
    """Tries cuts of one model's graphs.

    decide   a decision of rank 0, as a small number, on every rank; collective
    trials   of this search and before it
    best     the fastest of them, which is in force
    lines    what cuts cost, for explain()
    """

    def __init__(self, graphs: Graphs, live: LiveTrials, policy: TuningPolicy, decide: Callable[[int], int]) -> None:
        self.trials: list[Trial] = []
        self.best: Trial | None = None
        self.lines: list[str] = []
        self._graphs = graphs
        self._live = live
        self._policy = policy
        self._decide = decide
        self._tried: list[tuple[Plan | None, int]] = []  # plans with their numbers of cuts

    def settle(self, best: Trial, trials: Sequence[Trial], trace: Trace, network: Network | None) -> Schedule[None]:
        """Find the fastest cuts, given the best layout on graphs that are cut finely, and keep them for good.

        The first step of a version compiles it, which no trial counts.
        """
        self.trials, self.best, self.lines, self._tried = list(trials), best, [], []
        own = next((trial for trial in trials if trial.plan is None and best.plan is not None), None)
        cut_s = self._policy.cut_share * best.step_s

        def versions_at(price_s: float) -> list[Version]:
            return self._versions(best, own, trace, network, price_s)

        for _ in range(self._policy.recompilations):
            versions = versions_at(cut_s)
            compiled = yield from self._try_fastest(versions, versions)
            if compiled is None:
                break
            cut_s = compiled if compiled > 0 else cut_s  # less than nothing is noise
        if self._policy.recompilations and not self._tried:
            versions = versions_at(MOST_CUT_SHARE * best.step_s)
            yield from self._try_fastest(versions, versions[1:])
        self._say_not_worth(versions_at(cut_s)[0])
        if len(self._tried) >= self._policy.recompilations:
            self._say_untried(self._worth_compiling(versions_at(cut_s)), cut_s)
        self.keep(best.plan, trace, network)

    def _try_fastest(self, versions: Sequence[Version], allowed: Sequence[Version]) -> Schedule[float | None]:
        """Compile and try the fastest of those allowed, if it is worth it; returns what a cut cost then."""
        worth = self._worth_compiling(allowed)
        chosen = self._decide(0 if worth is None else 1 + versions.index(worth))
        return (yield from self._try(versions[chosen - 1])) if chosen else None

    def keep(self, plan: Plan | None, trace: Trace, network: Network | None) -> None:
        """Keep graphs as they are, for good; those that torch makes later are cut for the plan, if these are, too."""
        step_s = 0.0 if network is None else predicted_s(trace, plan, network)
        parts = self._needed_parts(trace, plan, network, self._policy.cut_share * step_s)
        if self._graphs.parts is None and not self._graphs.would_change(parts):
            self._graphs.cut_for(parts)
        self._graphs.settle()

    def _versions(
        self, best: Trial, own: Trial | None, trace: Trace, network: Network | None, price_s: float
    ) -> list[Version]:
        """What could be compiled: the best plan with the cuts that it needs, and DDP's own buckets with DDP's cuts.

        ``best`` and ``own`` ran on graphs that were cut finely. ``price_s`` is what a cut may cost.
        """
        graphs = self._graphs

        def version(label: str, finely: Trial, parts: Parts) -> Version:
            saved_s = price_s * (graphs.cuts_for(None) - graphs.cuts_for(parts))  # of computing
            gain_s = saved_s
            if network is not None:  # of the step: what its messages leave of that
                simulated_s = step_in_parts_s(trace, finely.plan, network, parts, saved_s)
                gain_s = predicted_s(trace, finely.plan, network) - simulated_s
            return Version(label, finely.plan, parts, finely.step_s - gain_s)

        other = ", other cuts" if self._tried else ""
        parts = self._needed_parts(trace, best.plan, network, price_s)
        versions = [version(f"{best.label}, graphs cut for it{other}", best, parts)]
        if own is not None:
            versions.append(version(f"{own.label}, DDP's cuts", own, parts_of_ddp(trace)))
        return versions

    def _needed_parts(self, trace: Trace, plan: Plan | None, network: Network | None, price_s: float) -> Parts:
        """The parts that are worth their cuts in these graphs; those of later ones, where these cannot be cut."""
        cuts_for = self._graphs.cuts_for if self._graphs.cuts_for(None) else one_each
        return needed_parts(trace, plan, network, price_s, cuts_for)

    def _worth_compiling(self, versions: Sequence[Version]) -> Version | None:
        """The fastest version that was not tried, if it is expected to gain enough over the best."""
        best, graphs = self._best, self._graphs
        new = [
            version
            for version in versions
            if (version.plan != best.plan or graphs.would_change(version.parts))
            and (version.plan, graphs.cuts_for(version.parts)) not in self._tried
        ]
        fastest = min(new, key=lambda version: version.expected_s, default=None)
        if fastest is None or 1 - fastest.expected_s / best.step_s <= self._policy.min_gain:
            return None
        return fastest

    def _try(self, version: Version) -> Schedule[float]:
        """Compile for a version, and keep it if it is faster than the best, with which it runs in turns.

        The same plan with other cuts stays unless it is clearly slower: it was priced to need no more than these.
        Returns the measured seconds that a cut costs; 0 if that is not known.
        """
        graphs, best, before = self._graphs, self._best, self._graphs.parts
        same_plan = version.plan == best.plan
        graphs.cut_for(version.parts)
        yield from steps(self._policy.warmup_steps)
        graphs.cut_for(before)
        yield from steps(self._policy.settle_steps)
        again, tried, faster = yield from self._live.challenge(
            replace(best, steps=(), detailed=()),
            version.label,
            version.plan,
            min_gain=self._policy.min_gain - FEWER_CUTS * same_plan,
            in_doubt=same_plan,
            also=lambda ours: graphs.cut_for(version.parts if ours else before),
        )
        many, few = graphs.cuts_for(before), graphs.cuts_for(version.parts)
        ratio = again.step_s / tried.step_s
        tried = replace(tried, result=f"{ratio:.2f}× as fast as {best.label} with {many} cuts", doubtful=False)
        longer = best.with_more(again)
        self.trials = [*(longer if trial is best else trial for trial in self.trials), tried]
        self.best = tried if faster else longer
        self._tried.append((version.plan, few))
        self.lines.append(
            f"Compiled: with {many} cuts computing takes {again.computing_s * 1e3:.2f} ms, with {few} "
            f"{tried.computing_s * 1e3:.2f} ms (medians, in turns)."
        )
        return (again.computing_s - tried.computing_s) / (many - few) if many > few else 0.0

    def _say_not_worth(self, planned: Version) -> None:
        """Say why graphs stay cut finely, if they do and the plan needs fewer cuts."""
        graphs = self._graphs
        if not self._tried and graphs.would_change(planned.parts):
            self.lines.append(
                f"Compiled: with {graphs.cuts_for(planned.parts)} cuts instead of {graphs.cuts_for(None)} a step is "
                f"expected to gain less than {self._policy.min_gain:.0%}, so nothing was compiled again."
            )

    def _say_untried(self, untried: Version | None, cut_s: float) -> None:
        """Say which version would be compiled next, if the policy allowed one more compilation."""
        if untried is not None:
            self.lines.append(
                f"Compiled: {untried.label} (cuts: {self._graphs.cuts_for(untried.parts)}) may take "
                f"{untried.expected_s * 1e3:.2f} ms, if a cut costs {cut_s * 1e3:.3f} ms; "
                f"TuningPolicy(recompilations={self._policy.recompilations + 1}) would try it."
            )

    @property
    def _best(self) -> Trial:
        assert self.best is not None  # once there is something to settle
        return self.best
