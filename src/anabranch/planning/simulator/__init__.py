"""Predict a training step from the four nouns; no torch."""

from anabranch.planning.simulator.iteration import finish_s, lower_bound_s, simulate, undelayed
from anabranch.planning.simulator.ranks import slowest_ranks

__all__ = ["finish_s", "lower_bound_s", "simulate", "slowest_ranks", "undelayed"]
