"""Where a compiled model is cut in the end: whatever was measured to be the fastest, and nothing compiled in vain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from anabranch import Network, Plan, TensorSpec, Trace
from anabranch import planning as planners
from anabranch.tuning.cut_search import CutSearch, parts_of_ddp, step_in_parts_s
from anabranch.tuning.options import DEFAULT_POLICY, TuningPolicy
from anabranch.tuning.trial import StepTimes, Trial

LAYERS = 16
MIB = 1 << 20
NETWORK = Network.linear(2, 0.0, 2e-3 / MIB)  # 2 ms for each gradient
# A gradient of 1 MiB every millisecond, so that DDP's own buckets are of one and of all others.
TRACE = Trace(tuple(TensorSpec(f"t{i}", MIB // 4, 4, 1e-3 * (i + 1), "float32") for i in range(LAYERS)), 5e-3)
PLAN = planners.optimal(TRACE, NETWORK)
NAMES = [tensor.name for tensor in TRACE.tensors]

Parts = Sequence[Sequence[str]]


@dataclass
class Graphs:
    """One graph of a chain of layers, which can be cut before each."""

    parts: Parts | None = None
    can_change: bool = True
    compiled: list[int] = field(default_factory=lambda: [LAYERS - 1])  # by version, its number of cuts
    settled: bool = False

    def cuts_for(self, parts: Parts | None) -> int:
        return LAYERS - 1 if parts is None else len(parts) - 1

    def would_change(self, parts: Parts) -> bool:
        return self.cuts_for(parts) != self.cuts_for(self.parts)

    def cut_for(self, parts: Parts | None) -> None:
        self.parts = parts
        if self.cuts_for(parts) not in self.compiled:
            self.compiled.append(self.cuts_for(parts))

    def settle(self) -> None:
        self.settled = True


@dataclass
class Live:
    """Steps of a model whose cuts add so much to computing each, wherever they are; without one it is ``TRACE``.

    ``saved_s`` is what DDP's own buckets take less than simulated.
    """

    graphs: Graphs
    cut_s: float
    saved_s: float = 0.0

    def trial(self, label: str, plan: Plan | None) -> Trial:
        parts = self.graphs.parts
        trace = self.trace(parts)
        step_s = step_in_parts_s(trace, plan, NETWORK, [[name] for name in NAMES] if parts is None else parts)
        step_s -= self.saved_s if plan is None else 0.0
        computing_s = trace.forward_s + trace.backward_s
        return Trial(label, plan, (StepTimes(step_s, step_s - computing_s, step_s - trace.forward_s),))

    def trace(self, parts: Parts | None) -> Trace:
        """What computing takes with the cuts for these parts."""
        added_s = self.cut_s * self.graphs.cuts_for(parts)
        return TRACE.scaled(1 + added_s / (TRACE.forward_s + TRACE.backward_s))

    def search(self, policy: TuningPolicy, best: Trial, trials: Sequence[Trial]) -> CutSearch:
        return CutSearch(cast(Any, self.graphs), policy, best, trials, self.trace(None), NETWORK)

    def settle(self, cuts: CutSearch, decide: Callable[[int], int] = int) -> None:
        """Try what is offered; the faster version stays."""
        for versions, choice in cuts.offers():
            if not (chosen := decide(choice)):
                continue
            version, before = versions[chosen - 1], self.graphs.parts
            again = self.trial(cuts.best.label, cuts.best.plan)
            self.graphs.cut_for(version.parts)
            tried = self.trial(version.label, version.plan)
            faster = 1 - tried.step_s / again.step_s > cuts.min_gain(version)
            self.graphs.cut_for(version.parts if faster else before)
            cuts.note(version, before, again, tried, faster)
            assert not self.graphs.settled
        cuts.end()


def settled(
    cut_s: float, saved_s: float = 0.0, decide: Callable[[int], int] = int, policy: TuningPolicy = DEFAULT_POLICY
) -> tuple[CutSearch, Graphs]:
    """The trials of a model whose cuts cost so much."""
    graphs = Graphs()
    live = Live(graphs, cut_s, saved_s)
    trials = [live.trial("own", None), live.trial("optimal", PLAN)]
    cuts = live.search(policy, min(trials, key=lambda trial: trial.step_s), trials)
    live.settle(cuts, decide)
    assert graphs.settled
    assert cuts.best in cuts.trials
    if policy.min_gain > 0:
        assert cuts.best.step_s == pytest.approx(min(trial.step_s for trial in cuts.trials), rel=0.01)
    return cuts, graphs


def least_saved_s() -> float:
    """What DDP's own buckets must save to be as fast as the plan, where cuts cost nothing."""
    live = Live(Graphs(), 0.0)
    return live.trial("", None).step_s - live.trial("", PLAN).step_s


