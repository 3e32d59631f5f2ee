"""A missing optional library is one clear error, of a kind that programs already catch."""

import sys

import pytest

import anabranch as ab
from anabranch.values.dependencies import require, require_version


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


@pytest.mark.parametrize("found", ["2.5", "2.5.0", "2.6.11", "2.6.0rc1"])
def test_a_version_of_a_tested_series_passes(found: str) -> None:
    require_version("library", found, ("2.5", "2.6"), "a strategy")


@pytest.mark.parametrize("found", ["2", "2.4.9", "2.60.1", "3.2.5"])
def test_another_version_names_itself_and_those_tested(found: str) -> None:
    with pytest.raises(ab.MissingExtraError) as caught:
        require_version("library", found, ("2.5", "2.6"), "a strategy")
    expected = f"a strategy was tested with library 2.5, 2.6, and {found} is installed: pip install 'library==2.6.*'"
    assert str(caught.value) == expected and caught.value.name == "library"
