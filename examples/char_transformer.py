"""Train a small character-level transformer on Python's own standard library, on several ranks, and survive crashes.

    torchrun --standalone --nproc-per-node 4 examples/char_transformer.py --steps 200 --checkpoint run.pt

From DistributedDataParallel to anabranch it is one line; it is marked. After a crash the same command goes on from the
last checkpoint. With ``--compress 0.1`` only the largest tenth of the gradients is sent and the rest, the residual, is
added to later steps; the residuals are then in the checkpoints, too. ``--keep run`` leaves files behind that
``anabranch report run`` draws.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch
from anabranch.tools.demo.text import CharTransformer, StandardLibrary


def main() -> None:
    """Train, and on rank 0 say how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=["ddp", "anabranch"], default="anabranch")
    parser.add_argument("--compress", type=float, help="send this share of each larger gradient, the rest later")
    parser.add_argument("--plan", type=Path, help="run this plan, whatever comes of it, instead of looking for one")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, help="save here, and resume from here")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--losses", type=Path, help="write the losses to this file, as JSON")
    parser.add_argument("--keep", type=Path, help="keep what a report of the run needs in this folder")
    options = parser.parse_args()

    device = meet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    text, model = StandardLibrary(), CharTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses, residuals = resume(options.checkpoint, model, optimizer, device) if options.checkpoint else ([], [])

    if options.wrap == "ddp":
        parallel: DistributedDataParallel = DistributedDataParallel(model)
    else:
        compress = anabranch.OkTopk(density=options.compress, deterministic=True) if options.compress else None
        parallel = anabranch.DataParallel(model, compress=compress, plan=options.plan)  # the one line
        parallel.load_comm_state_dict(*residuals)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            parallel.log_to(anabranch.JsonLines(options.keep / "steps.jsonl"))

    quiet = rank != 0 or not sys.stderr.isatty()
    for step in track(range(len(losses), options.steps), "training", console=Console(stderr=True), disable=quiet):
        loss = parallel(text.batch(step, rank, ranks).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if options.checkpoint and (step + 1) % options.every == 0:
            save(options.checkpoint, parallel, optimizer, losses)

    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {len(losses)} steps on {ranks} ranks")
        if isinstance(parallel, anabranch.DataParallel):
            print(parallel.explain())
            if options.keep:
                keep(options.keep, parallel)
        if options.losses:
            options.losses.write_text(json.dumps(losses))
    dist.destroy_process_group()


def keep(folder: Path, parallel: anabranch.DataParallel) -> None:
    """Save what was recorded, measured, planned and timed, for ``anabranch report``; files of earlier runs go."""
    for name in ("trace", "network", "plan", "timeline"):
        (folder / f"{name}.json").unlink(missing_ok=True)
        if (noun := getattr(parallel, name)) is not None:
            anabranch.save(noun, folder / f"{name}.json")


def meet() -> torch.device:
    """Meet the other ranks that torchrun has started: on GPUs where there are any, else on the CPU."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def resume(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[list[float], list[dict[str, Any]]]:
    """The losses of the last checkpoint and this rank's residuals (all ranks', if their number has changed)."""
    if not path.exists():
        return [], []
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    ranks = range(state["ranks"]) if state["ranks"] != dist.get_world_size() else [dist.get_rank()]
    files = [of_rank(path, len(state["losses"]), rank) for rank in ranks]
    return list(state["losses"]), [torch.load(file, weights_only=True) for file in files]


def save(path: Path, parallel: DistributedDataParallel, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    """Replace the checkpoint in one go: a crash leaves the old one or the new one, never half of one.

    Each rank's residuals are in a file of their own, and the checkpoint says which of these files count.
    """
    kept = parallel.comm_state_dict() if isinstance(parallel, anabranch.DataParallel) else {}
    torch.save(kept, of_rank(path, len(losses), dist.get_rank()))
    dist.barrier()  # every rank's file is there
    if dist.get_rank() == 0:
        unfinished, ranks = path.with_suffix(".unfinished"), dist.get_world_size()
        state = {"model": parallel.module.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
        torch.save({**state, "ranks": ranks}, unfinished)
        unfinished.replace(path)
        current = {of_rank(path, len(losses), rank) for rank in range(ranks)}
        for old in set(path.parent.glob(f"{path.stem}.step*")) - current:
            old.unlink()


def of_rank(path: Path, step: int, rank: int) -> Path:
    """The file with a rank's residuals after a step."""
    return path.with_suffix(f".step{step}-rank{rank}")


if __name__ == "__main__":
    main()
