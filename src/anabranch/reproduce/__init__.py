"""The four papers' tables, with what this project gets beside every figure, how, and where and why it differs.

Published figures are typed in, with where they stand. Ours never are: they are simulated from bundled
traces, counted, or read from a committed report.
"""
