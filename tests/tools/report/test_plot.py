"""The scaling plot: readable labels in a file that opens."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.tools.report.plot import LABEL_GAP, NOTE_LETTERS_PER_PANEL, _spread_labels, scaling_plot
from tools.report.scalings import scaling_of

CURVES = {
    "per_tensor": {4: 0.1, 8: 0.2, 2048: 5.0},
    "optimal": {4: 0.1, 8: 0.11, 2048: 0.3},
    "字": {4: 0.1, 8: 0.1, 2048: 0.1},
}


def test_svg_names_every_line_title_and_unit() -> None:
    scaling = scaling_of(CURVES, model="resnet $50$")
    content = scaling_plot(scaling, "svg")
    assert ElementTree.fromstring(content).tag.endswith("svg")
    comments = content.decode()  # matplotlib notes each text beside its outlines
    for text in ("per_tensor", "optimal", "resnet $50$", "ranks (logarithmic)", "iteration, ms", "Scaling efficiency"):
        assert text in comments
    assert content == scaling_plot(scaling, "svg")


def test_several_networks_have_a_panel_each() -> None:
    comments = scaling_plot(scaling_of(CURVES, network="one", more=["two", "[three]", "$\\frac$"]), "svg").decode()
    assert all(f"Scaling efficiency, {name} -->" in comments for name in ("one", "two", "[three]", "$\\frac$"))
    assert "Iteration time" not in comments


def test_a_long_note_goes_on_in_the_next_line() -> None:
    note = "; ".join(f"assumption number {number}" for number in range(20))
    comments = [line.strip() for line in scaling_plot(scaling_of(CURVES, note=note), "svg").decode().splitlines()]
    shown = [line.removeprefix("<!-- ").removesuffix(" -->") for line in comments if "assumption number" in line]
    assert " ".join(shown) == f"Assumed: {note}" and max(map(len, shown)) <= 2 * NOTE_LETTERS_PER_PANEL


@pytest.mark.parametrize("curves", [CURVES, {"one": {4: 0.0}}], ids=["several", "one point of no time"])
def test_png_has_its_signature(curves: dict[str, dict[int, float]]) -> None:
    assert scaling_plot(scaling_of(curves)).startswith(b"\x89PNG\r\n\x1a\n")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_labels_stay_spread_labels_and_inside(heights: list[float]) -> None:
    places = _spread_labels(sorted(heights))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    assert all(high - low >= LABEL_GAP - 1e-9 for low, high in pairwise(places))


def test_labels_that_are_spread_labels_do_not_move() -> None:
    assert _spread_labels([0.1, 0.5, 0.9]) == pytest.approx([0.1, 0.5, 0.9])
    assert _spread_labels([0.5, 0.5]) == pytest.approx([0.5 - LABEL_GAP / 2, 0.5 + LABEL_GAP / 2])
