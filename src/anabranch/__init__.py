"""anabranch: data-parallel training that plans its communication.

Four frozen values (Trace, Network, Plan, Timeline), planners that make a Plan from the first two, a simulator that
turns a Plan into a Timeline, and files for all of them: none of these imports torch. ``DataParallel``, the drop-in for
DistributedDataParallel that runs a plan on a live model, does, when it is first asked for.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from anabranch import planners
from anabranch.curve import Curve, CurvePoint
from anabranch.errors import (
    AnabranchError,
    CollectiveError,
    DisagreementError,
    FileError,
    LabError,
    NetworkError,
    PlanError,
)
from anabranch.files import load, save
from anabranch.links import AlphaBeta, TwoLevel
from anabranch.network import Contention, Network
from anabranch.plan import Bucket, Plan
from anabranch.planners import plan
from anabranch.sim import simulate
from anabranch.timeline import Span, Timeline
from anabranch.trace import TensorSpec, Trace
from anabranch.version import __version__

if _TYPE_CHECKING:
    from anabranch.runtime.parallel import DataParallel
    from anabranch.sparse.options import OkTopk

__all__ = [
    "AlphaBeta",
    "AnabranchError",
    "Bucket",
    "CollectiveError",
    "Contention",
    "Curve",
    "CurvePoint",
    "DataParallel",
    "DisagreementError",
    "FileError",
    "LabError",
    "Network",
    "NetworkError",
    "OkTopk",
    "Plan",
    "PlanError",
    "Span",
    "TensorSpec",
    "Timeline",
    "Trace",
    "TwoLevel",
    "__version__",
    "load",
    "plan",
    "planners",
    "save",
    "simulate",
]


def __getattr__(name: str) -> _Any:
    """Import torch only for those who train."""
    if name == "DataParallel":
        from anabranch.runtime.parallel import DataParallel

        return DataParallel
    if name == "OkTopk":
        from anabranch.sparse.options import OkTopk

        return OkTopk
    raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
