"""Train a small GPT-2 with Transformers' Trainer on the text of Python's standard library, on several ranks.

    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py --steps 60 --output run

With ``--wrap ddp`` it is an ordinary Trainer; anabranch is one added line, which is marked. ``--compress int8`` and the
like send less. Nothing is downloaded: the weights are random, and characters are the tokens. The same command goes on
from the last checkpoint in ``run``, after a crash or with more ``--steps``.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from anabranch.frameworks.transformers import use_anabranch
from anabranch.tools.demo.text import CHARACTERS, StandardLibrary

LENGTH = 64


class Passages(Dataset[dict[str, torch.Tensor]]):
    """Passages of the standard library's source code, as a Trainer wants them."""

    def __init__(self, count: int) -> None:
        self._text, self._count = StandardLibrary(LENGTH - 1, batch=1), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        passage = self._text.batch(index, 0, 1)[0]
        return {"input_ids": passage, "labels": passage}


def main() -> None:
    """Train, evaluate, and on rank 0 say how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=["ddp", "anabranch"], default="anabranch")
    parser.add_argument("--compress", help="bf16, int8, int4 or auto: what is sent is rounded, and smaller")
    parser.add_argument("--plan", type=Path, help="run this plan, whatever comes of it, instead of looking for one")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, help="keep checkpoints here, and go on from the last one")
    parser.add_argument("--losses", type=Path, help="write the losses to this file, as JSON")
    options = parser.parse_args()

    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    last = get_last_checkpoint(options.output) if options.output else None
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=CHARACTERS, bos_token_id=0, eos_token_id=0, **sizes))
    arguments = TrainingArguments(
        str(options.output or tempfile.mkdtemp()),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        logging_first_step=True,
        save_strategy="steps" if options.output else "no",
        save_steps=20,
        save_total_limit=2,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    trainer = Trainer(model, arguments, train_dataset=Passages(4000), eval_dataset=Passages(32))
    if options.wrap == "anabranch":
        use_anabranch(trainer, compress=options.compress, plan=options.plan)  # the one line
    trainer.train(resume_from_checkpoint=last)

    evaluated = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, evaluated {evaluated:.4f}, after {options.steps} steps")
        if hasattr(trainer.model_wrapped, "explain"):  # with one process nothing is wrapped
            print(trainer.model_wrapped.explain())
        if options.losses:
            options.losses.write_text(json.dumps(losses))
    time.sleep(0.5)  # a rank that ends right after a collective may hang in torch's clean-up, also under plain DDP
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
