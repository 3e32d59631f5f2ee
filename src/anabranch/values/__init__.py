"""Frozen values: trace, network, plan, timeline, the kinds of exchange, and their files. No torch."""
