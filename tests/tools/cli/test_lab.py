"""anabranch lab: what its options say, and errors that are one line."""

from collections.abc import Sequence

import pytest

from anabranch.tools.cli.main import main
from anabranch.tools.lab import launch as module
from anabranch.tools.lab.cluster import Cluster
from tools.cli.nouns import error_of

Call = tuple[Cluster, list[str], float | None]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the lab would have been asked to run; its exit code is 17."""
    calls: list[Call] = []

    def run(cluster: Cluster, command: Sequence[str], timeout_s: float | None = None) -> int:
        calls.append((cluster, list(command), timeout_s))
        return 17

    monkeypatch.setattr(module, "run", run)
    return calls


def test_the_exit_code_is_the_program_s(asked: list[Call]) -> None:
    assert main(["lab", "--rate", "10gbit", "--", "python", "train.py", "--rate", "3"]) == 17
    assert asked == [(Cluster([1e10] * 4), ["python", "train.py", "--rate", "3"], None)]


def test_the_program_s_options_are_its_own_without_dashes_too(asked: list[Call]) -> None:
    main(["lab", "--rate", "1gbit", "--hosts", "2", "python", "train.py", "--hosts", "3", "--help"])
    assert asked == [(Cluster([1e9] * 2), ["python", "train.py", "--hosts", "3", "--help"], None)]


@pytest.mark.parametrize(
    ("arguments", "cluster"),
    [
        (["--rate", "10gbit,1gbit", "--hosts", "2"], Cluster([1e10, 1e9])),
        (["--rate", "100 Mbit/s, unshaped", "--hosts", "2"], Cluster([1e8, None])),
        (["--rate", "unshaped"], Cluster([None] * 4)),
        (["--rate", "1gbit", "--ranks-per-host", "2", "--backend", "nccl"], Cluster([1e9] * 4, 2, "nccl")),
        (["--rate", "1gbit", "--emulate"], Cluster([1e9] * 4, alpha_s=50e-6)),
        (["--rate", "100gbit", "--emulate", "--alpha", "2us"], Cluster([1e11] * 4, alpha_s=2e-6)),
        (["--rate", "1gbit", "--emulate", "--alpha", "0"], Cluster([1e9] * 4, alpha_s=0.0)),
    ],
)
def test_clusters(asked: list[Call], arguments: list[str], cluster: Cluster) -> None:
    assert main(["lab", *arguments, "--timeout", "60", "--", "true"]) == 17
    ((found, _, timeout_s),) = asked
    assert timeout_s == 60
    assert (found.backend, found.ranks_per_host) == (cluster.backend, cluster.ranks_per_host)
    assert found.alpha_s == (None if cluster.alpha_s is None else pytest.approx(cluster.alpha_s))
    assert list(found.rates_bit_s) == list(cluster.rates_bit_s)


REFUSED = [
    (["--rate", "10"], "--rate is '10': expected a rate in kbit, mbit or gbit"),
    (["--rate", "fast"], "--rate is 'fast'"),
    (["--rate", "10gbit,"], "--rate is ''"),
    (["--rate", "-1gbit"], "--rate is '-1gbit'"),
    (["--rate", "1gbit,2gbit"], "2 rates, 1gbit,2gbit: expected one for all hosts, or 4, one for each"),
    (["--rate", "0"], "0 Mbit/s: expected 1 Mbit/s to 34 Gbit/s"),
    (["--rate", "100gbit"], "100 Gbit/s"),
    (["--rate", "1gbit", "--alpha", "1us"], "needs --emulate"),
    (["--rate", "1gbit", "--emulate", "--alpha", "1"], "--alpha is '1': expected a time"),
    (["--rate", "1gbit", "--emulate", "--backend", "nccl"], "gloo only"),
    (["--rate", "unshaped", "--emulate"], "needs a rate"),
    (["--rate", "1gbit", "--timeout", "0"], "--timeout is 0"),
    (["--rate", "1gbit", "--timeout", "nan"], "--timeout is nan"),
    (["--rate", "1gbit", "--hosts", "0"], "--hosts"),
    (["--rate", "1gbit", "--backend", "mpi"], "--backend"),
    ([], "--rate"),
]


def test_refused_in_one_line(asked: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in REFUSED:
        assert words in error_of(capsys, "lab", *arguments, "--", "true")
        assert not asked


def test_no_program(asked: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    assert "PROGRAM" in error_of(capsys, "lab", "--rate", "1gbit")


def test_an_unknown_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no-such-program" in error_of(capsys, "lab", "--rate", "1gbit", "--", "no-such-program")
