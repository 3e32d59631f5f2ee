"""Train a small character-level transformer on Python's own standard library, on several ranks, and survive crashes.

    torchrun --standalone --nproc-per-node 4 examples/char_transformer.py --steps 200 --checkpoint run.pt

From DistributedDataParallel to anabranch it is one line; it is marked. After a crash the same command goes on from the
last checkpoint.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch
from anabranch.demo.text import CharTransformer, StandardLibrary


def main() -> None:
    """Train, and on rank 0 say how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=["ddp", "anabranch"], default="anabranch")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, help="save here, and resume from here")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--losses", type=Path, help="write the losses to this file, as JSON")
    options = parser.parse_args()

    device = meet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    text, model = StandardLibrary(), CharTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = resume(options.checkpoint, model, optimizer, device) if options.checkpoint else []

    if options.wrap == "ddp":
        parallel: nn.Module = DistributedDataParallel(model)
    else:
        parallel = anabranch.DataParallel(model)  # the one line

    quiet = rank != 0 or not sys.stderr.isatty()
    for step in track(range(len(losses), options.steps), "training", console=Console(stderr=True), disable=quiet):
        loss = parallel(text.batch(step, rank, ranks).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0 and options.checkpoint and (step + 1) % options.every == 0:
            save(options.checkpoint, model, optimizer, losses)

    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {len(losses)} steps on {ranks} ranks")
        if isinstance(parallel, anabranch.DataParallel):
            print(parallel.explain())
        if options.losses:
            options.losses.write_text(json.dumps(losses))
    dist.destroy_process_group()


def meet() -> torch.device:
    """Meet the other ranks that torchrun has started: on GPUs where there are any, else on the CPU."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> list[float]:
    """Take up the last checkpoint, if there is one; the losses so far, which also say how many steps were made."""
    if not path.exists():
        return []
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return list(state["losses"])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    """Replace the checkpoint in one go: a crash leaves the old one or the new one, never half of one."""
    unfinished = path.with_suffix(".unfinished")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, unfinished)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
