"""Search: finds the fastest layout of a live model: profiles it, measures the network, plans, and tries plans in turns.

It owns what a search finds: the trace, the trials, and the fastest of them, which is in force. When to search, and what
becomes of the result, is the tuner's to say. Every method that yields is a part of its schedule, the same on all ranks.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch.distributed as dist

from anabranch.exchange.agree import agree_on, latest_over_ranks, true_on_all_ranks
from anabranch.exchange.collectives import Collectives
from anabranch.observe.measure import WARM_UP, noise_note
from anabranch.observe.recorder import Recorder, order_note
from anabranch.planning.simulator import undelayed
from anabranch.tuning.background_planner import BackgroundPlanner, Candidates
from anabranch.tuning.budget import SearchBudget
from anabranch.tuning.candidates import candidates
from anabranch.tuning.cut_trials import CutTrials
from anabranch.tuning.gains import error_of_layout, expected_gain, simulated_gain
from anabranch.tuning.graph_cuts import LATE, Graphs
from anabranch.tuning.live_network import LiveNetwork
from anabranch.tuning.live_trials import LiveTrials, Schedule, steps
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.policy import TuningPolicy
from anabranch.tuning.runner import PlanRunner
from anabranch.tuning.trial import PRICE_OF_FIDELITY, Trial, allowed_loss
from anabranch.tuning.warm_up import warm_up_kinds
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

log = logging.getLogger("anabranch")

HELD_EARLY = "Compiled: searching was ended before graphs were compiled for the plan, so they stay cut finely."
FROZEN = "parameters were frozen, unfrozen or replaced after the model was wrapped"


class Search:
    """Searches for the fastest layout of one model.

    budget       what searching may cost
    graphs       the graphs that torch.compile makes of the model
    model_name   is written into traces
    decide       a decision of rank 0, as a small number, on every rank; collective
    held         whether this rank was told to search no more
    enter        notes what the search does now, for explain()

    live_network   the network that plans are made with
    trace          the last recorded one; None before a step was profiled
    trials         of the last search; the first is the layout that was in force when it began
    failure        why planning failed, if it did
    """

    _noise_was_logged: ClassVar[bool] = False  # once per process is enough

    def __init__(
        self,
        runner: PlanRunner,
        collectives: Collectives,
        policy: TuningPolicy,
        budget: SearchBudget,
        graphs: Graphs,
        given_network: Network | None,
        model_name: str,
        decide: Callable[[int], int],
        held: Callable[[], bool],
        enter: Callable[[str], None],
    ) -> None:
        self.live_network = LiveNetwork(runner, collectives, given_network)
        self.trace: Trace | None = None
        self.trials: list[Trial] = []
        self.failure = ""
        self._runner = runner
        self._collectives = collectives
        self._policy = policy
        self._budget = budget
        self._graphs = graphs
        self._model_name = model_name
        self._decide = decide
        self._held = held
        self._enter = enter
        self._live = LiveTrials(runner, policy, budget, decide, in_a_hurry=self._is_over)
        self._cuts = CutTrials(graphs, self._live, policy, decide)
        self._best: Trial | None = None  # the layout in force while others are tried
        self._beaten: Trial | None = None  # the one before it
        self._began_at = 0  # step

    @property
    def best(self) -> Trial:
        """The fastest layout so far, which is in force."""
        assert self._best is not None  # once a layout has been timed
        return self._best

    @property
    def network(self) -> Network | None:
        """The network as measured or given; None before it is known."""
        return self.live_network.network

    @property
    def graph_lines(self) -> list[str]:
        """For explain(): how graphs are cut, and what cuts cost."""
        return [*self._graphs.lines(), *self._cuts.lines]

    def take_failure(self) -> str:
        """Why planning failed, if it did; the next search begins without a failure."""
        failure, self.failure = self.failure, ""
        return failure

    # What a search begins with.

    def begin_with(self, trace: Trace, network: Network) -> None:
        """Use the trace and the network of an earlier training."""
        self.trace, self.live_network.network = trace, network

    def timed(self, label: str, plan: Plan | None, count: int | None = None) -> Schedule[Trial]:
        """Time the layout in force; its step time is the one that plans must beat. A search begins with this."""
        self.begin_again()
        self._best = yield from self._live.timed(label, plan, count)
        self.trials = [self._best]
        return self._best

    def begin_again(self) -> None:
        """The steps of the search before do not count any more (``max_search_steps``)."""
        self._began_at = self._runner.timer.steps_done

    def profiled(self, label: str, plan: Plan | None, count: int) -> Schedule[Trial]:
        """The same, and record the trace."""
        self.failure = ""
        self._collectives.errors.postpone()
        with Recorder(self._runner.timer, self._runner.parameters) as recorder:
            trial = yield from self.timed(label, plan, count)
        self._budget.step_s = self._budget.step_s or trial.step_s
        if not true_on_all_ranks(self._runner.trains_the_same(), self._runner.lanes.control):
            self.failure = FROZEN  # what is frozen has no gradient in the trace, and may be frozen on one rank alone
            return trial
        if not true_on_all_ranks(recorder.steps > 0, self._runner.lanes.control):
            self.failure = "no step could be recorded (is the whole model called again in backward, by checkpointing?)"
            return trial
        trace = recorder.trace({"model": self._model_name})
        self._warn(order_note(trace))
        control = self._runner.lanes.control
        trace = latest_over_ranks(trace, control)
        if plan is not None and self.network is not None:
            trace = undelayed(trace, plan, self.network)
        self.trace = agree_on(Trace, trace, control)
        if self.trace.tensors[0].ready_s > self._policy.late_gradients * self.trace.backward_s:
            self._warn(f"{LATE}: nothing of their communication can be hidden")
            self._graphs.note_late(LATE)
        return trial

    def why_not(self) -> str:
        """Why a search is not worth while, once the layout in force was profiled; empty if it is."""
        if self.failure:
            return self.failure
        # No plan can gain more than the time that the layout's own buckets leave exposed.
        running = self.best
        share = running.exposed_s / running.step_s if running.plan is None else math.inf
        if self.goes_on(share):
            return ""
        if self._decide(self._is_over()):
            return f"the search was ended, or had taken its {self._policy.max_search_steps} steps (max_search_steps)"
        return f"only {share:.1%} of a step waits for communication"

    def goes_on(self, gain: float = math.inf) -> bool:
        """Whether the search goes on, given the gain to expect: rank 0 finds it large enough, and has steps left.

        Where the budget is used up, only an obvious gain is: its trial pays for itself at once.
        """
        policy = self._policy
        least = policy.min_predicted_gain if self._budget.left_s > 0 else policy.obvious_gain
        return bool(self._decide(gain > least and not self._is_over()))

    def _is_over(self) -> bool:
        """Whether no more plans shall be tried: this rank was told to hold, or the search has taken long enough."""
        return self._held() or self._runner.timer.steps_done - self._began_at >= self._policy.max_search_steps

    def measure(self, options: TuningOptions) -> None:
        """Measure the network, unless the user gave one."""
        if self.live_network.agree_on_given():
            return
        self._enter("measuring the network")
        kinds = ["dense", *options.kinds]
        if self._collectives.residuals.warmup_steps > self._runner.timer.steps_done:
            kinds += self._warm_up_kinds(options)
        kinds = list(dict.fromkeys(kinds))
        lanes = min(options.lanes or 2, self._runner.lanes.max_lanes)
        self.live_network.measure(self._known_trace.nbytes, kinds, lanes, self._budget.left_s)
        set_up_s = self.network.meta.get(WARM_UP) if self.network is not None else None
        self._budget.set_up_s += set_up_s if isinstance(set_up_s, float) else 0.0
        if self.network is not None and not Search._noise_was_logged and (note := noise_note(self.network)):
            Search._noise_was_logged = True
            self._warn(note)

    def renew_network(self, options: TuningOptions) -> None:
        """Calibrate the network, or measure it again, where it predicts the layout in force worse than before."""
        for renew in (partial(self._calibrate, several_lanes=False), partial(self.measure, options)):
            if self._decide(self.live_network.outdated(self._known_trace, self.best, self._policy.max_drift)):
                renew()

    # Trials.

    def warm_up(self, options: TuningOptions) -> Schedule[None]:
        """While an exchange with residuals must wait, search among those without, so that these steps are fast, too."""
        assert self.network is not None
        if self._runner.timer.steps_done >= self._collectives.residuals.warmup_steps:
            return
        kinds = [kind for kind in self._warm_up_kinds(options) if kind in self.network.curves]
        yield from self.run(replace(options, kinds=tuple(kinds)))
        self._enter(f"running {self.best.label} while training warms up")
        waited = self._collectives.residuals.warmup_steps - self._runner.timer.steps_done
        yield from steps(waited)
        self._began_at += waited  # steps of training, not of the search

    def run(self, options: TuningOptions) -> Schedule[None]:
        """Try candidates on one lane, which shows the cost of messages; then on several, which shows their contention;
        then once more with both known."""
        yield from self._try_candidates(replace(options, lanes=1))
        self._calibrate(several_lanes=False)
        yield from self._try_candidates(options)
        if self._calibrate(several_lanes=True):
            yield from self._try_candidates(options)

    def try_layout(self, label: str, plan: Plan | None) -> Schedule[None]:
        """Compare a layout with the best so far, unless it was tried already or no gain is predicted."""
        assert self.network is not None
        trace, before = self._known_trace, self.best
        expected = expected_gain(trace, plan, before, self.network, self._policy)
        simulated = simulated_gain(trace, plan, before.plan, self.network)
        more_faithful = error_of_layout(trace, plan) < error_of_layout(trace, before.plan)
        if more_faithful and expected >= -PRICE_OF_FIDELITY:
            expected += PRICE_OF_FIDELITY + self._policy.min_predicted_gain
        if any(trial.plan == plan for trial in self.trials) or not self.goes_on(expected):
            return
        self._enter(f"trying {label}")
        min_gain = allowed_loss(before, self.trials) if more_faithful else self._policy.min_gain
        best, tried, faster = yield from self._live.challenge(
            before, label, plan, min_gain=min_gain, in_doubt=more_faithful
        )
        if more_faithful or (1 - tried.step_s / best.step_s) / 2 < simulated < math.inf:
            tried = replace(tried, doubtful=False)  # what was measured had been predicted, or noise does no harm
        self._beaten = best if faster else self._beaten
        self.trials = [*(best if trial.plan == before.plan else trial for trial in self.trials), tried]
        self._best = tried if faster else best

    def win_again(self, kept: Trial) -> Schedule[None]:
        """Have a plan win once more against the layout that it beat; the faster one is the best, and in force."""
        self._enter(f"trying {kept.label} once more, since noise could have won")
        beaten = self._beaten
        assert beaten is not None  # by the doubtful win
        yield from self._live.change_to(beaten.plan)
        other = yield from self._live.timed(beaten.label, beaten.plan)
        self._budget.charge(len(other.steps) * (other.step_s - kept.step_s))
        other, again, faster = yield from self._live.challenge(other, kept.label, kept.plan, to_the_end=True)
        tried = {trial.plan: trial for trial in self.trials} | {other.plan: other, again.plan: again}
        best = self._best = replace(again if faster else other, doubtful=False)
        self.trials = [best if trial.plan == best.plan else trial for trial in tried.values()]

    def cut_graphs(self) -> Schedule[None]:
        """Have graphs compiled once more, cut where the best layout needs it, and keep what is fastest."""
        can_change = self._graphs.can_change
        if not self._decide(can_change and not self._held()):
            self._cuts.keep(self.best.plan, self._known_trace, self.network)
            if can_change and self._graphs.parts is None:  # the plan needs fewer cuts
                self._cuts.lines = [HELD_EARLY]
            return
        if self._decide(self.best.doubtful and self.best.plan is not None):  # before graphs are compiled for it alone
            yield from self.win_again(self.best)
        self._enter(f"compiling for {self.best.label}")
        yield from self._cuts.settle(self.best, self.trials, self._known_trace, self.network)
        self.trials, self._best = self._cuts.trials, self._cuts.best
        if self.network is not None:  # predictions know computing with the cuts in force
            self.trace = self.live_network.computed_faster(self._known_trace, self.best, self.trials[0])

    def _try_candidates(self, options: TuningOptions) -> Schedule[None]:
        """Try the candidates that have not been tried and are predicted to gain, the most promising first."""
        if self.failure or not self.goes_on():
            return
        self._enter("planning")
        for label, plan in (yield from self._plan(options)):
            yield from self.try_layout(label, plan)

    def _plan(self, options: TuningOptions) -> Schedule[Candidates]:
        """Have rank 0 plan while training continues; returns its candidates, on every rank."""
        assert self.network is not None
        make = partial(candidates, options, self._known_trace, self.network, self._policy)
        planner = BackgroundPlanner(make, self._runner.lanes.control)
        yield
        while not planner.done():
            yield
        found, self.failure = planner.outcome()
        if self.failure:
            self._warn(f"planning failed, {self._runner.layout.default_label} stay: {self.failure}")
        return [(label, plan) for label, plan in found if plan.lanes <= self._runner.lanes.max_lanes]

    def _calibrate(self, several_lanes: bool) -> bool:
        """Calibrate the network, and how long computing takes, by the trials so far; whether the network changed."""
        self.trace = self.live_network.computed_faster(self._known_trace, self.best, self.trials[0])
        return self.live_network.calibrate(self.trace, self.trials, several_lanes)

    def _warm_up_kinds(self, options: TuningOptions) -> list[str]:
        return warm_up_kinds(options.kinds, self._collectives, self._runner.parameters)

    @property
    def _known_trace(self) -> Trace:
        assert self.trace is not None  # once a step has been profiled
        return self.trace

    def _warn(self, text: str) -> None:
        """Log a warning on rank 0; not by ``warnings``, which under -W error would stop this rank alone."""
        if text and dist.get_rank(self._runner.lanes.control) == 0:
            log.warning("anabranch: %s", text)
