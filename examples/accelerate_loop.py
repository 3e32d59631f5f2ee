"""Train a small character-level transformer with Accelerate on the text of Python's standard library, on several ranks.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --steps 60 --checkpoint run

With ``--wrap ddp`` it is an ordinary loop of Accelerate; anabranch is one added line, which is marked. ``--compress``
sends the largest values of each gradient only and keeps the rest, the residual, for later steps; the residuals are then
in the checkpoints, too. The same command goes on from the last checkpoint, after a crash or with more ``--steps``.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from accelerate import Accelerator

import anabranch
from anabranch.frameworks.accelerate import use_anabranch
from anabranch.tools.demo.text import CharTransformer, StandardLibrary

ACCUMULATED = 2  # batches per step


def main() -> None:
    """Train, and on rank 0 say how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=["ddp", "anabranch"], default="anabranch")
    parser.add_argument("--compress", type=float, help="send this share of each larger gradient, the rest later")
    parser.add_argument("--plan", type=Path, help="run this plan, whatever comes of it, instead of looking for one")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", type=Path, help="save in this folder, and go on from it")
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--losses", type=Path, help="write the losses to this file, as JSON")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATED)
    if options.wrap == "anabranch":
        compress = anabranch.OkTopk(density=options.compress, deterministic=True) if options.compress else None
        use_anabranch(accelerator, compress=compress, plan=options.plan)  # the one line

    torch.manual_seed(0)
    text, model = StandardLibrary(), CharTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses: list[float] = []
    last = options.checkpoint and options.checkpoint / "last.json"
    if last and last.is_file():
        losses = json.loads(last.read_text())
        accelerator.load_state(options.checkpoint / f"step-{len(losses) // ACCUMULATED}")

    for number in range(len(losses), ACCUMULATED * options.steps):
        batch = text.batch(number, accelerator.process_index, accelerator.num_processes).to(accelerator.device)
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        step, rest = divmod(number + 1, ACCUMULATED)
        if last and rest == 0 and (step % options.every == 0 or step == options.steps):
            accelerator.save_state(options.checkpoint / f"step-{step}")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:  # in one move, when all ranks have written theirs
                last.with_suffix(".new").write_text(json.dumps(losses))
                last.with_suffix(".new").replace(last)

    if accelerator.is_main_process:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {options.steps} steps")
        if isinstance(model, anabranch.DataParallel):
            print(model.explain())
        if options.losses:
            options.losses.write_text(json.dumps(losses))
    time.sleep(0.5)  # a rank that ends right after a collective may hang in torch's clean-up, also under plain DDP
    accelerator.end_training()


if __name__ == "__main__":
    main()
