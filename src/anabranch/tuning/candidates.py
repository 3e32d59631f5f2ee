"""Candidates: the plans to try on a live model, their predicted times, and planning them in the background."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from operator import itemgetter
from threading import Thread

import torch.distributed as dist
from torch import nn

from anabranch import planning as planners
from anabranch.exchange.agreement import agree_on, from_rank_0
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.interface import Group
from anabranch.planning.ladder import FREE, least_lossy, with_fewer_messages
from anabranch.planning.merge import compressed
from anabranch.planning.simulator import messages
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.trial import PRICE_OF_FIDELITY, predicted_s
from anabranch.values.kinds.fidelity import error_of, error_of_plan, is_compressed
from anabranch.values.kinds.names import DENSE, EVERY_ELEMENT, between_nodes, is_two_level, two_level
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

MIXED = "as faithful as is hidden"
WARM_UP_KIND = "bf16"  # may be used while an exchange with residuals still waits for its warm-up: it delays nothing

Candidates = list[tuple[str, Plan]]  # with labels


def candidates(options: TuningOptions, trace: Trace, network: Network) -> Candidates:
    """Labelled plans to try: the planner's, and one on several lanes if that is predicted to gain enough."""
    found = _CandidatePlanner(options, trace, network).found()
    return [(label + _calibration_suffix(plan, network), plan.check(trace)) for label, plan in found]


@dataclass(frozen=True, slots=True)
class _CandidatePlanner:
    options: TuningOptions
    trace: Trace
    network: Network

    def found(self) -> Candidates:
        """Plans with compressed buckets first, if ``compress`` was given."""
        given = self.options.planner
        planner = planners.PLANNERS[given] if isinstance(given, str) else given
        name = given if isinstance(given, str) else getattr(planner, "__name__", "your planner")
        plain = name, planner(self.trace, self.network)
        dense = self._and_on_lanes(plain, DENSE)
        if self._on_nodes(DENSE) and given == "optimal":
            exact = planners.optimal(self.trace, self.network, collective=two_level(DENSE))
            exact = self._with_dense(exact, two_level(DENSE))
            if any(is_two_level(bucket.collective) for bucket in exact.buckets):
                dense = self._soonest_first(dense, [(f"{name}, {two_level(DENSE)}", exact)])
        return [*self._compressed(plain), *dense]

    def _on_nodes(self, kind: str) -> bool:
        """Whether a plan may have this kind on two levels."""
        return self.options.found_nodes.nodes is not None and two_level(kind) in self.network.curves

    def _with_levels(self, kinds: Sequence[str]) -> list[str]:
        """These kinds, and those of them on two levels that a plan may have."""
        return [*kinds, *(two_level(kind) for kind in kinds if self._on_nodes(kind))]

    def _soonest_first(self, *ways: Candidates) -> Candidates:
        """All plans; first those of the way that has the soonest one."""
        ends_s = [min((self._predicted_s(plan) for _, plan in way), default=0.0) for way in ways]
        return [found for _, way in sorted(zip(ends_s, ways, strict=True), key=itemgetter(0)) for found in way]

    def _and_on_lanes(self, one_lane: tuple[str, Plan], kind: str) -> Candidates:
        """This plan of one kind, and one on several lanes if that is predicted to gain enough."""
        lanes = self.options.lanes or 2
        if lanes == 1 or is_two_level(kind):  # whose stages overlap on one lane, which has communicators enough
            return [one_lane]
        several = self._with_dense(planners.lanes(self.trace, self.network, lanes=lanes, collective=kind), kind)
        gain = 1 - self._predicted_s(several) / self._predicted_s(one_lane[1])
        if several.lanes == 1 or gain <= self.options.policy.lanes_min_gain:
            return [one_lane]
        return [one_lane, (f"{several.lanes} lanes" + (f", {kind}" if kind != DENSE else ""), several)]

    def _compressed(self, plain: tuple[str, Plan]) -> Candidates:
        """The plans with compressed buckets; a mix may have none.

        Other plans count only with a compressed bucket: that for bf16 of a model in float16 would be a dense plan in
        another name, with buckets for the price of bf16.
        """
        options, trace, network = self.options, self.trace, self.network
        if not options.kinds:
            return []
        if options.mixes:
            errors = {kind: error_of(kind) for kind in self._with_levels((DENSE, *options.kinds))}
            excluded = {kind: self._excluded(kind) for kind in errors}
            mixed = least_lossy(trace, network, errors, excluded)
            mixed = with_fewer_messages(trace, network, mixed, errors, excluded)
            # Before it the plan that it has to be as fast as. Only live steps show what many messages cost, and how
            # much full ones slow computing, while they are transferred: also where all is predicted to be hidden.
            transfers_s = sum(message.transfer_s for message in messages(trace, mixed, network))
            is_slow = transfers_s > FREE * (trace.forward_s + trace.backward_s)
            rivals = self._fastest_of_one_kind() if is_slow else []
            return [*((label, plan) for label, plan in rivals if plan != mixed), (MIXED, mixed)]
        kind = options.kinds[0]
        if kind in EVERY_ELEMENT and options.planner != "optimal":  # other planners do not know what it costs
            rounded = f"{plain[0]}, {kind}", self._with_dense(planners.using(plain[1], kind), kind)
            return _with_compressed(self._and_on_lanes(rounded, kind))
        return self._soonest_first(*(_with_compressed(self._of_one_kind(one)) for one in self._with_levels([kind])))

    def _of_one_kind(self, kind: str) -> Candidates:
        """The planned buckets of one compressed kind, with those dense that must not use it."""
        if between_nodes(kind) not in EVERY_ELEMENT:
            return [(kind, compressed(self.trace, self.network, kind, self._excluded(kind)))]
        best = self._with_dense(planners.optimal(self.trace, self.network, collective=kind), kind)
        return self._and_on_lanes((f"optimal, {kind}", best), kind)

    def _fastest_of_one_kind(self) -> Candidates:
        """Of the plans of one kind the one predicted to end first; of those that end with it, the most faithful.

        Empty if no gradient may use any kind. Plans without a compressed bucket do not count.
        """
        plans = _with_compressed(
            [found for kind in self._with_levels(self.options.kinds) for found in self._of_one_kind(kind)]
        )
        ends_s = [self._predicted_s(plan) for _, plan in plans]
        soonest_s = min(ends_s, default=0.0) * (1 + PRICE_OF_FIDELITY)
        in_time = [(end_s, found) for end_s, found in zip(ends_s, plans, strict=True) if end_s <= soonest_s]
        in_time.sort(key=lambda one: (error_of_plan(self.trace, one[1][1]), one[0]))
        return [found for _, found in in_time[:1]]

    def _with_dense(self, plan: Plan, kind: str) -> Plan:
        """The plan, with buckets of gradients that must not use this kind sent dense; a bucket has one dtype."""
        names = self._excluded(kind)
        return Plan(tuple(b if names.isdisjoint(b.names) else replace(b, collective=DENSE) for b in plan.buckets))

    def _excluded(self, kind: str) -> frozenset[str]:
        return self.options.excluded.get(kind, frozenset())

    def _predicted_s(self, plan: Plan) -> float:
        return predicted_s(self.trace, plan, self.network)


