"""The benchmark of compile times: its plan's parts, and what it does when a process fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddp.compiled.models import LAYERS, Net
from ranks import patience

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks, also as a program that is started here."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'tests'}")


def test_parts_have_about_as_many_bytes_in_the_order_of_backward() -> None:
    from benchmarks.compiling import PARTS, even_parts

    net = Net()
    sizes = {name: parameter.nbytes for name, parameter in net.named_parameters()}
    parts = even_parts(net)
    assert [name for part in parts for name in part] == list(reversed(sizes))
    assert len(parts) == PARTS
    shares = [sum(sizes[name] for name in part) / sum(sizes.values()) for part in parts]
    assert max(shares) - 1 / PARTS <= 1 / LAYERS, "within one layer of even"


@pytest.mark.campaign
def test_a_process_that_fails_ends_them_all() -> None:
    command = [sys.executable, "benchmarks/compiling.py", "tools.bench.tiny_training:nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100 * patience(), check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("the process that compiles ") and last.endswith("has failed with exit code 1")
    assert "no function 'nothing'" in done.stderr
    assert "|" not in done.stdout
