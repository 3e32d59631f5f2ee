"""A training small enough for any machine, for ``anabranch demo`` and ``examples/char_transformer.py``."""

RESULTS = "results.json"  # in the folder of a demo: its workers write it when all is done
