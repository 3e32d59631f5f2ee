"""Transformers' Trainer with anabranch, on real ranks and with the real package: as with DDP, by one added line."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import anabranch as ab
from frameworks.tiny import DENSITY, as_under_torchrun, files_of_ranks, gpt2, options_of, rows
from ranks import on_ranks

pytestmark = [
    pytest.mark.slow,  # ranks import the framework for seconds
    pytest.mark.skipif(
        not (find_spec("accelerate") and find_spec("transformers")),
        reason="accelerate or transformers is not installed",
    ),
]

STEPS = 100


def trainer(rank: int, folder: str, options: dict[str, Any] | None, **arguments: Any) -> Any:
    """A Trainer as a user makes it; with ``options``, with the added line."""
    as_under_torchrun(rank)
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    from anabranch.frameworks.transformers import use_anabranch

    AcceleratorState._reset_state()  # of the Trainer before, in this process
    GradientState._reset_state()
    usual: dict[str, Any] = {
        "use_cpu": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5,
        "learning_rate": 1e-3, "max_steps": 20, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "log_level": "error", "ddp_find_unused_parameters": False,
    }  # fmt: skip
    made = Trainer(gpt2(), TrainingArguments(folder, **(usual | arguments)), train_dataset=rows(), eval_dataset=rows(8))
    assert made.args.world_size == 2
    if options is not None:
        use_anabranch(made, **options)
    return made


def losses_and_weights(made: Any) -> tuple[list[float], torch.Tensor]:
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses, torch.cat([p.detach().flatten() for p in made.model.parameters()])


# Losses, evaluation and logs.


def with_and_without(rank: int, folder: str) -> list[Any]:
    answers = []
    kinds: tuple[dict[str, Any] | None, ...] = (None, {})
    for options in kinds:
        made = trainer(rank, folder, options, max_steps=STEPS, eval_strategy="steps", eval_steps=50)
        made.train()
        assert type(made.model_wrapped).__module__.startswith("anabranch") == (options is not None)
        evaluated = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
        half = trainer(rank, folder, options, max_steps=6, bf16=True)
        half.train()
        half.train()  # the wrapper is used again
        answers.append([*losses_and_weights(made), evaluated, *losses_and_weights(half), made.state.log_history[-3:]])
    return answers


def test_losses_are_those_of_ddp_and_logs_have_metrics(tmp_path: Path) -> None:
    """Of two summands the order does not matter: with two ranks every layout gives the same bits."""
    by_rank = on_ranks(with_and_without, 2, str(tmp_path), timeout_s=120)
    for ddp, ours in by_rank:
        assert len(ours[0]) == STEPS and ours[0][-1] < ours[0][0] and len(ours[2]) == 2
        assert ours[0] == ddp[0] and ours[2] == ddp[2] and ours[3] == ddp[3]
        assert torch.equal(ours[1], ddp[1]) and torch.equal(ours[4], ddp[4])
        assert ours[0][:6] != ours[3][:6]  # autocast was on
    ours = by_rank[0][1]
    (logged,) = [entry for entry in ours[5] if "loss" in entry]
    nbytes = 4 * ours[1].numel()
    assert logged["anabranch/sent_nbytes"] == nbytes and logged["anabranch/density"] == 1.0  # of a ring of two
    assert 0 <= logged["anabranch/exposed_s"] < logged["anabranch/measured_s"]
    assert all("anabranch/density" not in entry for entry in ours[5] if "loss" not in entry)
    assert all("anabranch/density" not in entry for entry in by_rank[1][1][5])


def evaluated_first(rank: int, folder: str) -> list[torch.Tensor]:
    trained = []
    for arguments in ({"bf16": True}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        made = trainer(rank, folder, {}, max_steps=2, **arguments)
        made.evaluate()
        made.train()
        trained.append(losses_and_weights(made)[1])
    return trained


def test_evaluating_first_leaves_ranks_together(tmp_path: Path) -> None:
    """The stock Trainer makes no DDP after that: its ranks train apart, and nothing says so."""
    first, second = on_ranks(evaluated_first, 2, str(tmp_path))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def matrices_with_momentum(rank: int, folder: str, momentum: float) -> int:
    options = options_of("oktopk")
    compress = replace(options["compress"], momentum=momentum)
    made = trainer(rank, folder, {**options, "compress": compress}, max_steps=4)
    made.train()
    state = getattr(made.optimizer, "optimizer", made.optimizer).state
    return sum(bool(state[p]["exp_avg"].any()) for p in made.model.parameters() if p.dim() > 1)


def test_the_optimizer_shares_momentum_with_sparse_gradients_by_itself(tmp_path: Path) -> None:
    assert on_ranks(matrices_with_momentum, 2, str(tmp_path), 0.9, timeout_s=120) == [0, 0]
    assert min(on_ranks(matrices_with_momentum, 2, str(tmp_path), 0.0, timeout_s=120)) > 0


# Checkpoints.


RESUMED = ("dense", "oktopk", "lean")


def resumable(kind: str) -> dict[str, Any]:
    """Options under which two runs are equal bit by bit; Lean's are Ok-Topk's."""
    return {**options_of("oktopk"), "memory": ab.Lean()} if kind == "lean" else options_of(kind)


def whole_and_first_half(rank: int, folder: str) -> list[Any]:
    from transformers import TrainerCallback

    class StopAfter10(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 10

    answers = []
    for kind in RESUMED:
        whole = trainer(rank, f"{folder}/whole", resumable(kind))
        whole.train()
        answers.append(losses_and_weights(whole))
        stopped = trainer(rank, f"{folder}/{kind}", resumable(kind), save_strategy="steps", save_steps=5)
        stopped.args.save_total_limit = 1
        stopped.add_callback(StopAfter10())
        stopped.train()
    return answers


def second_half(rank: int, folder: str) -> list[Any]:
    answers = []
    for kind in RESUMED:
        made = trainer(rank, f"{folder}/{kind}", resumable(kind))
        made.train(resume_from_checkpoint=True)
        answers.append(losses_and_weights(made))
    return answers


def test_a_stopped_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    """New processes load the last checkpoint: weights, optimizer, random states, and residuals of every rank."""
    wholes = on_ranks(whole_and_first_half, 2, str(tmp_path), timeout_s=90)
    checkpoint = tmp_path / "oktopk" / "checkpoint-10"
    assert files_of_ranks(checkpoint) == ["anabranch_rank0.pt", "anabranch_rank1.pt"]
    assert all(torch.load(path, weights_only=True)["residuals"] for path in checkpoint.glob("anabranch_*"))
    logged = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    assert DENSITY / 2 < logged[-1]["anabranch/density"] < 0.2
    for whole, resumed in zip(wholes, on_ranks(second_half, 2, str(tmp_path), timeout_s=90), strict=True):
        for (losses, weights), (last_losses, last_weights) in zip(whole, resumed, strict=True):
            assert len(losses) == 20 and last_losses == losses
            assert torch.equal(last_weights, weights)


# Refusals: one sentence each.


def refusals(rank: int, folder: str) -> list[str]:
    as_under_torchrun(rank)
    from transformers import Trainer, TrainingArguments

    from anabranch.frameworks.transformers import use_anabranch

    said = []

    def refused(call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call(*args, **kwargs)
        said.append(str(caught.value))

    refused(use_anabranch, trainer(rank, folder, {}))
    with patch("transformers.Trainer._save_optimizer_and_scheduler", None):
        refused(trainer, rank, folder, {})
    with patch("transformers.Trainer.log", lambda self, entries: None):
        refused(trainer, rank, folder, {})
    refused(trainer, rank, folder, {"memory": ab.Lean()}, auto_find_batch_size=True)
    arguments = TrainingArguments(folder, use_cpu=True, report_to=[])
    refused(use_anabranch, Trainer(ab.DataParallel(gpt2()), arguments, train_dataset=rows()))
    return said


def test_what_does_not_fit_is_refused_with_a_sentence(tmp_path: Path) -> None:
    twice, missing, arguments, batch, wrapped = on_ranks(refusals, 2, str(tmp_path))[0]
    assert "called twice" in twice
    tested = "it is tested with 5.22.2: pip install transformers==5.22.2"
    assert missing.startswith("anabranch does not fit transformers 5.") and missing.endswith(tested)
    assert "Trainer has no _save_optimizer_and_scheduler()" in missing
    assert "Trainer.log() takes no logs" in arguments and arguments.endswith(tested)
    assert batch.startswith("auto_find_batch_size=True under Lean: ") and "per_device_train_batch_size" in batch
    assert "the Trainer's model is a DataParallel: give Trainer the model itself" in wrapped


# Lean.


def lean_and_not(rank: int, folder: str) -> list[Any]:
    """Plain SGD, so that both have the same optimizer; the Trainer's own schedule changes the rate of both."""
    answers = []
    memory = ab.Lean(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    for name, options in (("ddp", {}), ("lean", {"memory": memory})):
        made = trainer(
            rank, f"{folder}/{name}", options, optim="sgd", learning_rate=0.05, max_grad_norm=0, max_steps=10,
            save_strategy="steps", save_steps=10,
        )  # fmt: skip
        made.train()
        made.train()  # the wrapper and its optimizer are used again
        assert isinstance(made.model_wrapped, ab.LeanDataParallel) == (name == "lean")
        made.save_model(f"{folder}/{name}/model")
        answers.append(losses_and_weights(made))
    return answers


def test_lean_trains_as_ddp(tmp_path: Path) -> None:
    for (losses, weights), (leans, lean_weights) in on_ranks(lean_and_not, 2, str(tmp_path)):
        assert leans == pytest.approx(losses, rel=1e-5)
        assert torch.allclose(weights, lean_weights, atol=1e-6)
    assert (tmp_path / "lean" / "model" / "model.safetensors").is_file()
