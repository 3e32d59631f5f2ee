"""fp16 through Transformers, Accelerate and Lightning on a GPU, which two ranks of a lab share, beside stock DDP.

Needs root, pyroute2 and the frameworks, of which those that are not installed are left out:
pytest -m gpu tests/frameworks/test_gpu.py -s
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from frameworks.half_runs import ACCUMULATED, BY, GROWTH_INTERVAL, INITIAL_SCALE, KINDS, STEPS, STOPPED_AFTER
from gpu import ON_GPU
from tools.lab.lab_process import needs_namespaces

pytestmark = [*ON_GPU, needs_namespaces]
RUNS = Path(__file__).with_name("half_runs.py")
LIMIT_S = 240.0
FRAMEWORKS = pytest.mark.parametrize("framework", list(BY))
BACKEND = "nccl" if torch.cuda.is_available() else "gloo"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 saw, by framework, kind and precision; also where a rank failed, as far as they came."""
    path = tmp_path_factory.mktemp("half") / "answers.json"
    options = ["--hosts", "2", "--rate", "unshaped", "--backend", BACKEND, "--timeout", str(LIMIT_S)]
    subprocess.run(
        [sys.executable, "-m", "anabranch", "lab", *options, "--", sys.executable, str(RUNS), str(path)],
        check=False,
        timeout=LIMIT_S + 30,
    )
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def seen(answers: dict[str, Any], run: str) -> Any:
    if run not in answers:
        pytest.skip("this framework is not installed, or the lab ended before it")
    assert not answers[run]["error"], answers[run]["error"]
    return answers[run]


def difference(ours: list[float], theirs: list[float]) -> float:
    """The largest, relative to DDP's loss at the time."""
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))


@FRAMEWORKS
def test_dense_losses_and_scales_are_those_of_ddp(framework: str, answers: dict[str, Any]) -> None:
    theirs, ours = seen(answers, f"{framework} ddp fp16"), seen(answers, f"{framework} dense fp16")
    assert (theirs["wrapper"], ours["wrapper"]) == ("DistributedDataParallel", "DataParallel")
    assert len(ours["losses"]) == (1 if framework == "transformers" else ACCUMULATED) * STEPS
    assert len(ours["scales"]) == STEPS
    print(f"\n{framework}: largest difference of a loss {difference(ours['losses'], theirs['losses']):.2g}")
    assert difference(ours["losses"], theirs["losses"]) < 1e-3
    assert ours["scales"] == theirs["scales"]
    # Steps were skipped, and then the scale rose: what was trained is what a GradScaler is for.
    falls = sum(after < before for before, after in zip([INITIAL_SCALE, *ours["scales"]], ours["scales"], strict=False))
    rises = sum(after > before for before, after in zip(ours["scales"], ours["scales"][1:], strict=False))
    assert falls >= 3 and rises >= 1 and STEPS > 2 * GROWTH_INTERVAL
    assert sum(ours["losses"][-4:]) < sum(ours["losses"][:4])


@FRAMEWORKS
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("ddp", "dense")])
def test_compressed_losses_are_close_and_residuals_follow_the_scaler(
    framework: str, kind: str, answers: dict[str, Any]
) -> None:
    theirs, ours = seen(answers, f"{framework} ddp fp16"), seen(answers, f"{framework} {kind} fp16")
    assert ours["wrapper"] == "DataParallel" and "running the plan it was given" in ours["explanation"]
    assert ours["losses"] != theirs["losses"]
    start, end = sum(ours["losses"][:4]), sum(ours["losses"][-4:])
    gain, gain_of_ddp = start - end, sum(theirs["losses"][:4]) - sum(theirs["losses"][-4:])
    print(f"\n{framework}, {kind}: the loss falls by {gain / gain_of_ddp:.2f} of what it does under DDP")
    assert gain > (0.95 if kind == "int8" else 0.5) * gain_of_ddp
    if kind == "int8":
        assert difference(ours["losses"], theirs["losses"]) < 0.01
    else:  # residuals are those of the loss in the last step, and no larger than some gradients
        assert ours["kept_scale"] == ours["scales"][-2] < INITIAL_SCALE
        assert math.isfinite(ours["kept_norm"]) and 0.01 < ours["kept_norm"] < 100


@FRAMEWORKS
def test_a_stopped_run_resumes_with_residuals_and_scale(framework: str, answers: dict[str, Any]) -> None:
    whole, resumed = seen(answers, f"{framework} oktopk fp16"), seen(answers, f"{framework} resumed fp16")
    assert seen(answers, f"{framework} stopped fp16")["losses"] == whole["losses"][: -len(resumed["losses"])]
    last = whole["losses"][-len(resumed["losses"]) :]
    print(f"\n{framework}: largest difference of a loss, resumed, {difference(resumed['losses'], last):.2g}")
    assert difference(resumed["losses"], last) < 1e-3 and len(last) in (10, 20)
    assert resumed["scales"] == whole["scales"][STOPPED_AFTER:] and resumed["kept_scale"] == whole["kept_scale"]
    assert resumed["kept_norm"] == pytest.approx(whole["kept_norm"], rel=0.1)


@FRAMEWORKS
def test_lean_is_refused_in_fp16_and_trains_as_ddp_in_bf16(framework: str, answers: dict[str, Any]) -> None:
    theirs, ours = seen(answers, f"{framework} ddp bf16"), seen(answers, f"{framework} lean bf16")
    assert ours["wrapper"] == "LeanDataParallel"
    print(f"\n{framework}, Lean: largest difference of a loss {difference(ours['losses'], theirs['losses']):.2g}")
    assert difference(ours["losses"], theirs["losses"]) < 1e-2
    refusal = answers[f"{framework} lean fp16"]["error"]
    assert "under Lean: " in refusal and "bf16" in refusal and "\n" not in refusal
