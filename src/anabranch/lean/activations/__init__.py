"""Activations kept, offloaded to host memory or recomputed, block by block; usable without lean/."""
