"""Planners: pure functions (trace, network, **options) -> Plan."""

from collections.abc import Callable, Mapping
from typing import Any

from anabranch.planning.by_size import by_bytes, per_tensor, single
from anabranch.planning.lanes import asc, lanes
from anabranch.planning.merge import mgwfbp, optimal, using
from anabranch.values.network import Network
from anabranch.values.plan import Plan
from anabranch.values.trace import Trace

PLANNERS: Mapping[str, Callable[..., Plan]] = {
    "per_tensor": per_tensor,
    "single": single,
    "by_bytes": by_bytes,
    "mgwfbp": mgwfbp,
    "optimal": optimal,
    "asc": asc,
    "lanes": lanes,
}


def plan(trace: Trace, network: Network, planner: str = "optimal", **options: Any) -> Plan:
    """The plan that the planner of this name makes."""
    if planner not in PLANNERS:
        raise ValueError(f"planner is {planner!r}: expected one of {', '.join(PLANNERS)}")
    return PLANNERS[planner](trace, network, **options)


__all__ = ["PLANNERS", "asc", "by_bytes", "lanes", "mgwfbp", "optimal", "per_tensor", "plan", "single", "using"]
