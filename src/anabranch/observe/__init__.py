"""Measurement: clocks, the step timer, recorded traces, the network, metrics and traces of several ranks."""
