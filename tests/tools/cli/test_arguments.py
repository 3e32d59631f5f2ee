"""Where a trace, a network or a plan comes from."""

from pathlib import Path

import pytest

from anabranch import Network, Trace, save
from anabranch.tools.cli import arguments
from anabranch.values.errors import FileError
from anabranch.values.files import bundled_traces, dumps
from tools.cli.nouns import RING, error_of, measured, small_trace, trace_file


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with one bundled trace, named small."""
    folder = tmp_path / "package" / "traces"
    folder.mkdir(parents=True)
    (folder / "small.json").write_text(dumps(small_trace("bundled")))
    (folder / "README.md").write_text("not a trace")
    monkeypatch.setattr("anabranch.values.files.TRACES", folder)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_bundled_trace_by_name(bundle: Path) -> None:
    assert list(bundled_traces()) == ["small"]
    assert arguments.trace("small").meta["model"] == "bundled"
    assert isinstance(arguments.content("small"), Trace)


def test_a_file_wins_over_a_bundled_name_and_a_folder_does_not(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    assert arguments.trace("small").meta["model"] == "bundled"
    (tmp_path / "small").rmdir()
    save(small_trace("mine"), tmp_path / "small")
    assert arguments.trace("small").meta["model"] == "mine"


def test_an_unknown_name_lists_those_there(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "anabranch brings small" in error_of(capsys, "plan", "--trace", "nope", "--network", RING)


ODD_NAMES = ["x" * 5000, "", "../small", "small.json", "small\x00"]


def test_no_odd_name_is_found(bundle: Path) -> None:
    for text in ODD_NAMES:
        with pytest.raises(FileError, match="no such file"):
            arguments.trace(text)


def test_without_bundled_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("anabranch.values.files.TRACES", tmp_path)
    with pytest.raises(FileError, match="anabranch brings none"):
        arguments.trace("nope")


def test_networks_of_one_name_are_told_apart(tmp_path: Path) -> None:
    files = [str(tmp_path / folder / "network.json") for folder in ("a", "b")]
    for file in files:
        Path(file).parent.mkdir()
        save(measured(), file)
    assert [known.name for known in arguments.network_ranges([files[0], "10gbe"])] == ["network.json", "10gbe"]
    found = arguments.network_ranges([*files, "10gbe", "10gbe:ranks=16", "25gbe", files[0]])
    assert [known.name for known in found] == [*files, "10gbe", "10gbe:ranks=16", "25gbe"]


def test_a_file_is_called_measured_only_where_it_is(tmp_path: Path) -> None:
    sources = []
    for network in (measured(), Network.ring(4, 1e-5, 1e-9), Network.linear(4, 1e-5, 1e-9)):
        save(network, tmp_path / "net.json", force=True)
        sources.append(arguments.network_range(str(tmp_path / "net.json")).source)
    assert sources == ["measured, in net.json", *["as described, in net.json"] * 2]


def test_another_noun_than_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, network = trace_file(tmp_path), str(tmp_path / "network.json")
    save(measured(), network)
    assert "holds a network, expected a trace" in error_of(capsys, "compare", "--trace", network, "--network", network)
    assert "holds a trace, expected a network" in error_of(capsys, "compare", "--trace", trace, "--network", trace)
    argv = ["simulate", "--trace", trace, "--network", network, "--plan", trace]
    assert "holds a trace, expected a plan" in error_of(capsys, *argv)
    assert "is a folder" in error_of(capsys, "show", str(tmp_path))
    assert "no description" in error_of(capsys, "compare", "--trace", trace, "--network", "star:ranks=3")
