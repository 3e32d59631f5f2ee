"""Runs a plan on torch's DistributedDataParallel: its reducer's buckets, a comm hook, and deferred buffers."""
