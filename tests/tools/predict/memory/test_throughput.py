"""Predicted samples per second by mode."""

import pytest

from anabranch.tools.predict.memory.throughput import naive_s, samples_per_s, throughputs
from anabranch.values.files import load_bundled_trace
from anabranch.values.network import Network
from tools.cli.nouns import small_trace


def test_naive_messages_grow_with_the_ranks() -> None:
    few, many = (naive_s(1_000_000, Network.ring(ranks, 30e-6, 8e-9), 0.01) for ranks in (2, 64))
    assert many - few == pytest.approx(62 * (30e-6 + 80_000 * 8e-9))
    assert naive_s(1_000_000, Network.ring(1, 30e-6, 8e-9), 0.01) == 0
    with pytest.raises(ValueError, match="the trace's meta has batch None: expected for how many samples"):
        samples_per_s(small_trace(), Network.ring(4, 30e-6, 8e-9), "ddp", 4, 0.01)


def test_modes_without_a_batch_are_left_out() -> None:
    trace, network = load_bundled_trace("resnet50"), Network.ring(4, 30e-6, 8e-9)
    batches = {"ddp": 64, "oktopk": 0, "lean": 64}
    again = throughputs(trace, network, batches, 0.01, {"ddp": "keep", "oktopk": "keep", "lean": "recompute"})
    assert list(again) == ["ddp", "lean"] and again["ddp"] == samples_per_s(trace, network, "ddp", 64, 0.01)
    assert again["lean"] == samples_per_s(trace, network, "lean", 64, 0.01, recompute=True)
