"""Predicts and plans the step of a model that FSDP2 shards, from what its blocks compute and weigh; no torch."""

from anabranch.fsdp.planning.planner import plan
from anabranch.fsdp.planning.sharded_step import peak_nbytes, simulate, step_s
from anabranch.values.files import load_as as load
from anabranch.values.files import save
from anabranch.values.sharded import Block, Links, ShardedTrace, ShardingPlan, Unit

__all__ = [
    "Block",
    "Links",
    "ShardedTrace",
    "ShardingPlan",
    "Unit",
    "load",
    "peak_nbytes",
    "plan",
    "save",
    "simulate",
    "step_s",
]
