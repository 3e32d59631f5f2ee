"""A training small enough for any machine, for ``anabranch demo`` and ``examples/char_transformer.py``."""
