"""anabranch import-trace: a profile becomes a file that every other command reads."""

from pathlib import Path

import pytest

from anabranch import Trace, load
from anabranch.tools.cli.main import main
from profiles import cuda_profile, written
from tools.cli.nouns import RING, error_of, json_of


def test_a_profile_becomes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["import-trace", str(written(cuda_profile(), tmp_path)), "-o", str(tmp_path / "trace.json")]
    document = json_of(capsys, *argv, "--model", "mine", "--batch", "8")
    trace = load(tmp_path / "trace.json")
    assert isinstance(trace, Trace) and len(trace) == document["tensors"] == 2
    assert document["backward_s"] == trace.backward_s and document["meta"]["model"] == "mine"
    assert "--force" in error_of(capsys, *argv)
    assert main([*argv, "--force"]) == 0
    out = capsys.readouterr().out
    assert "Assumed: forward begins" in out and "Not known: the names of parameters" in out


def test_scale_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "trace.json")
    assert main(["import-trace", str(written(cuda_profile(), tmp_path)), "-o", path, "--batch", "8"]) == 0
    capsys.readouterr()
    argv = ["scale", "--trace", path, "--network", RING, "--world-sizes", "4", "--batch", "16", "--compress", "none"]
    assert json_of(capsys, *argv)["strategies"][0]["batch"] == 16


def test_a_broken_profile_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written({"traceEvents": []}, tmp_path)
    said = error_of(capsys, "import-trace", str(path), "-o", str(tmp_path / "trace.json"))
    assert "has no backward of torch in it" in said and "record_shapes=True" in said
    assert not (tmp_path / "trace.json").exists()


def test_the_profile_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(cuda_profile(), tmp_path)
    before = path.read_bytes()
    assert "which is also read" in error_of(capsys, "import-trace", str(path), "-o", str(path), "--force")
    assert path.read_bytes() == before
