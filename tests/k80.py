"""The authors' public GoogleNet trace, where that is present beside the project."""

import csv
from itertools import groupby
from pathlib import Path

import pytest

from anabranch import TensorSpec, Trace
from shorthand import trace_of

DATA = Path(__file__).parents[2] / "shared" / "data" / "googlenet_k80_b64_tmp8comm.csv"
needs_the_trace = pytest.mark.skipif(
    not DATA.is_file(), reason=f"the third-party trace {DATA.name} is not beside the project"
)


def googlenet_trace() -> Trace:
    """Rows are in forward order; neighbours with one time are one layer of 4-byte elements."""
    with DATA.open(newline="") as file:
        rows = list(csv.DictReader(file))
    layers = [(float(us) * 1e-6, sum(int(row["size_elems_aligned"]) for row in same))
              for us, same in groupby(rows, key=lambda row: row["backward_us"])]  # fmt: skip
    ready_s, tensors = 0.0, []
    for layer in range(len(layers), 0, -1):
        backward_s, numel = layers[layer - 1]
        ready_s += backward_s
        tensors.append(TensorSpec(f"layer {layer}", numel, 4, ready_s))
    return trace_of(tensors, 0.5 * ready_s)
