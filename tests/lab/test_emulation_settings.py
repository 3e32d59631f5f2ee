"""Which network is emulated: the environment of ranks, its errors, and interpreters that start in it."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anabranch import Network
from anabranch.alpha_beta import AlphaBeta
from anabranch.lab.emulation import Settings, describe, environment
from anabranch.lab.emulation.cost import Cost, all_reduce, exchange, point_to_point, star, tree
from anabranch.lab.emulation.install import install
from anabranch.lab.emulation.settings import STARTUP, VARIABLE, current

TOLD = "emulated: 4 hosts, 10 Gbit/s, 50 µs (delays, not a real network)"


def python(code: str, variables: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Runs code in an interpreter of its own with these variables added."""
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_environment_holds_the_slowest_rate_and_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    variables = environment([25e9, 10e9, 25e9, 25e9], 50e-6)
    assert variables["PYTHONPATH"] == f"{STARTUP}{os.pathsep}mine"
    assert current(variables) == Settings(4, 10e9, 50e-6)
    monkeypatch.delenv("PYTHONPATH")
    assert environment([1e9], 0.0)["PYTHONPATH"] == str(STARTUP)


def test_describe_says_what_is_emulated_and_nothing_on_a_real_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert describe() is None
    monkeypatch.setenv(VARIABLE, environment([10e9] * 4, 50e-6)[VARIABLE])
    assert describe() == TOLD
    assert "1 host, 2.5 Mbit/s, 1000 µs" in Settings(1, 2.5e6, 1e-3).words
    assert "900 kbit/s" in Settings(1, 9e5, 1e-3).words


@pytest.mark.parametrize(
    ("rates", "alpha_s", "named"),
    [
        ([], 0.0, "rate_bit_s is empty"),
        ([1e9, 0.0], 0.0, "rate_bit_s is 0.0"),
        ([1e9, float("nan")], 0.0, "rate_bit_s is nan"),
        ([float("inf")], 0.0, "rate_bit_s is inf"),
        ([1e9], -1e-6, "alpha_s is -1e-06"),
        ([1e9], float("inf"), "alpha_s is inf"),
    ],
)
def test_an_impossible_network_is_refused(rates: list[float], alpha_s: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        environment(rates, alpha_s)


BAD_TEXTS = [
    "",
    "10gbit",
    "hosts=4",
    "hosts=4,rate_bit_s=1e9,alpha_s=fast",
    "hosts=4.5,rate_bit_s=1e9,alpha_s=0",
    "hosts=0,rate_bit_s=1e9,alpha_s=0",
    "hosts=4,rate_bit_s=-1,alpha_s=0",
    "hosts=4,rate_bit_s=1e9,alpha_s=nan",
    "hosts=4,rate_bit_s=1e9,alpha_s=0,colour=red",
    "a=b=c",
]


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_a_bad_variable_gives_one_clear_error(text: str) -> None:
    with pytest.raises(ValueError, match=f"{VARIABLE} is .*Expected a text such as .*or unset") as caught:
        current({VARIABLE: text})
    assert repr(text) in str(caught.value)


def test_a_rank_with_a_bad_variable_ends_with_that_error_where_it_imports_torch() -> None:
    run = python("import torch", {**environment([1e9], 0.0), VARIABLE: "10gbit"})
    assert run.returncode != 0
    assert f"ValueError: {VARIABLE} is '10gbit'" in run.stderr.splitlines()[-1]


def test_a_rank_whose_interpreter_lacks_anabranch_says_so() -> None:
    code = "import sys; sys.modules['anabranch'] = None; import torch"
    run = python(code, environment([1e9], 0.0))
    assert run.returncode != 0
    assert f"{sys.executable} cannot import anabranch" in run.stderr and "Install anabranch" in run.stderr


def test_a_program_without_torch_stays_without_it() -> None:
    code = "import sys; print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'numpy', 'anabranch'}))"
    run = python(code, environment([1e9], 0.0), "-I")
    assert run.stdout == "[]\n"  # which reads no environment at all
    assert python(code, environment([1e9], 0.0)).stdout.strip() == "[]"


def test_the_module_keeps_its_own_loader_and_only_one_function_of_it_is_replaced() -> None:
    code = (
        "import inspect, sys, torch.distributed.distributed_c10d as c;"
        "print(type(c.__loader__).__name__, type(c.__spec__.loader).__name__,"
        " type(c._new_process_group_helper).__name__,"
        " 'def init_process_group' in inspect.getsource(c), c.ProcessGroup.__name__,"
        " [f for f in sys.meta_path if type(f).__module__ == 'sitecustomize'])"
    )
    run = python(code, environment([1e9], 0.0))
    assert run.stdout.strip() == "SourceFileLoader SourceFileLoader _Helper True ProcessGroup []", run.stderr


def test_a_sitecustomize_that_ours_hides_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.hidden_ran = __file__\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import builtins, sys; print(builtins.hidden_ran, sys.modules['sitecustomize'].__file__)"
    expected = str(tmp_path / "sitecustomize.py")
    assert python(code, environment([1e9], 0.0)).stdout.split() == [expected, expected]
    path_alone = {"PYTHONPATH": environment([1e9], 0.0)["PYTHONPATH"]}
    assert python(code, path_alone).stdout.split() == [expected, expected]


def test_a_torch_without_the_names_that_are_needed_is_refused() -> None:
    empty = ModuleType("torch.distributed.distributed_c10d")
    with pytest.raises(RuntimeError, match="lacks _new_process_group_helper and ProcessGroup"):
        install(empty, Settings(2, 1e9, 0.0))
    other: Any = ModuleType("torch.distributed.distributed_c10d")
    other._new_process_group_helper, other.ProcessGroup = (lambda store: store), object
    with pytest.raises(RuntimeError, match="lacks the argument backend"):
        install(other, Settings(2, 1e9, 0.0))


# ------------------------------------------------------------------------------------------------------ the costs

LINK = AlphaBeta("ring", 50e-6, 8e-10)
MIB = 1 << 20


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("nbytes", [0, 4, MIB])
def test_an_all_reduce_costs_what_the_planners_think(ranks: int, nbytes: int) -> None:
    cost = all_reduce(LINK, ranks, nbytes)
    if ranks > 1:
        expected = Network.ring(ranks, LINK.alpha_s, LINK.beta_s_per_byte).allreduce_s(nbytes)
        assert sum(cost) == pytest.approx(expected, rel=1e-12)
    half = exchange(LINK, ranks, nbytes)
    assert [2 * part for part in half] == pytest.approx(list(cost), rel=1e-12)


def test_the_other_costs() -> None:
    a, b = LINK.alpha_s, LINK.beta_s_per_byte
    assert tree(LINK, 5, 1000) == pytest.approx((3 * a, 1000 * b))
    assert star(LINK, 5, 1000) == pytest.approx((a, 800 * b))
    assert point_to_point(LINK, 5, 1000) == pytest.approx((a, 1000 * b))
    assert tree(LINK, 1, 1000) == star(LINK, 1, 1000) == Cost(0.0, 0.0)
