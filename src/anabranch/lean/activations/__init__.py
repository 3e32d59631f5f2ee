"""Activations kept or recomputed, block by block."""
