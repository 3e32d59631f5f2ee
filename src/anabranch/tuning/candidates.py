"""The plans to try on a live model, given the options, the trace and the network; and their predicted times."""

from collections.abc import Collection
from dataclasses import replace

from anabranch import planning as planners
from anabranch.planning.ladder import FREE, least_lossy, with_fewer_messages
from anabranch.planning.merge import compressed
from anabranch.planning.simulator import finish_s, lower_bound_s, messages
from anabranch.tuning.calibration import as_recorded
from anabranch.tuning.options import TuningOptions
from anabranch.tuning.policy import DEFAULT_POLICY, TuningPolicy
from anabranch.tuning.trial import PRICE_OF_FIDELITY
from anabranch.values.errors import NetworkError
from anabranch.values.kinds.fidelity import error_of, error_of_plan, is_compressed
from anabranch.values.kinds.names import DENSE, EVERY_ELEMENT
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

MIXED = "as faithful as is hidden"


def candidates(
    options: TuningOptions, trace: Trace, network: Network, policy: TuningPolicy = DEFAULT_POLICY
) -> list[tuple[str, Plan]]:
    """Labelled plans to try: the planner's, and one on several lanes if that is predicted to gain enough."""
    planner = planners.PLANNERS[options.planner] if isinstance(options.planner, str) else options.planner
    name = options.planner if isinstance(options.planner, str) else getattr(planner, "__name__", "your planner")
    found = _on_one_and_several_lanes((name, planner(trace, network)), DENSE, options, trace, network, policy)
    found = [*_compressed(options, trace, network, policy, found[0]), *found]
    return [(label + _calibrations(plan, network), plan.check(trace)) for label, plan in found]


def _on_one_and_several_lanes(
    one_lane: tuple[str, Plan],
    kind: str,
    options: TuningOptions,
    trace: Trace,
    network: Network,
    policy: TuningPolicy,
) -> list[tuple[str, Plan]]:
    """A plan of this kind, and one on several lanes if that is predicted to gain enough."""
    if options.lanes == 1:
        return [one_lane]
    several = planners.lanes(trace, network, lanes=options.lanes or 2, collective=kind)
    several = _with_dense(several, options.excluded.get(kind, frozenset()))
    gain = 1 - predicted_s(trace, several, network) / predicted_s(trace, one_lane[1], network)
    if several.lanes == 1 or gain <= policy.lanes_min_gain:
        return [one_lane]
    return [one_lane, (f"{several.lanes} lanes" + (f", {kind}" if kind != DENSE else ""), several)]


def _compressed(
    options: TuningOptions, trace: Trace, network: Network, policy: TuningPolicy, plain: tuple[str, Plan]
) -> list[tuple[str, Plan]]:
    """The plans with compressed buckets, if ``compress`` was given; a mix may have none.

    Other plans count only with a compressed bucket: that for bf16 of a model in float16 would be a dense plan in
    another name, with buckets for the price of bf16.
    """
    if not options.kinds:
        return []
    if options.mixes:
        errors = {kind: error_of(kind) for kind in (DENSE, *options.kinds)}
        mixed = least_lossy(trace, network, errors, options.excluded)
        mixed = with_fewer_messages(trace, network, mixed, errors, options.excluded)
        # Before it the plan that it has to be as fast as. Only live steps show what many messages cost, and how much
        # full ones slow computing, while they are transferred: also where all is predicted to be hidden in full.
        transfers = _transfers_s(trace, mixed, network) > FREE * (trace.forward_s + trace.backward_s)
        rivals = _fastest_of_one_kind(options, trace, network, policy) if transfers else []
        return [*((label, plan) for label, plan in rivals if plan != mixed), (MIXED, mixed)]
    kind = options.kinds[0]
    if kind in EVERY_ELEMENT and options.planner != "optimal":  # other planners do not know what it costs
        excluded = options.excluded.get(kind, frozenset())
        rounded = f"{plain[0]}, {kind}", _with_dense(planners.using(plain[1], kind), excluded)
        return _with_compressed(_on_one_and_several_lanes(rounded, kind, options, trace, network, policy))
    return _with_compressed(_of_one_kind(kind, options, trace, network, policy))


