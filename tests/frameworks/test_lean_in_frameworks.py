"""Lean under Transformers' Trainer, Accelerate and Lightning themselves: accumulates, clips and schedules as DDP."""

import math
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from frameworks.lightning_runs import BATCHES, fit, lightning, sparse, strategy, weights
from frameworks.test_accelerate import ACCUMULATED, accelerator, batches_of_4
from frameworks.test_transformers import losses_and_weights, trainer
from frameworks.tiny import gpt2, options_of
from ranks import on_ranks

HUGGING_FACE = pytest.mark.skipif(
    not (find_spec("accelerate") and find_spec("transformers")), reason="accelerate or transformers is not installed"
)
LIGHTNING = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
IMPORTS_S = 120.0
pytestmark = pytest.mark.slow  # ranks import frameworks for seconds


# Transformers.


def by_trainer(rank: int, folder: str, kind: str, max_grad_norm: float) -> list[Any]:
    """Stock DDP (or DataParallel with the same compression), then Lean; both with AdamW of the TrainingArguments."""
    answers = []
    options = options_of(kind)
    for ours in (options or None, {**options, "memory": ab.Lean()}):
        made = trainer(rank, folder, ours, max_grad_norm=max_grad_norm, max_steps=20, warmup_steps=3)
        made.train()
        norms = [entry["grad_norm"] for entry in made.state.log_history if "grad_norm" in entry]
        answers.append([type(made.model_wrapped).__name__, *losses_and_weights(made), norms])
    return answers


@HUGGING_FACE
@pytest.mark.parametrize(("kind", "max_grad_norm"), [("dense", 0.5), ("dense", 0.0), ("oktopk", 0.5)])
def test_trainer_trains_and_logs_norms_as_with_ddp(kind: str, max_grad_norm: float, tmp_path: Path) -> None:
    """Two micro-batches a step; of two summands the order does not matter, so the bits are the same."""
    for theirs, ours in on_ranks(by_trainer, 2, str(tmp_path), kind, max_grad_norm, timeout_s=IMPORTS_S):
        assert theirs[0] == ("DistributedDataParallel" if kind == "dense" else "DataParallel")
        assert ours[0] == "LeanDataParallel"
        assert ours[1] == theirs[1] and torch.equal(ours[2], theirs[2])
        assert len(ours[3]) == 20 and ours[3] == theirs[3] and min(ours[3]) > 0.5


def refused_by_trainer(rank: int, folder: str) -> list[str]:
    said = []
    for lean, arguments in ((ab.Lean(clip_norm=0.7), {}), (ab.Lean(), {"optim": "adafactor"})):
        with pytest.raises(ValueError) as caught:
            trainer(rank, folder, {"memory": lean}, max_steps=1, **arguments).train()
        said.append(str(caught.value))
    return said


@HUGGING_FACE
def test_trainer_refuses_another_norm_and_optimizers_that_cannot_be_split(tmp_path: Path) -> None:
    for norm, adafactor in on_ranks(refused_by_trainer, 2, str(tmp_path), timeout_s=IMPORTS_S):
        assert norm.startswith("TrainingArguments max_grad_norm is 0.5, and Lean clip_norm is 0.7: expected the same")
        assert "Lean optimizer is a Adafactor of transformers.optimization: expected one of torch.optim" in adafactor


# LoRA by peft.


