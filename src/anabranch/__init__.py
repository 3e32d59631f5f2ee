"""anabranch: data-parallel training that plans its communication.

Four frozen values (Trace, Network, Plan, Timeline), planners that make a Plan from the first two, a simulator that
turns a Plan into a Timeline, and files for all of them: none of these imports torch. ``DataParallel``, the drop-in for
DistributedDataParallel that runs a plan on a live model, imports torch when it is first used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from anabranch import planners, sharded
from anabranch.alpha_beta import AlphaBeta, TwoLevel
from anabranch.curve import Curve, CurvePoint
from anabranch.errors import (
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
from anabranch.files import load, save
from anabranch.network import Contention, Network
from anabranch.plan import Bucket, Plan
from anabranch.planners import plan
from anabranch.sharded import ShardedTrace, ShardingPlan
from anabranch.sim import simulate
from anabranch.timeline import Span, Timeline
from anabranch.trace import TensorSpec, Trace
from anabranch.version import __version__

if _TYPE_CHECKING:
    from anabranch.activations.policy import Activations
    from anabranch.auto import Auto
    from anabranch.integrations.comm_hooks import CommHookState, oktopk_hook, quantised_hook
    from anabranch.integrations.distributed_checkpoint import CommState
    from anabranch.integrations.sharded import Replication, replicate
    from anabranch.integrations.sharded_checkpoint import ReplicationState
    from anabranch.integrations.sharded_watch import Watch, watch
    from anabranch.integrations.sharding import block_names, shard
    from anabranch.integrations.sharding_trial import FoundSharding, find_sharding
    from anabranch.lean.options import Lean
    from anabranch.lean_parallel import LeanDataParallel
    from anabranch.observe.loggers import JsonLines, Progress, TensorBoard, WandB
    from anabranch.observe.metrics import Logger, Metrics
    from anabranch.parallel import DataParallel
    from anabranch.quantised.options import Quantised
    from anabranch.sparse.options import OkTopk
    from anabranch.tuning.policy import TuningPolicy

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


# Imported on first use, since they import torch, which planning does not need.
_WITH_TORCH = {
    "Activations": "anabranch.activations.policy",
    "Auto": "anabranch.auto",
    "CommHookState": "anabranch.integrations.comm_hooks",
    "CommState": "anabranch.integrations.distributed_checkpoint",
    "DataParallel": "anabranch.parallel",
    "FoundSharding": "anabranch.integrations.sharding_trial",
    "JsonLines": "anabranch.observe.loggers",
    "Lean": "anabranch.lean.options",
    "LeanDataParallel": "anabranch.lean_parallel",
    "Logger": "anabranch.observe.metrics",
    "Metrics": "anabranch.observe.metrics",
    "OkTopk": "anabranch.sparse.options",
    "Progress": "anabranch.observe.loggers",
    "Quantised": "anabranch.quantised.options",
    "Replication": "anabranch.integrations.sharded",
    "ReplicationState": "anabranch.integrations.sharded_checkpoint",
    "TensorBoard": "anabranch.observe.loggers",
    "TuningPolicy": "anabranch.tuning.policy",
    "WandB": "anabranch.observe.loggers",
    "Watch": "anabranch.integrations.sharded_watch",
    "block_names": "anabranch.integrations.sharding",
    "find_sharding": "anabranch.integrations.sharding_trial",
    "oktopk_hook": "anabranch.integrations.comm_hooks",
    "quantised_hook": "anabranch.integrations.comm_hooks",
    "replicate": "anabranch.integrations.sharded",
    "shard": "anabranch.integrations.sharding",
    "watch": "anabranch.integrations.sharded_watch",
}


def __dir__() -> list[str]:
    """All public names, also those that are imported on first use."""
    return __all__


def __getattr__(name: str) -> _Any:
    """Import names that need torch when they are first used."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    return getattr(_import_module(_WITH_TORCH[name]), name)
