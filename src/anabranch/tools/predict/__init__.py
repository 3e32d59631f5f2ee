"""Predictions: steps at any number of ranks, and memory of a rank."""
