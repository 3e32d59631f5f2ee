"""Predict a training step, or a whole cluster, from the four nouns; no torch."""

from anabranch.sim.cluster import ScalePoint, slowest_rank, sweep
from anabranch.sim.iteration import finish_s, lower_bound_s, simulate

__all__ = ["ScalePoint", "finish_s", "lower_bound_s", "simulate", "slowest_rank", "sweep"]