def _with_compressed(plans: list[tuple[str, Plan]]) -> list[tuple[str, Plan]]:
    """Those of the plans that have a compressed bucket."""
    return [(label, plan) for label, plan in plans if any(is_compressed(bucket.collective) for bucket in plan.buckets)]


def _of_one_kind(
    kind: str, options: TuningOptions, trace: Trace, network: Network, policy: TuningPolicy
) -> list[tuple[str, Plan]]:
    """The planned buckets of one compressed kind, with those dense that must not use it."""
    excluded = options.excluded.get(kind, frozenset())
    if kind not in EVERY_ELEMENT:
        return [(kind, compressed(trace, network, kind, excluded))]
    best = f"optimal, {kind}", _with_dense(planners.optimal(trace, network, collective=kind), excluded)
    return _on_one_and_several_lanes(best, kind, options, trace, network, policy)


def _fastest_of_one_kind(
    options: TuningOptions, trace: Trace, network: Network, policy: TuningPolicy
) -> list[tuple[str, Plan]]:
    """Of the plans of one kind the one that is predicted to end first; of those that end with it, the most faithful.

    None if no gradient may use any kind. Plans without a compressed bucket do not count.
    """
    every = [found for kind in options.kinds for found in _of_one_kind(kind, options, trace, network, policy)]
    plans = _with_compressed(every)
    ends_s = [predicted_s(trace, plan, network) for _, plan in plans]
    soonest_s = min(ends_s, default=0.0) * (1 + PRICE_OF_FIDELITY)
    in_time = [
        (error_of_plan(trace, plan), end_s, index)
        for index, ((_, plan), end_s) in enumerate(zip(plans, ends_s, strict=True))
        if end_s <= soonest_s
    ]
    return [plans[index] for _, _, index in sorted(in_time)[:1]]


def _transfers_s(trace: Trace, plan: Plan, network: Network) -> float:
    """How long the messages of a plan are transferred in all; start-ups do not count."""
    return sum(message.transfer_s for message in messages(trace, plan, network))


def _with_dense(plan: Plan, names: Collection[str]) -> Plan:
    """The plan, with buckets of these gradients sent dense; a bucket has gradients of one dtype."""
    if not names:
        return plan
    dense = [
        bucket if set(bucket.names).isdisjoint(names) else replace(bucket, collective=DENSE) for bucket in plan.buckets
    ]
    return Plan(tuple(dense))


def _calibrations(plan: Plan, network: Network) -> str:
    """Label suffix: how often the costs that this plan uses were calibrated by live steps."""
    if plan.lanes > 1 and "refined_contention" in network.meta:
        return ", refined twice"
    return ", refined" if "refined" in network.meta else ""


def lower_bound_step_s(trace: Trace, network: Network) -> float:
    """A lower bound on the time from the start of forward to averaged gradients, for any plan on one lane."""
    return trace.forward_s + lower_bound_s(trace, network)


def unmerged_s(trace: Trace, network: Network) -> float:
    """Predicted time with every gradient in a message of its own."""
    return predicted_s(trace, planners.per_tensor(trace, network), network)


def prediction_s(trace: Trace, plan: Plan | None, network: Network) -> float | None:
    """As ``predicted_s``; None if the network has no cost for a kind, or the trace no gradient, that a plan names.

    The trace has no gradient of a parameter that was frozen before it was recorded, under a plan that was given.
    """
    names = {tensor.name for tensor in trace.tensors}
    if plan is not None and any(name not in names for bucket in plan.buckets for name in bucket.names):
        return None
    try:
        return predicted_s(trace, plan, network)
    except NetworkError:
        return None


def predicted_s(trace: Trace, plan: Plan | None, network: Network) -> float:
    """Predicted time from the start of forward to averaged gradients; without a plan, under DDP's own buckets.

    The trace was recorded under those, so that what their messages delay is in it already.
    """
    if plan is None:
        trace = as_recorded(trace)
        plan, network = planners.by_bytes(trace, network), replace(network, delays={})
    return trace.forward_s + finish_s(trace, plan, network)
