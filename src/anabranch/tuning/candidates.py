"""What is worth trying on a live model, given what the user wished for and what was recorded and measured."""

from anabranch import planners
from anabranch.comm.dense import COLLECTIVES
from anabranch.network import Network
from anabranch.plan import Plan
from anabranch.planners.sparse import densest, sparse
from anabranch.sim import finish_s, lower_bound_s
from anabranch.trace import Trace
from anabranch.tuning.options import TuningOptions

LANES_MUST_GAIN = 0.02  # predicted, before more than one lane is tried at all


def candidates(wishes: TuningOptions, trace: Trace, network: Network) -> list[tuple[str, Plan]]:
    """Plans to try, with what to call them: the planner's, and one with several lanes if predicted to pay."""
    planner = planners.PLANNERS[wishes.planner] if isinstance(wishes.planner, str) else wishes.planner
    name = wishes.planner if isinstance(wishes.planner, str) else getattr(planner, "__name__", "your planner")
    found = [(name, planner(trace, network))]
    if wishes.lanes != 1:
        several = planners.lanes(trace, network, lanes=wishes.lanes or 2)
        gain = 1 - predicted_s(trace, several, network) / predicted_s(trace, found[0][1], network)
        if several.lanes > 1 and gain > LANES_MUST_GAIN:
            found.append((f"{several.lanes} lanes", several))
    found = [*_compressed(wishes, trace, network, found), *found]
    return [(label + _again(plan, network), plan.check(trace)) for label, plan in found]


def _compressed(
    wishes: TuningOptions, trace: Trace, network: Network, plain: list[tuple[str, Plan]]
) -> list[tuple[str, Plan]]:
    """The plans that send less, for whatever was asked for."""
    if not wishes.kinds:
        return []
    kind = wishes.kinds[0]
    if kind in COLLECTIVES:  # remembers nothing, so any plan can use it
        packed = [(f"{label}, {kind}", planners.using(plan, kind)) for label, plan in plain]
        if wishes.planner == "optimal":  # which can count with that collective's own costs
            packed[0] = (packed[0][0], planners.optimal(trace, network, collective=kind))
        return packed
    if len(wishes.kinds) == 1:
        return [(kind, sparse(trace, network, kind, wishes.dense_names))]
    return [("as dense as is hidden", densest(trace, network, wishes.kinds, wishes.dense_names))]


def _again(plan: Plan, network: Network) -> str:
    """How often the network was corrected, by live steps, for what this plan uses of it."""
    if plan.lanes > 1 and "refined_contention" in network.meta:
        return ", refined twice"
    return ", refined" if "refined" in network.meta else ""


def least_s(trace: Trace, network: Network) -> float:
    """No plan on one lane gets from the start of forward to averaged gradients sooner than this."""
    return trace.forward_s + lower_bound_s(trace, network)


def unmerged_s(trace: Trace, network: Network) -> float:
    """Predicted time with every gradient in a message of its own."""
    return predicted_s(trace, planners.per_tensor(trace, network), network)


def predicted_s(trace: Trace, plan: Plan | None, network: Network) -> float:
    """Predicted time from the start of forward to averaged gradients; without a plan, under DDP's own buckets."""
    return trace.forward_s + finish_s(trace, plan or planners.by_bytes(trace, network), network)
