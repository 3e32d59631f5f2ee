"""The four papers' tables, with what this project gets beside every figure, how, and where and why it differs.

Published figures are constants, with their source. Ours are never constants in the code: they are simulated from
bundled traces, counted, or measured and shipped as ``measurements.json``.
"""
