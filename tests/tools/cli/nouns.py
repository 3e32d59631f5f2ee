"""A small trace, networks and files for the tests of the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from anabranch import Network, TensorSpec, Trace, save
from anabranch.tools.cli.main import main

RING = "ring:ranks=16,alpha=50us,rate=10gbit"
HOSTILE = "[red]\x1b[2J\x1b]0;owned\x07\u202e[/red]:smile:\nline"


def small_trace(name: str = "layer", gradients: int = 20) -> Trace:
    """Gradients, large and small, the k-th ready after 2(k+1) ms."""
    numel = (2_000_000, 1_000, 2_400_000, 512, 512)
    tensors = tuple(TensorSpec(f"{name}.{k}", numel[k % 5], 4, 0.002 * (k + 1), "float32") for k in range(gradients))
    return Trace(tensors, 0.02, {"model": name})


def measured() -> Network:
    """Eight ranks, with a spread that decides between planners."""
    return Network.measured(8, [(1 << k, 2e-4 + (1 << k) * 8e-10, 1e-4) for k in range(10, 27, 4)])


def trace_file(folder: Path, name: str = "layer") -> str:
    """The path of a saved ``small_trace``."""
    path = folder / "trace.json"
    save(small_trace(name), path, force=True)
    return str(path)


def json_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """What a command prints with --json: one document on stdout and nothing on stderr."""
    assert main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document: dict[str, Any] = json.loads(out)
    return document


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that fails as it should."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("anabranch: error: ") and err.endswith("\n") and err.count("\n") == 1
    assert "Traceback" not in err and err[:-1].isprintable()
    return err.removeprefix("anabranch: error: ")