def _with_compressed(plans: Candidates) -> Candidates:
    """Those of the plans that have a compressed bucket."""
    return [(label, plan) for label, plan in plans if any(is_compressed(bucket.collective) for bucket in plan.buckets)]


def _calibration_suffix(plan: Plan, network: Network) -> str:
    """Label suffix: how often the costs that this plan uses were calibrated by live steps."""
    if plan.lanes > 1 and "refined_contention" in network.meta:
        return ", refined twice"
    return ", refined" if "refined" in network.meta else ""


def warm_up_kinds(kinds: Sequence[str], collectives: Collectives, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Kinds for plans that run while training warms up: those without residuals, or if there are none, bf16."""
    asked = [kind for kind in kinds if not collectives.residuals.keeps(kind)]
    dtypes = {parameter.dtype for parameter in parameters.values()}
    may_round = all(collectives.supports(WARM_UP_KIND, dtype) for dtype in dtypes)
    return asked or ([WARM_UP_KIND] if may_round else [])


def may_run(plan: Plan | None, steps_done: int, collectives: Collectives) -> bool:
    """Whether a plan may run after this many steps: exchanges with residuals wait for the end of the warm-up."""
    if plan is None or steps_done >= collectives.residuals.warmup_steps:
        return True
    return not any(collectives.residuals.keeps(bucket.collective) for bucket in plan.buckets)


class BackgroundPlanner:
    """Runs ``plan`` on rank 0, in a daemon thread. Both methods are collective among the ranks of ``control``."""

    def __init__(self, plan: Callable[[], Candidates], control: Group) -> None:
        self._control = control
        self._is_rank_0 = dist.get_rank(control) == 0
        self._planned: Future[Candidates] = Future()
        if self._is_rank_0:
            Thread(target=self._run, args=(plan,), name="anabranch-planner", daemon=True).start()

    def done(self) -> bool:
        """Whether planning has finished."""
        return bool(from_rank_0(bytes([self._planned.done()]), self._control)[0])

    def outcome(self) -> tuple[Candidates, str]:
        """Rank 0's candidates on every rank, once planning has finished; or no candidates, and why planning failed."""
        failure = self._planned.exception() if self._is_rank_0 else None
        found = self._planned.result() if self._is_rank_0 and failure is None else []
        message = {
            "labels": [label for label, _ in found],
            "failure": f"{type(failure).__name__}: {failure}" if failure else "",
        }
        received = json.loads(from_rank_0(json.dumps(message).encode(), self._control))
        labels = received["labels"]
        plans = [agree_on(Plan, found[i][1] if self._is_rank_0 else None, self._control) for i in range(len(labels))]
        return list(zip(labels, plans, strict=True)), received["failure"]

    def _run(self, plan: Callable[[], Candidates]) -> None:
        # An error must reach outcome(): the other ranks wait for it there.
        try:
            self._planned.set_result(plan())
        except BaseException as error:
            self._planned.set_exception(error)
