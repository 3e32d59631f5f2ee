"""The planners as the command line names them, with the options that each understands."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from anabranch.network import Network
from anabranch.plan import MAX_LANES, Plan
from anabranch.planners import PLANNERS
from anabranch.planners.fixed import HOROVOD_CAP_NBYTES, MIB
from anabranch.trace import Trace

DDP_DEFAULT = "by_bytes"
NO_MERGING = "per_tensor"


class Entry(NamedTuple):
    """A planner of the library and the options it is called with."""

    planner: str
    options: Mapping[str, Any]

    @property
    def function(self) -> Callable[[Trace, Network], Plan]:
        """The planner with its options."""
        return partial(PLANNERS[self.planner], **self.options)


HOROVOD = Entry("by_bytes", {"cap_nbytes": HOROVOD_CAP_NBYTES, "closes": "before"})

# Beside what the library has, Horovod's way of using by_bytes, since people know it by that name.
LINEUP: Mapping[str, Entry] = {
    "per_tensor": Entry("per_tensor", {}),
    "single": Entry("single", {}),
    "by_bytes": Entry("by_bytes", {}),
    "horovod": HOROVOD,
    "mgwfbp": Entry("mgwfbp", {}),
    "optimal": Entry("optimal", {}),
    "asc": Entry("asc", {}),
    "lanes": Entry("lanes", {}),
}
TAKES_LANES = ("asc", "lanes")
TAKES_CAP = ("by_bytes", "optimal")


def entry(name: str, lanes: int | None = None, cap_mb: float | None = None) -> Entry:
    """The planner of this name with these options; ValueError if there is none, or it does not take them."""
    if name not in LINEUP:
        raise ValueError(f"planner is {name!r}: expected one of {', '.join(LINEUP)}")
    found = LINEUP[name]
    if lanes is not None:
        if name not in TAKES_LANES:
            raise ValueError(
                f"--lanes is {lanes}, but {name} uses one lane: choose --planner {' or '.join(TAKES_LANES)}"
            )
        if not 1 <= lanes <= MAX_LANES:
            raise ValueError(f"--lanes is {lanes}: expected 1 to {MAX_LANES}")
        found = found._replace(options={**found.options, "lanes": lanes})
    if cap_mb is not None:
        if name not in TAKES_CAP:
            raise ValueError(
                f"--cap-mb is {cap_mb:g}, but {name} has no cap: choose --planner {' or '.join(TAKES_CAP)}"
            )
        if not 0 < cap_mb <= MIB:
            raise ValueError(f"--cap-mb is {cap_mb:g}: expected a number of MiB above 0, such as 25")
        found = found._replace(options={**found.options, "cap_nbytes": max(1, round(cap_mb * MIB))})
    return found
