"""The planners by the names that the command line gives them, each with its options."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from anabranch.planning import PLANNERS
from anabranch.planning.fixed import HOROVOD_CAP_NBYTES, MIB
from anabranch.values.network import Network
from anabranch.values.plan import MAX_LANES, Plan
from anabranch.values.trace import Trace

DDP_DEFAULT = "by_bytes"  # whose defaults are those of torch's DistributedDataParallel
NO_MERGING = "per_tensor"


@dataclass(frozen=True, slots=True)
class NamedPlanner:
    """A planner of the library with the options it is called with."""

    planner: str
    options: Mapping[str, Any]

    def __call__(self, trace: Trace, network: Network) -> Plan:
        return PLANNERS[self.planner](trace, network, **self.options)


# Horovod's fusion buffer is by_bytes with other options. It has a name of its own because users look for it by that.
HOROVOD = NamedPlanner("by_bytes", {"cap_nbytes": HOROVOD_CAP_NBYTES, "closes": "before"})
NAMES = ("per_tensor", "single", "by_bytes", "horovod", "mgwfbp", "optimal", "asc", "lanes")
NAMED_PLANNERS = {name: HOROVOD if name == "horovod" else NamedPlanner(name, {}) for name in NAMES}
WITH_LANES = ("asc", "lanes")
WITH_CAP = ("by_bytes", "optimal")


def named_planner(name: str, lanes: int | None = None, cap_mb: float | None = None) -> NamedPlanner:
    """The planner of this name with these options; ValueError for an unknown name or an option it does not take."""
    if name not in NAMED_PLANNERS:
        raise ValueError(f"planner is {name!r}: expected one of {', '.join(NAMED_PLANNERS)}")
    options = dict(NAMED_PLANNERS[name].options)
    if lanes is not None:
        if name not in WITH_LANES:
            raise ValueError(
                f"--lanes is {lanes}, but {name} uses one lane: choose --planner {' or '.join(WITH_LANES)}"
            )
        if not 1 <= lanes <= MAX_LANES:
            raise ValueError(f"--lanes is {lanes}: expected 1 to {MAX_LANES}")
        options["lanes"] = lanes
    if cap_mb is not None:
        if name not in WITH_CAP:
            raise ValueError(f"--cap-mb is {cap_mb:g}, but {name} has no cap: choose --planner {' or '.join(WITH_CAP)}")
        if not 0 < cap_mb <= MIB:
            raise ValueError(f"--cap-mb is {cap_mb:g}: expected a number of MiB above 0, such as 25")
        options["cap_nbytes"] = max(1, round(cap_mb * MIB))
    return replace(NAMED_PLANNERS[name], options=options)
