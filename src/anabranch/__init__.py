"""anabranch: data-parallel training that plans its communication.

Four frozen values (Trace, Network, Plan, Timeline), planners that make a Plan from the first two, a simulator that
turns a Plan into a Timeline, and files for all of them. Nothing here imports torch.
"""

from anabranch import planners
from anabranch.curve import Curve, CurvePoint
from anabranch.errors import AnabranchError, FileError, NetworkError, PlanError
from anabranch.files import load, save
from anabranch.links import AlphaBeta, TwoLevel
from anabranch.network import Contention, Network
from anabranch.plan import Bucket, Plan
from anabranch.planners import plan
from anabranch.sim import simulate
from anabranch.timeline import Span, Timeline
from anabranch.trace import TensorSpec, Trace
from anabranch.version import __version__

__all__ = [
    "AlphaBeta",
    "AnabranchError",
    "Bucket",
    "Contention",
    "Curve",
    "CurvePoint",
    "FileError",
    "Network",
    "NetworkError",
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