def with_lora(rank: int) -> None:
    """Adapters of a frozen GPT-2."""
    peft = import_module("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(gpt2(), lora).eval()  # without dropout

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    ours, theirs = adapted(), adapted()
    lean: Any = ab.DataParallel(ours, memory=ab.Lean(adamw))
    ddp = DistributedDataParallel(theirs)
    optimizer = adamw([parameter for parameter in theirs.parameters() if parameter.requires_grad])
    tokens = torch.arange(32).view(2, 16) % 7 + rank
    first = {name: value.clone() for name, value in ours.state_dict().items()}
    for _ in range(6):
        lean(input_ids=tokens, labels=tokens).loss.backward()
        ddp(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
    changed = {name for name, value in ours.state_dict().items() if not torch.equal(value, first[name])}
    assert changed and all("lora_" in name for name in changed)
    lean.close()


@pytest.mark.skipif(not (find_spec("peft") and find_spec("transformers")), reason="peft is not installed")
def test_adapters_of_peft_train_as_with_ddp() -> None:
    on_ranks(with_lora, 2, timeout_s=IMPORTS_S)


# Accelerate.


def by_accelerate(rank: int, lean: bool, clip_norm: float | None) -> tuple[list[float], list[float], torch.Tensor]:
    """A loop as in Accelerate's manual; losses, norms and weights."""
    model = gpt2().eval()  # without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
    options = {"memory": ab.Lean(optimizer, clip_norm=clip_norm)} if lean else None
    helper = accelerator(rank, options, gradient_accumulation_steps=ACCUMULATED)
    wrapped, optimizer, scheduler, loader = helper.prepare(model, optimizer, scheduler, batches_of_4())
    assert isinstance(wrapped, ab.LeanDataParallel if lean else DistributedDataParallel)
    assert helper.unwrap_model(wrapped) is model
    losses, norms = [], []
    for batch in (batch for _ in range(3) for batch in loader):
        with helper.accumulate(wrapped):
            loss = wrapped(**batch).loss
            helper.backward(loss)
            if helper.sync_gradients:
                norms.append(helper.clip_grad_norm_(wrapped.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, torch.cat([p.detach().flatten() for p in model.parameters()])


def by_accelerate_twice(rank: int) -> list[Any]:
    return [by_accelerate(rank, lean, 0.5) for lean in (False, True)]


@HUGGING_FACE
def test_accelerate_accumulates_and_clips_as_with_ddp() -> None:
    for theirs, ours in on_ranks(by_accelerate_twice, 2, timeout_s=IMPORTS_S):
        assert len(ours[0]) == 24 and ours[0] == theirs[0] and torch.equal(ours[2], theirs[2])
        assert len(ours[1]) == 12 and ours[1] == theirs[1] and min(ours[1]) > 0.5


def refused_by_accelerate(rank: int) -> list[str]:
    said = []
    with pytest.raises(RuntimeError) as unclipped:
        by_accelerate(rank, True, None)
    said.append(str(unclipped.value))
    helper = accelerator(rank, {"memory": ab.Lean(torch.optim.SGD)})
    model = gpt2()
    with pytest.raises(ValueError) as other:
        helper.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped = helper.prepare(model)
    assert helper.prepare(wrapped.optimizer).optimizer is wrapped.optimizer
    with pytest.raises(RuntimeError) as values:
        helper.clip_grad_value_(wrapped.parameters(), 1.0)
    return [*said, str(other.value), str(values.value)]


@HUGGING_FACE
def test_accelerate_is_refused_what_lean_cannot_do() -> None:
    for unclipped, other, values in on_ranks(refused_by_accelerate, 2, timeout_s=IMPORTS_S):
        assert "so give Lean(clip_norm=0.5), which clips there" in unclipped
        assert "prepare() was given a SGD" in other and "prepare the model first" in other
        assert "so give Lean(clip_value=1.0), which clips there" in values


# Lightning.


def by_lightning(rank: int, sparsely: bool, precision: str, clipping: str) -> dict[str, Any]:
    pl = lightning(rank)
    options: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "precision": precision,
        "gradient_clip_algorithm": clipping,
    }
    options["gradient_clip_val"] = 0.3 if clipping == "norm" else 0.01
    without = strategy(**sparse()) if sparsely else "ddp"
    under_lean = strategy(memory=ab.Lean(), **(sparse() if sparsely else {}))
    answers = {}
    for name, chosen in (("ddp", without), ("lean", under_lean)):
        trained, module = fit(pl, chosen, 3, **options)
        validated = float(trained.callback_metrics["validation"])
        answers[name] = [module.wrapper, module.losses, validated, weights(module)]
    return answers


@LIGHTNING
@pytest.mark.parametrize(
    ("sparsely", "precision", "clipping"),
    [
        (False, "32", "norm"),
        (True, "32", "norm"),
        (False, "bf16-mixed", "norm"),
        (False, "32", "value"),
        (False, "bf16-mixed", "value"),
    ],
)
def test_lightning_accumulates_clips_and_validates_as_with_ddp(sparsely: bool, precision: str, clipping: str) -> None:
    """Automatic optimization, which calls ``optimizer.step(closure)``; with BatchNorm's buffers."""
    for answers in on_ranks(by_lightning, 2, sparsely, precision, clipping, timeout_s=IMPORTS_S):
        theirs, ours = answers["ddp"], answers["lean"]
        assert theirs[0] == ("DataParallel" if sparsely else "DistributedDataParallel")
        assert ours[0] == "LeanDataParallel" and len(ours[1]) == 3 * BATCHES
        assert ours[1:3] == theirs[1:3] and torch.equal(ours[3], theirs[3])


def resumed_by_lightning(rank: int, folder: str) -> list[torch.Tensor]:
    pl = lightning(rank)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}

    def chosen() -> Any:
        return strategy(memory=ab.Lean(), **sparse())

    _, whole = fit(pl, chosen(), 3, **options)
    saver = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    stopped, _ = fit(pl, chosen(), 2, callbacks=[saver], **{**options, "enable_checkpointing": True})
    assert "LeanDataParallel" not in type(stopped.strategy.model).__name__  # unwrapped, and its optimizer given back
    _, continued = fit(pl, chosen(), 3, resume=f"{folder}/epoch=1.ckpt", **options)
    return [weights(whole), weights(continued)]


@LIGHTNING
def test_a_stopped_run_of_lightning_resumes_bit_by_bit(tmp_path: Path) -> None:
    for whole, continued in on_ranks(resumed_by_lightning, 2, str(tmp_path), timeout_s=IMPORTS_S):
        assert torch.equal(whole, continued)


def refused_by_lightning(rank: int) -> list[str]:
    pl = lightning(rank)
    said = []
    for options in (
        {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "value", "lean": ab.Lean(clip_value=0.5)},
        {"manual": True},
        {"gradient_clip_val": 0.3, "lean": ab.Lean(clip_norm=math.pi)},
    ):
        arguments: dict[str, Any] = dict(options)
        chosen = strategy(memory=arguments.pop("lean", ab.Lean()))
        with pytest.raises(ValueError) as caught:
            fit(pl, chosen, 1, **arguments)
        said.append(str(caught.value))
    with pytest.raises(ValueError) as given:
        strategy(memory=ab.Lean(torch.optim.SGD))
    with pytest.raises(ValueError) as hooked:
        strategy(memory=ab.Lean(), ddp_comm_hook=ab.quantised_hook)
    return [*said, str(given.value), str(hooked.value)]


@LIGHTNING
def test_lightning_is_refused_what_lean_cannot_do() -> None:
    for values, manual, norm, given, hooked in on_ranks(refused_by_lightning, 2, timeout_s=IMPORTS_S):
        assert values.startswith("Trainer gradient_clip_val is 0.3, and Lean clip_value is 0.5: expected the same")
        assert "automatic_optimization is False" in manual
        assert norm.startswith("Trainer gradient_clip_val is 0.3, and Lean clip_norm is 3.14")
        assert "leave Lean's optimizer out" in given
        assert "was given ddp_comm_hook under Lean, which has no comm hooks" in hooked
