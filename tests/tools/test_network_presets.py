"""Networks by name: each with its source, bands in order, and latencies that grow with the ranks."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import Network, TwoLevel
from anabranch.tools.cli import arguments
from anabranch.tools.network_presets import NO_SPREAD, PRESETS, NetworkRange
from tools.cli.nouns import measured

REPORT = Path(__file__).parents[2] / "benchmarks" / "rivals_h200_lab_25gbit_2026-11-15.md"
SIZES = st.sampled_from([2, 4, 8, 64, 2048, 65536])


def test_every_name_says_where_its_costs_come_from() -> None:
    for name in PRESETS:
        preset = PRESETS[name]
        known = NetworkRange.preset(name, 16)
        assert known.source.startswith(f"{preset.origin}: ") and len(preset.source) > 20 and preset.spread
        assert known.middle.world_size == 16 and known.extrapolation
        words = {"published": "authors'", "measured": "benchmarks/", "nominal": "assumed, not measured"}
        assert words[preset.origin] in known.source
        assert isinstance(preset.model, TwoLevel) == name.startswith("nvlink")


def test_what_is_measured_between_nodes_is_not_measured_inside_them() -> None:
    assert PRESETS["25gbe"].origin == "measured" and PRESETS["nvlink+25gbe"].origin == "nominal"


@given(st.sampled_from(sorted(PRESETS)), SIZES, st.integers(0, 1 << 30))
def test_bands_are_in_order_at_every_size(name: str, world_size: int, nbytes: int) -> None:
    known = NetworkRange.preset(name, 2)
    carried = (network.at(world_size) for network in (known.low, known.middle, known.high))
    low, middle, high = (network.allreduce_s(nbytes) for network in carried)
    assert 0 < low <= middle <= high


@given(st.sampled_from(sorted(PRESETS)), st.integers(8, 65535))
def test_latency_grows_with_the_ranks(name: str, world_size: int) -> None:
    fewer, more = (NetworkRange.preset(name, size).middle for size in (world_size, world_size + 1))
    assert fewer.allreduce_s(0) <= more.allreduce_s(0)


def test_published_fits_are_those_of_their_cluster() -> None:
    """Read as a ring, a fit gives back its a and b at its own number of workers."""
    assert NetworkRange.preset("10gbe", 8).middle.curve("dense").line() == pytest.approx((1.3687e-3, 1.6570e-9))
    assert NetworkRange.preset("56ib", 16).middle.curve("dense").line() == pytest.approx((2.358e-4, 4.059e-10))


@pytest.mark.skipif(not REPORT.is_file(), reason="the report is not beside the tests")
def test_the_measured_rates_are_those_of_the_report() -> None:
    """One all-reduce of each model's gradients on 4 hosts, ms in the dated report, over 2·3/4 of its bytes."""
    text = REPORT.read_text(encoding="utf-8")
    models = re.findall(r"^## (\S+), 4 ranks", text, re.MULTILINE)
    took_ms = [float(ms) for ms in re.findall(r"^\| one all-reduce \| - \| - \| ([0-9.]+) \|", text, re.MULTILINE)]
    assert len(models) == 5
    betas = sorted(ms * 1e-3 / (1.5 * arguments.trace(model).nbytes) for model, ms in zip(models, took_ms, strict=True))
    preset = PRESETS["25gbe"]
    found = [model.beta_s_per_byte for model in (preset.low, preset.model, preset.high)]  # type: ignore[union-attr]
    assert found == pytest.approx([betas[0], betas[2], betas[4]], rel=1e-3)


def test_a_measured_network_has_the_band_of_its_spread() -> None:
    known = NetworkRange.given("net.json", measured(), "measured, in net.json")
    for size in (8, 256):
        carried = (network.at(size) for network in (known.low, known.middle, known.high))
        low, middle, high = (network.allreduce_s(1 << 20) for network in carried)
        assert low < middle < high
    assert "interquartile" in known.spread and "straight-line fit" in known.extrapolation


def test_without_a_spread_there_is_no_band() -> None:
    known = NetworkRange.given("mine", Network.ring(4, 1e-5, 1e-9), "as described")
    assert known.low == known.middle == known.high and known.spread == NO_SPREAD


def test_refusals() -> None:
    with pytest.raises(ValueError, match="'token': no such name, expected one of 1gbe"):
        NetworkRange.preset("token", 4)
