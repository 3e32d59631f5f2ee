"""Emulation in torch: interpreters that start in its environment, and a torch that cannot be emulated."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anabranch.tools.lab.emulation.install import install
from anabranch.tools.lab.emulation.settings import NETWORK_VARIABLE, EmulatedNetwork, environment
from ranks import patience


def python(code: str, variables: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Runs code in an interpreter of its own with these variables added."""
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100 * patience(),
        check=False,
    )


def test_a_rank_with_a_bad_variable_ends_with_that_error_where_it_imports_torch() -> None:
    run = python("import torch", {**environment([1e9], 0.0), NETWORK_VARIABLE: "10gbit"})
    assert run.returncode != 0
    assert f"ValueError: {NETWORK_VARIABLE} is '10gbit'" in run.stderr.splitlines()[-1]


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
        "import inspect, pathlib, sys, torch.distributed.distributed_c10d as c;"
        "print(type(c.__loader__).__name__, type(c.__spec__.loader).__name__,"
        " pathlib.Path(c._new_process_group_helper.__code__.co_filename).name,"
        " 'def init_process_group' in inspect.getsource(c), c.ProcessGroup.__name__,"
        " [f for f in sys.meta_path if type(f).__module__ == 'sitecustomize'])"
    )
    run = python(code, environment([1e9], 0.0))
    assert run.stdout.strip() == "SourceFileLoader SourceFileLoader install.py True ProcessGroup []", run.stderr


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
        install(empty, EmulatedNetwork(2, 1e9, 0.0))
    other: Any = ModuleType("torch.distributed.distributed_c10d")
    other._new_process_group_helper, other.ProcessGroup = (lambda store: store), object
    with pytest.raises(RuntimeError, match="lacks the argument backend"):
        install(other, EmulatedNetwork(2, 1e9, 0.0))
