"""Predict a training step, or a whole cluster, from the four nouns; no torch."""

from anabranch.sim.cluster import Compute, sweep
from anabranch.sim.iteration import finish_s, lower_bound_s, simulate
from anabranch.sim.ranks import slowest_ranks

__all__ = ["Compute", "finish_s", "lower_bound_s", "simulate", "slowest_ranks", "sweep"]