@pytest.mark.parametrize("cut_s", [-1e-3, 0.0, 1e-5, 1e-3, 1.5e-3, 8e-3])
@pytest.mark.parametrize("share", [0.0, 0.9, 0.999, 1.1, 2.0])
def test_one_version_is_compiled_and_one_slower_than_ddps_is_named(cut_s: float, share: float) -> None:
    saved_s = share * least_saved_s()
    cuts, graphs = settled(cut_s, saved_s)
    assert len(graphs.compiled) <= 2, "graphs that are cut finely, and one version with fewer cuts"
    ddp = Live(Graphs(parts_of_ddp(TRACE)), cut_s, saved_s).trial("DDP", None)
    if cuts.best.step_s > 1.01 * ddp.step_s:
        assert len(graphs.compiled) == 2 and "would try it" in cuts.lines[-1]


def test_cheap_cuts_are_compiled_once_more_for_the_plan() -> None:
    cuts, graphs = settled(cut_s=1e-5)
    assert cuts.best.plan == PLAN
    assert cuts.best.label == "optimal, graphs cut for it"
    assert len(graphs.compiled) == 2 and graphs.parts is not None
    (line,) = cuts.lines
    assert "with 15 cuts computing takes" in line


def test_where_little_is_expected_nothing_is_compiled() -> None:
    cuts, graphs = settled(cut_s=1e-5, policy=replace(DEFAULT_POLICY, min_gain=0.3))
    assert cuts.best.label == "optimal"
    assert graphs.compiled == [LAYERS - 1] and graphs.parts is None
    (line,) = cuts.lines
    assert "instead of 15 a step is expected to gain less than 30%, so nothing was compiled again" in line


def test_dear_cuts_are_named_and_tried_by_those_who_allow_it() -> None:
    cuts, graphs = settled(cut_s=8e-3)
    assert cuts.best.label == "optimal, graphs cut for it"
    assert "optimal, graphs cut for it, other cuts (cuts: 1) may take" in cuts.lines[-1]
    assert "TuningPolicy(recompilations=2) would try it" in cuts.lines[-1]
    cuts, graphs = settled(cut_s=8e-3, policy=replace(DEFAULT_POLICY, recompilations=2))
    assert cuts.best.label == "optimal, graphs cut for it, other cuts"
    assert graphs.cuts_for(graphs.parts) == 1 and len(graphs.compiled) == 3


def test_a_plan_that_needs_all_cuts_is_compared_with_ddps_version_where_cuts_may_be_dear() -> None:
    fine = planners.per_tensor(TRACE, NETWORK)
    graphs = Graphs()
    live = Live(graphs, cut_s=2e-3)
    live.saved_s = live.trial("own", None).step_s - live.trial("no merging", fine).step_s  # so they are as fast
    trials = [live.trial("own", None), live.trial("no merging", fine)]
    cuts = live.search(replace(DEFAULT_POLICY, cut_share=0.0), trials[1], trials)
    live.settle(cuts)
    assert graphs.compiled[-1] == graphs.cuts_for(parts_of_ddp(TRACE))
    assert cuts.best.plan is None
    cuts, graphs = settled(cut_s=8e-3, policy=replace(DEFAULT_POLICY, recompilations=0))
    assert graphs.compiled == [LAYERS - 1]


@pytest.mark.parametrize("cut_s", [-0.5e-3, 0.0, 0.2e-3, 1e-3, 8e-3])
def test_a_version_is_expected_to_take_what_it_takes(cut_s: float) -> None:
    graphs = Graphs()
    live = Live(graphs, cut_s, saved_s=1e-3)
    trials = [live.trial("own", None), live.trial("optimal", PLAN)]
    cuts = live.search(DEFAULT_POLICY, trials[1], trials)
    for version in cuts._versions(cut_s):
        graphs.parts = version.parts
        assert version.expected_s == pytest.approx(live.trial("", version.plan).step_s), version.label


def test_ddps_own_buckets_and_cuts_are_compiled_where_they_are_expected_to_be_fastest() -> None:
    cuts, graphs = settled(cut_s=1e-3, saved_s=least_saved_s() - 1e-6)  # the plan is hardly faster, with more cuts
    assert cuts.best.plan is None
    assert cuts.best.label == "own, DDP's cuts"
    assert graphs.parts is not None and [len(part) for part in graphs.parts] == [1, LAYERS - 1]
    assert len(graphs.compiled) == 2


def test_fine_cuts_stay_where_they_are_clearly_faster() -> None:
    cuts, graphs = settled(cut_s=-1e-3)  # as where the plan's own cuts happen to fall badly
    assert cuts.best.label == "optimal"
    assert graphs.parts is None


def test_no_version_is_tried_twice() -> None:
    cuts, graphs = settled(
        cut_s=-1e-3, policy=replace(DEFAULT_POLICY, recompilations=9, min_gain=-1.0, cut_share=-0.01)
    )
    assert len({trial.label for trial in cuts.trials}) == len(cuts.trials)
    assert len(graphs.compiled) <= 3, "finely, for the plan, and as DDP"


def test_other_ranks_compile_nothing_that_rank_0_does_not() -> None:
    _, graphs = settled(cut_s=1e-5, decide=lambda _: 0)
    assert graphs.compiled == [LAYERS - 1]


def test_other_ranks_compile_the_version_that_rank_0_chose() -> None:
    cuts, graphs = settled(cut_s=1e-5, decide=lambda _: 2)
    assert "own, DDP's cuts" in [trial.label for trial in cuts.trials]
    assert graphs.compiled == [LAYERS - 1, 1]
