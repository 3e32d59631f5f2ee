"""The configurations, as data: a small model, how it is wrapped, and how it is trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from anabranch import OkTopk
from anabranch.planning import PLANNERS

Style = Literal["plain", "accumulate", "branches", "join"]


@dataclass(frozen=True)
class Configuration:
    """A small model, how it is wrapped, and how it is trained.

    ddp         arguments that stock DDP has, too
    ours        arguments of DataParallel; a network for these ranks is added unless ``measured``
    lean        arguments of Lean beside the optimizer; None without Lean
    compiled    the backend of torch.compile; empty if the model is not compiled
    lossy       it is not meant to train exactly as stock DDP does
    rows, seed  of this rank's batches, and of its initial weights
    """

    build: Literal["mlp", "normed", "branches", "wide", "sharded"] = "mlp"
    ddp: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)
    lean: Mapping[str, Any] | None = None
    style: Style = "plain"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    compiled: str = ""
    lossy: bool = False
    measured: bool = False
    given_plan: bool = False
    rows: int = 4
    seed: int = 7


SPARSE = OkTopk(density=0.25, warmup_steps=4, threshold_period=4, region_period=6)
SPARSE_BF16 = OkTopk(density=0.25, warmup_steps=2, wire="bf16", momentum=0.5)

CONFIGURATIONS: Mapping[str, Configuration] = {
    "default": Configuration(measured=True),
    **{f"planner-{name}": Configuration(ours={"planner": name}) for name in PLANNERS},
    "scattered": Configuration(ours={"planner": "scattered", "lanes": 2}),
    "scattered-measured": Configuration(ours={"planner": "scattered", "lanes": 3}, measured=True),
    "given-plan": Configuration(given_plan=True),
    "no-tuning": Configuration(ours={"profile_steps": 0}),
    "bf16": Configuration(ours={"compress": "bf16", "planner": "scattered"}, lossy=True),
    "oktopk": Configuration(ours={"compress": SPARSE}, lossy=True),
    "oktopk-bf16-momentum": Configuration(ours={"compress": SPARSE_BF16, "planner": "single"}, lossy=True),
    "lean-sgd": Configuration(lean={}, ours={"planner": "scattered"}),
    "lean-adamw": Configuration(lean={}, optimizer="adamw"),
    "lean-oktopk": Configuration(lean={"residuals": "in place"}, ours={"compress": SPARSE}, lossy=True),
    "lean-oktopk-int8": Configuration(lean={"residuals": "int8"}, ours={"compress": SPARSE}, lossy=True),
    "lean-bf16-clip": Configuration(lean={"clip_norm": 1.0}, ours={"compress": "bf16"}, lossy=True),
    "batch-norm": Configuration("normed", ours={"planner": "scattered"}),
    "batch-norm-measured": Configuration("normed", measured=True),
    "accumulate": Configuration(style="accumulate", ours={"planner": "scattered"}),
    "find-unused": Configuration(
        "branches", ddp={"find_unused_parameters": True}, ours={"planner": "scattered"}, style="branches"
    ),
    "static-graph": Configuration(ddp={"static_graph": True}, ours={"planner": "scattered"}),
    "bucket-view": Configuration(ddp={"gradient_as_bucket_view": True}, ours={"planner": "scattered"}),
    "join": Configuration(style="join", ours={"planner": "scattered"}),
    "int8": Configuration(ours={"compress": "int8", "planner": "scattered"}, lossy=True),
    "int4": Configuration(ours={"compress": "int4"}, lossy=True),
    "auto": Configuration(ours={"compress": "auto"}, lossy=True, measured=True),
    "lean-within": Configuration(lean={"within": "1GiB"}, optimizer="adamw"),
    "compiled": Configuration("wide", compiled="aot_eager", ours={"planner": "scattered"}),
    "compiled-measured": Configuration("wide", compiled="aot_eager", measured=True),
    "compiled-int8": Configuration("wide", compiled="eager", ours={"compress": "int8"}, lossy=True),
    "compiled-int4": Configuration("wide", compiled="aot_eager", ours={"compress": "int4"}, lossy=True),
    # Two nodes of two ranks: every second bucket is summed inside them first.
    "nodes": Configuration(ours={"nodes": 2}, given_plan=True),
    "nodes-measured": Configuration(ours={"nodes": 2}, measured=True),
    "nodes-int8": Configuration(ours={"nodes": 2, "compress": "int8"}, given_plan=True, lossy=True),
    "nodes-int4": Configuration(ours={"nodes": 2, "compress": "int4"}, given_plan=True, lossy=True),
    "nodes-oktopk": Configuration(ours={"nodes": 2, "compress": SPARSE}, given_plan=True, lossy=True),
    # FSDP2 inside each of two nodes of two ranks.
    "replicate": Configuration("sharded"),
    "replicate-bf16": Configuration("sharded", ours={"compress": "bf16"}, lossy=True),
    "replicate-int8": Configuration("sharded", ours={"compress": "int8"}, lossy=True),
    "replicate-oktopk": Configuration("sharded", ours={"compress": SPARSE}, lossy=True),
}
COMPILED = tuple(name for name, configuration in CONFIGURATIONS.items() if configuration.compiled)
SHARDED = tuple(name for name, configuration in CONFIGURATIONS.items() if configuration.build == "sharded")
TWO_BY_TWO = (*SHARDED, *(name for name in CONFIGURATIONS if name.startswith("nodes")))  # four ranks
