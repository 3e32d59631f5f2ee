"""A missing optional library is one clear error, of a kind that programs already catch."""

import sys

import pytest

import anabranch as ab
from anabranch.extras import require


def test_an_installed_library_passes() -> None:
    require("json", "report", "a plot")


def test_a_missing_library_names_itself_who_needs_it_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ab.MissingExtraError) as caught:
        require("plotly", "report", "anabranch report")
    expected = "anabranch report needs plotly, which is not installed: pip install 'anabranch[report]'"
    assert str(caught.value) == expected and caught.value.name == "plotly"
    assert isinstance(caught.value, ModuleNotFoundError) and isinstance(caught.value, ab.AnabranchError)


def test_a_pin_keeps_what_is_installed() -> None:
    with pytest.raises(ab.MissingExtraError, match=r"pip install 'anabranch\[models\]' 'torch==2\.11\.0'$"):
        require("no_such_library", "models", "the model resnet50", pin="torch==2.11.0")
