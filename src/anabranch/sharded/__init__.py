"""Models that FSDP2 shards: a step predicted, and planned, from what its blocks compute and weigh; no torch."""

from anabranch.sharded.files import load, save
from anabranch.sharded.links import Links
from anabranch.sharded.plan import ShardingPlan, Unit
from anabranch.sharded.planner import plan
from anabranch.sharded.step import peak_nbytes, simulate, step_s
from anabranch.sharded.trace import Block, ShardedTrace

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
