"""anabranch bench: what it refuses before any rank has joined another. What it does is in tests/bench."""

from pathlib import Path

import pytest

from anabranch.tools.cli.main import main


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["bench", *argv]) == 2
    return capsys.readouterr().err


def test_a_model_or_a_trace_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --model resnet50, or --trace resnet50" in refused(capsys)


def test_without_ranks_it_says_how_to_get_them(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "--trace", "resnet50")
    assert "RANK is not set" in message and "anabranch lab --hosts 4" in message and "torchrun" in message


WRONG_VALUES = [
    (
        ["--trace", "resnet50", "--compress", "zip"],
        "--compress is 'zip': expected bf16, int8, int4, auto",
    ),
    (["--trace", "resnet50", "--compress", "oktopk:2"], "--compress is 'oktopk:2': expected a density in (0, 1]"),
    (["--trace", "resnet50", "--model", "resnet50"], "run them apart"),
    (["--trace", "resnet50", "--sharded", "fsdp2"], "--sharded and --trace resnet50: a replayed trace sleeps"),
    (["--model", "resnet50", "--sharded", "fsdp1"], "--sharded is 'fsdp1': expected one of fsdp2, fsdp2:reshard"),
    (["--trace", "resnet50", "--compile"], "--compile and --trace resnet50: a replayed trace sleeps"),
    (["--trace", "resnet50", "--report", "/nowhere/report.md"], "/nowhere: no such folder"),
    (["--trace", "nonsense"], "nonsense: no such file, and no trace of this name"),
    (["--model", "resnet50", "--backend", "mpi"], "'mpi' is not one of 'gloo', 'nccl'"),
    (["--trace", "resnet50", "--backend", "nccl"], "choose gloo"),
]


def test_wrong_values_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for argv, words in WRONG_VALUES:
        monkeypatch.setenv("RANK", "0")
        assert words in refused(capsys, *argv)


def test_a_report_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    report = tmp_path / "report.md"
    report.write_text("precious")
    assert "--force" in refused(capsys, "--trace", "resnet50", "--report", str(report))
    assert report.read_text() == "precious"


def test_help_names_every_way_to_compress(capsys: pytest.CaptureFixture[str]) -> None:
    from anabranch.values.kinds.names import COMPRESSED

    assert main(["bench", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(way in told for way in [*COMPRESSED, "oktopk:0.01"])
