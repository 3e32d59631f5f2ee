"""The examples with frameworks, under torchrun, where the frameworks are installed (``make frameworks``)."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import anabranch as ab
from anabranch.tools.demo.text import CHARACTERS
from test_examples import EXAMPLES, losses_under_torchrun, sparse_program
from torchrun import KILLER

pytestmark = pytest.mark.campaign
FRAMEWORKS = [("transformers_trainer.py", "transformers"), ("accelerate_loop.py", "accelerate")]


@pytest.mark.parametrize(("example", "package"), FRAMEWORKS)
def test_the_losses_of_a_framework_are_those_of_ddp(example: str, package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    program = (EXAMPLES / example, "--steps", "20", "--wrap")
    ddp, _ = losses_under_torchrun(2, tmp_path, *program, "ddp")
    ours, out = losses_under_torchrun(2, tmp_path, *program, "anabranch")
    assert "after 20 steps" in out and "DDP's own buckets" in out
    assert ours == ddp and ours[-1] < ours[0]


def int4_plan(path: Path) -> Path:
    """Two buckets of the Trainer's GPT-2, whose rounding errors are kept; the output layer shares its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=CHARACTERS, bos_token_id=0, eos_token_id=0, **sizes))
    names = [name for name, _ in model.named_parameters()][::-1]
    ab.save(
        ab.Plan((ab.Bucket(tuple(names[:20]), collective="int4"), ab.Bucket(tuple(names[20:]), collective="int4"))),
        path,
    )
    return path


def compressed_program(example: str, folder: Path) -> tuple[str | Path, ...]:
    """An example that keeps residuals under a given plan, so that it repeats bit by bit."""
    if example == "transformers_trainer.py":
        return EXAMPLES / example, "--compress", "int4", "--plan", int4_plan(folder / "plan.json")
    *_, plan = sparse_program(folder / "plan.json")
    return EXAMPLES / example, "--compress", "0.05", "--plan", plan


@pytest.mark.parametrize("compressed", [False, True], ids=["dense", "compressed"])
@pytest.mark.parametrize(("example", "package"), FRAMEWORKS)
def test_a_framework_goes_on_if_a_rank_is_killed(example: str, package: str, compressed: bool, tmp_path: Path) -> None:
    """Rank 1 is killed in step 27 of 30, torchrun starts both again, and they go on from step 20, bit by bit."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    killer, kept = tmp_path / "killer.py", "--output" if package == "transformers" else "--checkpoint"
    killer.write_text(KILLER)
    ours = compressed_program(example, tmp_path) if compressed else (EXAMPLES / example,)
    stock = ours if compressed else (*ours, "--wrap", "ddp")
    whole, _ = losses_under_torchrun(2, tmp_path, *stock, "--steps", "30", kept, tmp_path / "whole")
    killed = (killer, "1", str(2 * 27), *ours, "--steps", "30", kept, tmp_path / "killed")
    resumed, out = losses_under_torchrun(2, tmp_path, *killed, restarts=1)
    assert out.count("20 times backward") == 2, "ten steps of two batches on both ranks"
    assert resumed == whole
