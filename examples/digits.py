"""Train an image classifier with BatchNorm on the digits that come with scikit-learn, on several ranks.

    torchrun --standalone --nproc-per-node 2 examples/digits.py

Under ``--wrap ddp`` and under ``--wrap anabranch`` every forward sees rank 0's running statistics; anabranch sends them
behind the gradients, where they cost less. ``--compress 0.1`` sends the largest tenth of the gradients, the rest later.
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
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import anabranch

TRAINED_ON = 1500  # of 1797 images; the rest is for the test
BATCH = 25  # images per rank and step


def main() -> None:
    """Train, and on rank 0 say how many digits it reads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=["ddp", "anabranch"], default="anabranch")
    parser.add_argument("--compress", type=float, help="send this share of the larger gradients, the rest later")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--losses", type=Path, help="write the losses to this file, as JSON")
    options = parser.parse_args()

    device = meet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16
    digits = torch.tensor(labels, device=device)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
    training, test = order[:TRAINED_ON], order[TRAINED_ON:]

    model = nn.Sequential(
        *block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(128, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if options.wrap == "ddp":
        parallel: nn.Module = DistributedDataParallel(model)
    else:
        compress = anabranch.OkTopk(density=options.compress) if options.compress else None
        parallel = anabranch.DataParallel(model, compress=compress)  # the one line

    losses: list[float] = []
    quiet = rank != 0 or not sys.stderr.isatty()
    for step in track(range(options.steps), "training", console=Console(stderr=True), disable=quiet):
        first = (step * ranks + rank) * BATCH  # each rank takes its own next images, around and around
        mine = training[torch.arange(first, first + BATCH, device=device) % TRAINED_ON]
        loss = cross_entropy(parallel(images[mine]), digits[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())

    model.eval()
    with torch.no_grad():
        right = (model(images[test]).argmax(dim=1) == digits[test]).float().mean().item()
    if rank == 0:
        print(f"reads {right:.1%} of {len(test)} digits it has not seen, after {options.steps} steps on {ranks} ranks")
        if options.losses:
            options.losses.write_text(json.dumps(losses))
    dist.destroy_process_group()


def block(before: int, after: int) -> list[nn.Module]:
    """Convolution, BatchNorm, ReLU."""
    return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def meet() -> torch.device:
    """Meet the other ranks that torchrun has started: on GPUs where there are any, else on the CPU."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


if __name__ == "__main__":
    main()
