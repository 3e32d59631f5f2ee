"""The planners by the names that the command line gives them, each with its options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anabranch.planning import PLANNERS
from anabranch.planning.fixed import HOROVOD_CAP_NBYTES
from anabranch.values.network import Network
from anabranch.values.plan import Plan
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


def named_planner(name: str) -> NamedPlanner:
    """The planner of this name; ValueError if there is none."""
    if name not in NAMED_PLANNERS:
        raise ValueError(f"planner is {name!r}: expected one of {', '.join(NAMED_PLANNERS)}")
    return NAMED_PLANNERS[name]
