"""Models that FSDP2 shards: a step predicted, and planned, from what its blocks compute and weigh; no torch."""

from anabranch.fsdp.planning.files import load, save
from anabranch.fsdp.planning.links import Links
from anabranch.fsdp.planning.plan import ShardingPlan, Unit
from anabranch.fsdp.planning.planner import plan
from anabranch.fsdp.planning.step import peak_nbytes, simulate, step_s
from anabranch.fsdp.planning.trace import Block, ShardedTrace

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
