"""A seeded campaign of faults on small live trainings: what breaks, how it is said, and whether anything stays behind.

    python -m soak --seconds 1500 --seed 7      (or: make soak SECONDS=1500 SEED=7)

A case is one fault in one configuration on some ranks. Its ranks are forked from a server that has imported torch, they
write what they do into journals, and a judge that sees only journals and exit codes names the outcome.
"""
