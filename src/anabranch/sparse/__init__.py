"""Sparse all-reduce with error feedback: as a collective for a bucket, its twins, and many ranks in one process."""
