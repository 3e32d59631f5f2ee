"""anabranch: data-parallel training that plans its communication.

Four frozen values (Trace, Network, Plan, Timeline), planners that make a Plan from the first two, a simulator that
turns a Plan into a Timeline, and files for all of them: none of these imports torch. ``DataParallel``, the drop-in for
DistributedDataParallel that runs a plan on a live model, imports torch when it is first used.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from anabranch import planning as planners
from anabranch.fsdp import planning as sharded
from anabranch.fsdp.planning import ShardedTrace, ShardingPlan
from anabranch.planning import plan
from anabranch.planning.simulator import simulate
from anabranch.values.curve import Curve, CurvePoint
from anabranch.values.errors import (
    AnabranchError,
    CollectiveError,
    DisagreementError,
    FileError,
    LabError,
    MissingExtraError,
    NetworkError,
    PlanError,
    UpdateError,
)
from anabranch.values.files import load, save
from anabranch.values.links import AlphaBeta, TwoLevel
from anabranch.values.network import Contention, Network
from anabranch.values.plan import Bucket, Plan
from anabranch.values.timeline import Span, Timeline
from anabranch.values.trace import TensorSpec, Trace
from anabranch.values.version import __version__

if _TYPE_CHECKING:
    from anabranch.frameworks.comm_hooks import CommHookState, oktopk_hook, quantised_hook
    from anabranch.frameworks.comm_state import CommState, ReplicationState
    from anabranch.fsdp.find_sharding import FoundSharding, find_sharding
    from anabranch.fsdp.replicate import Replication, replicate
    from anabranch.fsdp.shard import block_names, shard
    from anabranch.fsdp.watch import Watch, watch
    from anabranch.lean.options import Activations, Lean
    from anabranch.lean.parallel import LeanDataParallel
    from anabranch.observe.metrics import JsonLines, Logger, Metrics, Progress, TensorBoard, WandB
    from anabranch.parallel import DataParallel
    from anabranch.tuning.options import TuningPolicy
    from anabranch.values.kinds.options import Auto, OkTopk, Quantised

__all__ = [
    "Activations",
    "AlphaBeta",
    "AnabranchError",
    "Auto",
    "Bucket",
    "CollectiveError",
    "CommHookState",
    "CommState",
    "Contention",
    "Curve",
    "CurvePoint",
    "DataParallel",
    "DisagreementError",
    "FileError",
    "FoundSharding",
    "JsonLines",
    "LabError",
    "Lean",
    "LeanDataParallel",
    "Logger",
    "Metrics",
    "MissingExtraError",
    "Network",
    "NetworkError",
    "OkTopk",
    "Plan",
    "PlanError",
    "Progress",
    "Quantised",
    "Replication",
    "ReplicationState",
    "ShardedTrace",
    "ShardingPlan",
    "Span",
    "TensorBoard",
    "TensorSpec",
    "Timeline",
    "Trace",
    "TuningPolicy",
    "TwoLevel",
    "UpdateError",
    "WandB",
    "Watch",
    "__version__",
    "block_names",
    "find_sharding",
    "load",
    "oktopk_hook",
    "plan",
    "planners",
    "quantised_hook",
    "replicate",
    "save",
    "shard",
    "sharded",
    "simulate",
    "watch",
]

# These two are public by name: ``from anabranch.sharded import Block`` works wherever their rooms are.
_sys.modules.update({"anabranch.planners": planners, "anabranch.sharded": sharded})

# Imported on first use, since they import torch, which planning does not need.
_WITH_TORCH = {
    name: f"anabranch.{module}"
    for module, names in {
        "frameworks.comm_state": ("CommState", "ReplicationState"),
        "frameworks.comm_hooks": ("CommHookState", "oktopk_hook", "quantised_hook"),
        "fsdp.replicate": ("Replication", "replicate"),
        "fsdp.shard": ("block_names", "shard"),
        "fsdp.find_sharding": ("FoundSharding", "find_sharding"),
        "fsdp.watch": ("Watch", "watch"),
        "lean.options": ("Activations", "Lean"),
        "lean.parallel": ("LeanDataParallel",),
        "observe.metrics": ("JsonLines", "Logger", "Metrics", "Progress", "TensorBoard", "WandB"),
        "parallel": ("DataParallel",),
        "tuning.options": ("TuningPolicy",),
        "values.kinds.options": ("Auto", "OkTopk", "Quantised"),
    }.items()
    for name in names
}


def __dir__() -> list[str]:
    """All public names, also those that are imported on first use."""
    return __all__


def __getattr__(name: str) -> _Any:
    """Import names that need torch when they are first used."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    return getattr(_import_module(_WITH_TORCH[name]), name)
