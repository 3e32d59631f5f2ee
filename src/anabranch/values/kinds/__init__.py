"""Kinds of exchange: their names, options, sizes, errors, and order from exact to lossy. No torch."""
