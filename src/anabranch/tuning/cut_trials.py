"""Trials of where a compiled model is cut: each cut costs computing, and a missing one delays a bucket.

While plans are tried, graphs are cut finely. Then they are compiled for the best plan, which needs fewer cuts, and both
versions run in turns: the difference is what cuts cost on this model. Planned with that cost, fewer cuts, or none,
may be faster; so may DDP's own buckets with the cuts that torch makes for DDP. Each of these is compiled and tried if
it would be faster where cuts cost twice what was measured, and the version stays that was measured to be the fastest.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.trace import Trace
from anabranch.tuning.graph_cuts import CUT_SHARE, Graphs, Parts, needed_parts, parts_of_ddp, step_in_parts_s
from anabranch.tuning.live_trials import LiveTrials, Schedule, steps
from anabranch.tuning.policy import TuningPolicy
from anabranch.tuning.trial import Trial

FEWER_CUTS = 0.02  # share of a step by which fewer cuts may look slower: noise, since they can hardly be


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

    def settle(self, best: Trial, trials: Sequence[Trial], trace: Trace, network: Network | None) -> Schedule[None]:
        """Find the fastest cuts, given the best layout on graphs that are cut finely, and keep them for good.

        The first step of a version compiles it, which no trial counts.
        """
        self.trials, self.best = list(trials), best
        parts = needed_parts(trace, best.plan, network)
        measured_s = yield from self._cut_for_plan(best, parts)
        cut_s = self._policy.cut_doubt * max(CUT_SHARE * best.step_s, measured_s)
        if network is not None:
            yield from self._try_fewer(trace, network, parts, cut_s)
        yield from self._try_ddp(trace, cut_s)
        self._graphs.settle()

    def _cut_for_plan(self, finely: Trial, parts: Parts) -> Schedule[float]:
        """Compile for the plan, and go back only if graphs that are cut finely are clearly faster.

        A plan has won on the fine cuts by a clear margin (``Tuner``), so nothing about it is doubtful.

        Returns the measured seconds that a cut costs; 0 if nothing was measured.
        """
        graphs = self._graphs
        changes = graphs.would_change(parts)
        if not self._decide(changes):
            if not changes:
                graphs.cut_for(parts)  # for graphs that torch makes later
            return 0.0
        graphs.cut_for(parts)
        yield from steps(self._policy.warmup_steps)
        graphs.cut_for(None)
        yield from steps(self._policy.settle_steps)
        again, cut, faster = yield from self._live.challenge(
            replace(finely, steps=(), detailed=()),
            f"{finely.label}, graphs cut for it",
            finely.plan,
            min_gain=self._policy.min_gain - FEWER_CUTS,
            in_doubt=True,
            also=lambda ours: graphs.cut_for(parts if ours else None),
        )
        cut = replace(cut, result=f"{again.step_s / cut.step_s:.2f}× as fast as cut finely", doubtful=False)
        longer = finely.with_more(again)
        self.trials = [*(longer if trial is finely else trial for trial in self.trials), cut]
        self.best = cut if faster else longer
        many, few = graphs.cuts_for(None), graphs.cuts_for(parts)
        self.lines = [
            f"Compiled: with {many} cuts computing takes {again.computing_s * 1e3:.2f} ms, with {few} "
            f"{cut.computing_s * 1e3:.2f} ms (medians, in turns)."
        ]
        return (again.computing_s - cut.computing_s) / max(1, many - few)

    def _try_fewer(self, trace: Trace, network: Network, parts: Parts, cut_s: float) -> Schedule[None]:
        """Try the cuts of a plan that counts what each costs, down to none at all."""
        best, graphs = self._best, self._graphs

        def predicted_s(parts: Parts) -> float:
            saved_s = cut_s * (graphs.cuts_for(None) - graphs.cuts_for(parts))
            return step_in_parts_s(trace, best.plan, network, parts) - saved_s

        fewer = needed_parts(trace, best.plan, network, cut_s)
        gain = (predicted_s(parts) - predicted_s(fewer)) / best.step_s
        promising = gain > self._policy.min_predicted_gain and graphs.cuts_for(fewer) < graphs.cuts_for(parts)
        whole = [[tensor.name for tensor in trace.tensors]]
        if graphs.can_change:
            self.lines.append(
                f"Compiled: a step without any cut is predicted to take {predicted_s(whole) * 1e3:.2f} ms, with the "
                f"cuts of the plan {predicted_s(parts) * 1e3:.2f} ms, if a cut costs {cut_s * 1e3:.3f} ms."
            )
        yield from self._try(f"{best.label}, fewer cuts", best.plan, fewer, promising)

    def _try_ddp(self, trace: Trace, cut_s: float) -> Schedule[None]:
        """Try DDP's own buckets with DDP's cuts: they ran on graphs that were cut finely so far."""
        own = next((trial for trial in self.trials if trial.plan is None), None)
        if own is None or self._best.plan is None:
            return
        parts = parts_of_ddp(trace)
        saved = self._graphs.cuts_for(None) - self._graphs.cuts_for(parts)
        least_s = own.step_s - saved * cut_s
        if self._graphs.can_change:
            self.lines.append(f"Compiled: {own.label} with DDP's cuts take at least {least_s * 1e3:.2f} ms, then.")
        yield from self._try(f"{own.label}, DDP's cuts", None, parts, least_s < self._best.step_s)

    def _try(self, label: str, plan: Plan | None, parts: Parts, promising: bool) -> Schedule[None]:
        """Compile for these parts, and keep them with this plan if they are clearly faster than the best."""
        graphs, best = self._graphs, self._best
        before = graphs.parts
        if not self._decide(promising and (plan != best.plan or graphs.would_change(parts))):
            return
        graphs.cut_for(parts)
        yield from steps(self._policy.warmup_steps)
        graphs.cut_for(before)
        yield from steps(self._policy.settle_steps)
        longer, tried, faster = yield from self._live.challenge(
            best, label, plan, also=lambda ours: graphs.cut_for(parts if ours else before)
        )
        tried = replace(tried, doubtful=False)
        self.trials = [*(longer if trial is best else trial for trial in self.trials), tried]
        self.best = tried if faster else longer

    @property
    def _best(self) -> Trial:
        assert self.best is not None  # once there is something to settle
        return self.best
