"""Numbers with their unit, and names made harmless."""

import pytest

from anabranch.tools.report.formatting import bandwidth, count, factor, label, percent, plain, seconds, size, time_scale


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0.0, "0.000 µs"), (1.5e-6, "1.500 µs"), (-0.02, "-20.00 ms"), (0.9999, "999.9 ms"), (1.0, "1.000 s"),
     (12345.0, "12345 s")],
)  # fmt: skip
def test_one_time(value_s: float, text: str) -> None:
    assert seconds(value_s) == text


def test_a_column_has_one_unit_and_keeps_the_digits_of_its_smallest() -> None:
    scale = time_scale([0.0646, 4.1723])
    assert (scale.unit, scale(0.0646), scale(4.1723)) == ("ms", "64.60", "4172.30")
    assert time_scale([12.0, 600.0]).unit == "s"
    assert time_scale([]).unit == time_scale([0.0]).unit == "µs"


def test_sizes_and_rates() -> None:
    assert (size(0), size(1023), size(1 << 10), size(25 << 20)) == ("0 B", "1023 B", "1.0 KiB", "25.0 MiB")
    assert size(1 << 53) == "8192.0 TiB"
    assert bandwidth(125_000_000, 1.0) == "1 Gbit/s"
    assert bandwidth(1, 0.0) == bandwidth(0, 1.0) == "-"


def test_ratios_and_counts() -> None:
    assert (factor(None), factor(1.25), factor(250.4)) == ("-", "1.25×", "250×")
    assert (percent(0.1234), percent(-1e-17)) == ("12.3%", "0.0%")
    assert (count(1, "bucket"), count(1200, "bucket")) == ("1 bucket", "1,200 buckets")


def test_what_could_touch_a_terminal_is_spelled_out() -> None:
    assert plain("a\x1b[2J\n\x9b\u202e\ud800é字 b") == "a\\x1b[2J\\n\\x9b\\u202e\\ud800é字 b"
    assert plain("[red]") == "[red]"


def test_a_long_name_keeps_both_ends() -> None:
    shown = label("a" * 500 + "z" * 500).plain
    assert len(shown) == 60 and shown[0] == "a" and shown[-1] == "z" and "…" in shown
