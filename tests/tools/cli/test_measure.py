"""anabranch measure: under torchrun it writes a network; without, or with wrong options, it says what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch import Network, load
from anabranch.tools.cli.measure import RENDEZVOUS
from ranks import patience
from tools.cli.nouns import error_of

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int = 0, ranks: int = 2) -> None:
    """What torchrun tells each of its processes."""
    values = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.campaign
def test_a_network_among_torchruns_ranks(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    kinds = ["int8", "oktopk:0.050", "oktopk:0.01:bf16"]
    asked = [word for kind in kinds for word in ("--collective", kind)]
    options = ["--budget-s", "0.5", "--largest-mb", "0.125", "--lanes", "2", *asked, "--json"]
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", "-m", "anabranch", "measure", "-o", str(path), *options],
        capture_output=True,
        text=True,
        timeout=100 * patience(),
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # one document: only rank 0 speaks
    assert (document["command"], document["world_size"], document["written"]) == ("measure", 2, str(path))
    compressed = {"int8", "oktopk:0.05", "oktopk:0.01:bf16"}  # as plans and prices name them
    assert set(document["collectives"]) == {"dense", *compressed, "all_gather", "reduce_scatter"}
    assert document["notes"] == [] or "vary by" in document["notes"][0]
    network = load(path)
    assert isinstance(network, Network) and network.world_size == 2
    for kind in compressed:
        assert [point.nbytes for point in network.curves[kind].points] == [1 << k for k in range(10, 18)]
        assert all(point.seconds > 0 for point in network.curves[kind].points)
    assert len(network.contention.slowdowns) == 2
    assert "Error" not in done.stderr and "destroy_process_group" not in done.stderr


@pytest.mark.parametrize("missing", RENDEZVOUS)
def test_without_torchrun_it_says_how(
    missing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch)
    monkeypatch.delenv(missing)
    error = error_of(capsys, "measure", "-o", "network.json")
    assert f"{missing} is not set" in error
    assert "torchrun --nproc-per-node 4 -m anabranch measure -o network.json" in error


def test_one_rank_has_nothing_to_measure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, ranks=1)
    assert "there is one rank" in error_of(capsys, "measure", "-o", "network.json")


def test_rank_0_refuses_to_overwrite_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "network.json"
    path.write_text("mine")
    as_rank(monkeypatch)
    assert "is already there" in error_of(capsys, "measure", "-o", str(path))
    assert path.read_text() == "mine"


WRONG_OPTIONS = [
    (["--largest-mb", "0"], "--largest-mb is 0"),
    (["--largest-mb", "nan"], "--largest-mb is nan"),
    (["--budget-s", "0"], "--budget-s is 0"),
    (["--budget-s", "inf"], "--budget-s is inf"),
    (["--lanes", "0"], "--lanes"),
    (["--lanes", "1000"], "--lanes"),
    (["--collective", "fp4"], "--collective is 'fp4': expected one of dense, bf16, int8, int4, or oktopk with"),
    (["--collective", "oktopk"], "--collective is 'oktopk': expected one of dense, bf16"),
    (["--collective", "oktopk:2"], "a density in (0, 1], such as oktopk:0.01"),
    (["--backend", "mpi"], "'mpi' is not one of 'gloo', 'nccl'"),
]


def test_wrong_options_are_refused_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, says in WRONG_OPTIONS:
        as_rank(monkeypatch)
        assert says in error_of(capsys, "measure", "-o", str(tmp_path / "network.json"), *options)
