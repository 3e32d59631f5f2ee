"""LiveNetwork: the network of one training: measured or given, calibrated by live steps, and what it predicts."""

from collections.abc import Sequence

from anabranch.exchange.agree import agree_on
from anabranch.exchange.collectives import Collectives
from anabranch.observe.measure import LARGEST_NBYTES, measure
from anabranch.tuning.calibration import calibrate, computed_faster, slowest_rank
from anabranch.tuning.candidates import prediction_s
from anabranch.tuning.runner import PlanRunner
from anabranch.tuning.trial import Trial
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

SMALLEST_LARGEST_NBYTES = 1 << 16
MEASUREMENT_S = (0.1, 2.0)  # shortest, longest


class LiveNetwork:
    """The network that plans are made with; ``given`` is believed, and neither measured nor calibrated."""

    def __init__(self, runner: PlanRunner, collectives: Collectives, given: Network | None) -> None:
        self.network: Network | None = None
        self._runner = runner
        self._collectives = collectives
        self._given = given
        self._error: float | None = None  # predicted by measured step of the layout that was kept last
        self._known: tuple[Trace, Plan | None, Network, float | None] | None = None  # last prediction and its inputs

    def agree_on_given(self) -> bool:
        """Use the network that the user gave, the same on every rank; False if there is none. Collective."""
        if self._given is not None:
            self.network = agree_on(Network, self._given, self._runner.lanes.control)
        return self._given is not None

    def measure(self, nbytes: int, kinds: Sequence[str], lanes: int, allowed_s: float) -> None:
        """Measure these kinds of messages up to ``nbytes``, and how much lanes slow each other. Collective.

        Takes about a third of ``allowed_s``, by rank 0's number, within limits.
        """
        self._runner.lanes.grow(lanes)
        collectives = {kind: self._collectives.probe(kind) for kind in kinds}
        largest = min(max(nbytes, SMALLEST_LARGEST_NBYTES), LARGEST_NBYTES)
        shortest_s, longest_s = MEASUREMENT_S
        budget_s = min(longest_s, max(shortest_s, allowed_s / 3))
        groups, device = self._runner.lanes.groups, self._runner.device
        self.network = measure(groups, device, largest, budget_s, collectives, growth=4)

    def calibrate(self, trace: Trace, trials: Sequence[Trial], several_lanes: bool) -> bool:
        """Calibrate a measured network by trials on one lane or on several; whether it changed. Collective."""
        before = self.network
        if self._given is None and self.network is not None:
            for trial in trials:
                if trial.plan is not None and (trial.plan.lanes > 1) == several_lanes:
                    self.network = calibrate(self.network, trace, trial, self._runner.lanes.control)
        return self.network != before

    def computed_faster(self, trace: Trace, best: Trial, first: Trial) -> Trace:
        """The trace with computing as fast as under the best layout, if that is a plan. Collective.

        ``first``: the layout with which the search began, under which the trace was recorded.
        """
        if self._given is not None or best.plan is None:
            return trace
        computing_s, before_s = slowest_rank([best.computing_s, first.computing_s], self._runner.lanes.control)
        return computed_faster(trace, best.plan, computing_s, before_s)

    def predicted_s(self, trace: Trace | None, plan: Plan | None) -> float | None:
        """The simulator's prediction for this layout, computed once per layout; None if it cannot be predicted."""
        if trace is None or self.network is None:
            return None
        known = self._known
        if known is None or known[0] is not trace or known[1] is not plan or known[2] is not self.network:
            self._known = known = (trace, plan, self.network, prediction_s(trace, plan, self.network))
        return known[3]

    def note_error(self, trace: Trace | None, kept: Trial) -> None:
        """Remember how well the layout that is kept was predicted."""
        predicted_s = self.predicted_s(trace, kept.plan)
        self._error = predicted_s / kept.step_s if predicted_s is not None else None

    def outdated(self, trace: Trace, running: Trial, max_drift: float) -> bool:
        """Whether the layout that runs is predicted worse than when it was kept; a given network is believed."""
        predicted_s = self.predicted_s(trace, running.plan)
        if self._given is not None:
            return False
        if predicted_s is None or self._error is None:
            return True
        return abs(predicted_s / running.step_s / self._error - 1) > max_drift
