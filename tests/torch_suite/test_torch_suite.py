"""``make torch-suite`` on a few tests, and how it judges what it finds."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ranks import patience
from torch_suite.__main__ import EXCEPTIONS, exceptions, judge
from torch_suite.suite import DEFAULT, EAGER, FAILED, PASSED, SKIPPED, STOCK, Result, Results, kinds

TESTS = Path(__file__).parents[1]
SELECTION = (
    "Distributed.test_DistributedDataParallelCPU",
    "Distributed.test_ddp_forward_backward_hook",
    "Distributed.test_ddp_join_model_equivalence",
    "Behaviours.test_feature_unused",
    "Behaviours.test_hook_then_no_sync",
    "Behaviours.test_checkpoint_twice_reentrant_static",
)


def ended(*outcomes: str) -> Results:
    """A test that ended so under stock DDP, DataParallel and an eager one."""
    modes = (STOCK, DEFAULT, EAGER)
    return {mode: Result(outcome, "why", 1.0) for mode, outcome in zip(modes, outcomes, strict=False)}


RESULTS = {
    "A.both": ended(PASSED, PASSED, PASSED),
    "A.stock_only": ended(PASSED, PASSED, FAILED),
    "A.neither": ended(FAILED),
    "A.skipped": ended(SKIPPED),
}


@pytest.mark.parametrize(
    "selection",
    [SELECTION[-1:], pytest.param(SELECTION[:-1], marks=pytest.mark.campaign)],
    ids=["one", "the others"],
)
def test_a_selection_of_torchs_tests_passes(selection: Sequence[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "torch_suite", "--exact", *selection],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=100 * patience(),
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(selection)} tests in" in run.stdout


def test_each_test_is_counted_once() -> None:
    assert dict(kinds(RESULTS)) == {
        "A.both": "passes under both",
        "A.stock_only": "passes under stock DDP only",
        "A.neither": "fails under stock DDP",
        "A.skipped": "skipped by torch",
    }


@pytest.mark.parametrize(
    ("excused", "code", "line"),
    [
        ({}, 1, "A.stock_only fails under eager DataParallel"),
        ({"A.stock_only": "its reason"}, 0, "exception: A.stock_only: its reason"),
        ({"A.stock_only": "its reason", "A.both": "old"}, 0, "no exception any more, take it out"),
        ({"A.stock_only": "its reason", "A.gone": "old"}, 0, "there is no such test: A.gone"),
    ],
)
def test_only_listed_exceptions_may_fail(
    excused: dict[str, str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(RESULTS, excused, complete=True) == code
    assert line in capsys.readouterr().out


def test_every_exception_has_a_reason() -> None:
    assert exceptions("# a remark\n\nA.test: because of: this\n") == {"A.test": "because of: this"}
    assert all(exceptions(EXCEPTIONS.read_text()).values())
