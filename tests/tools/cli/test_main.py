"""The entry point: help, version, exit codes, and errors that are one line."""

import os
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import pytest
from typer.main import get_command

from anabranch import __version__, save
from anabranch.tools.cli import arguments
from anabranch.tools.cli.main import app, main
from anabranch.tools.cli.output import PROSE_WIDTH
from ranks import patience
from tools.cli.nouns import HOSTILE, RING, error_of, small_trace, trace_file

VERBS = ["record", "measure", "plan", "simulate", "compare", "scale", "list", "show", "cache", "demo", "lab", "run"]
EVERY_VERB = sorted(get_command(app).commands)  # type: ignore[attr-defined]


def test_help_and_simulations_start_without_the_heavy_imports() -> None:
    code = (
        "import sys; from anabranch.tools.cli.main import main\n"
        "for verb in [[], *([name] for name in sys.argv[1:])]: assert main([*verb, '--help']) == 0, verb\n"
        "heavy = {'torch', 'matplotlib', 'pydantic', 'pyroute2'} & sys.modules.keys(); assert not heavy, heavy\n"
        "assert main(['reproduce', 'asc']) == 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *VERBS], capture_output=True, text=True, timeout=100 * patience()
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == len(VERBS) + 1


def test_help_is_whole_in_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for verb in [[], *([name] for name in EVERY_VERB)]:
        assert main([*verb, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "Usage: anabranch" in " ".join(lines) and len(lines) > 8, verb
        assert max(map(len, lines)) <= 80, verb
        assert [line for line in lines if "…" in line] == [], verb  # how rich marks what it has cut off


LONG = ["--network", "nvlink+100gbe", "--network", "25gbe", "--world-sizes", "4,2048", "--planners", "by_bytes,optimal"]


@pytest.mark.parametrize(
    "argv", [["scale", *LONG], ["list"], ["show", "10gbe:ranks=16"], ["compare", "--network", RING]], ids=itemgetter(0)
)
def test_sentences_are_wrapped_also_in_a_pipe(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced = ["--trace", trace_file(tmp_path)] if argv[0] in ("scale", "compare") else []
    assert main([*argv, *traced]) == 0
    sentences = [line for line in capsys.readouterr().out.splitlines() if "  " not in line.strip()]
    assert max(map(len, sentences)) <= PROSE_WIDTH


def test_no_arguments_prints_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in VERBS)


def test_version_by_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "anabranch", "--version"], capture_output=True, text=True, timeout=60 * patience()
    )
    assert (done.returncode, done.stdout) == (0, f"anabranch {__version__}\n")


WRONG_USES = [
    ["bogus"],
    ["plan"],
    ["show"],
    ["plan", "--nonsense"],
    ["lab", "--hosts", "x"],
    ["scale", "--batch", "x"],
]


def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in WRONG_USES:
        assert "--help" in error_of(capsys, *argv)


@pytest.mark.parametrize("verb", ["compare", "plan", "simulate"])
def test_a_network_and_a_trace_are_given_once(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [verb, "--trace", trace_file(tmp_path), "--network", RING]
    words = error_of(capsys, *argv, "--network=10gbe:ranks=8")
    assert words == f"--network is given 2 times: expected once; run anabranch {verb} once for each\n"
    assert "--trace is given 3 times" in error_of(capsys, *argv, "--trace", "resnet50", "--trace", "gpt2")
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*argv, "--network", RING, "--help"]) == 0
    capsys.readouterr()
    assert main([*argv, "--json", "--json"]) == 0  # a flag says the same again
    if verb == "plan":
        capsys.readouterr()
        assert main([*argv, "--planner", "per_tensor", "--planner", "single"]) == 0  # the last one counts
        told = capsys.readouterr().out
        assert main([*argv, "--planner", "single"]) == 0 and told == capsys.readouterr().out


def test_options_behind_a_program_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    program = ["missing.py", "--compress", "a", "--compress", "b"]
    assert "missing.py: no such file" in error_of(capsys, "run", "--compress", "int8", *program)


def test_interrupt_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(arguments, "trace", interrupted)
    assert main(["compare", "--trace", "t", "--network", RING]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_hears_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "anabranch", "compare", "--trace", trace_file(tmp_path), "--network", RING, "--json"]
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60 * patience())
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_without_unicode_still_gets_its_table(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "anabranch", "compare", "--trace", trace_file(tmp_path), "--network", RING]
    done = subprocess.run(
        argv, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=60 * patience()
    )
    assert done.returncode == 0 and b"per_tensor" in done.stdout and done.stderr == b""


MALFORMED = {
    "missing file": None,
    "empty": b"",
    "not JSON": b"\x80\x04pickle",
    "truncated": b'{"format": "trace", "version": 1, "tens',
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "another version": b'{"format": "trace", "version": 99}',
    "another format": b'{"format": "\\u001b[2J", "version": 1}',
    "unknown field": b'{"format": "trace", "version": 1, "tensors": [], "forward_s": 0, "\\u001b[2J": 1}',
    "no tensors": b'{"format": "trace", "version": 1, "tensors": [], "forward_s": 0}',
    "infinite": b'{"format": "trace", "version": 1, "tensors": [], "forward_s": Infinity}',
    "half a letter": b'{"format": "trace", "version": 1, "forward_s": 0.0, "tensors": '
    b'[{"name": "a\\ud800", "numel": 1, "itemsize": 4, "ready_s": 0.0}]}',
}  # fmt: skip


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("verb", ["show", "compare"])
def test_a_malformed_file_is_one_line(
    verb: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.json"
    if content is not None:
        path.write_bytes(content)
    argv = ["show", str(path)] if verb == "show" else ["compare", "--trace", str(path), "--network", RING]
    assert "odd.json" in error_of(capsys, *argv)


def test_an_error_that_quotes_a_hostile_name_stays_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    trace = trace_file(tmp_path)
    assert main(["plan", "--trace", trace, "--network", RING, "-o", str(plan)]) == 0
    other = tmp_path / "other.json"
    save(small_trace(HOSTILE), other)
    capsys.readouterr()
    error = error_of(capsys, "simulate", "--trace", str(other), "--network", RING, "--plan", str(plan))
    assert "[red]\\x1b[2J" in error
    assert "\\x1b[2J" in error_of(capsys, "show", "\x1b[2J\nfile")
