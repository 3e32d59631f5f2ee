"""On four NCCL ranks of a lab: Lean trains the same weights as without it, bit by bit.

The test starts the lab, on whose ranks this file is the program. By hand, on a machine without a GPU, too:
anabranch lab --hosts 4 --rate unshaped -- python tests/lean/test_gpu_ranks.py
"""

import subprocess
import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it is run as a program

from gpu import ON_GPU
from lean.test_parallel import side_by_side

pytestmark = ON_GPU
DEADLINE_S = 180.0
WAYS = [
    *product(["momentum", "adamw", "fused"], ["oktopk:0.1", "dense"], [1, 2]),
    *product(["fused"], ["int4"], [1, 2]),
]


def test_the_same_weights_on_four_ranks() -> None:
    lab = [sys.executable, "-m", "anabranch", "lab", "--hosts", "4", "--rate", "unshaped", "--backend", "nccl", "--"]
    done = subprocess.run(
        [*lab, sys.executable, __file__], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same weights") == len(WAYS), done.stdout


def main() -> None:
    """On every rank: all ways, and all ranks must end with the same weights."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    for way in WAYS:
        for weight in side_by_side(dist.get_rank(), *way, "cuda" if on_gpu else "cpu"):
            mine = weight.clone()
            dist.broadcast(mine, 0)
            assert torch.equal(mine, weight), way
        if dist.get_rank() == 0:
            print("the same weights:", *way, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
