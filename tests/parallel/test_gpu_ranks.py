"""On two NCCL hosts of two ranks in a lab: exchanges on two levels average as DDP does, and lose nothing.

The test starts the lab, on whose ranks this file is the program. By hand, on a machine without a GPU, too:
anabranch lab --hosts 2 --ranks-per-host 2 --rate unshaped -- python tests/parallel/test_gpu_ranks.py
"""

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it is run as a program

from gpu import ON_GPU

pytestmark = ON_GPU
DEADLINE_S = 150.0
STEPS = 6
# The largest difference of an average from DDP's, relative to the largest average; Ok-Topk sends sums of several steps.
KINDS = {"dense": 1e-5, "bf16": 0.02, "int8": 0.02, "int4": 0.4, "oktopk:0.2": 9.0}


def test_two_levels_on_two_hosts() -> None:
    lab = [sys.executable, "-m", "anabranch", "lab", "--hosts", "2", "--ranks-per-host", "2", "--rate", "unshaped"]
    program = ["--backend", "nccl", "--inside", "memory", "--", sys.executable, __file__]
    done = subprocess.run([*lab, *program], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as DDP") == len(KINDS) and "found 2 nodes" in done.stdout, done.stdout


class Given(nn.Module):
    """A model whose gradients are what it is given."""

    def __init__(self, device: str) -> None:
        super().__init__()
        sizes = [(70, 33), (5, 3), (129, 64)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size, device=device)) for size in sizes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The sum of all products with the weights."""
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def averages(model: nn.Module, gradients: list[torch.Tensor]) -> torch.Tensor:
    """All averages of one step, one after another."""
    model.zero_grad()
    model(gradients).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def residuals(model: ab.DataParallel) -> torch.Tensor:
    """This rank's residuals of all parameters, one after another; 0 where it keeps none."""
    state, found = model.comm_state_dict(), []
    for name, parameter in model.module.named_parameters():
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        if (piece := state.get("residuals", {}).get(name)) is not None:
            low = state.get("slices", {}).get("residuals", {}).get(name, [0])[0]
            whole[low : low + len(piece)] = piece
        found.append(whole)
    return torch.cat(found)


def check(kind: str, most: float, device: str) -> None:
    """Compare some steps of a plan with DDP's, and what was offered with what arrived and what is kept."""
    names = [name for name, _ in Given("cpu").named_parameters()]
    two, last = f"{kind}@nodes", ab.Bucket((names[0],), 0, kind)
    plan = ab.Plan((ab.Bucket((names[2],), 0, two), ab.Bucket((names[1],), 0, "dense@nodes"), last))
    compress = None if kind == "dense" else ab.OkTopk(0.2, warmup_steps=0) if "oktopk" in kind else kind
    model = ab.DataParallel(Given(device), plan=plan, compress=compress)
    twin = DistributedDataParallel(Given(device))
    offered = torch.zeros_like(residuals(model))
    arrived, exact = offered.clone(), offered.clone()
    ranks = dist.get_world_size()
    for step in range(STEPS):
        generator = torch.Generator(device).manual_seed(100 * step + dist.get_rank())
        gradients = [torch.randn(p.shape, generator=generator, device=device) for p in twin.parameters()]
        offered += torch.cat([gradient.flatten() for gradient in gradients])
        ours, exact = averages(model, gradients), averages(twin, gradients)
        arrived += ours
        of_first = ours.clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(of_first, ours), f"{kind}: other bits than rank 0"
    assert float((ours - exact).abs().max()) <= most * float(exact.abs().max()), kind
    offered -= residuals(model)
    dist.all_reduce(offered)
    if kind in ("dense", "int4", "oktopk:0.2"):  # others drop rounding errors
        torch.testing.assert_close(arrived * ranks, offered, rtol=1e-4, atol=1e-3)
    if dist.get_rank() == 0:
        nodes = next(line for line in model.explain().splitlines() if "odes" in line)
        print(f"{kind}: as DDP; found {nodes.removeprefix('Nodes: ')}", flush=True)
    model.close()


def main() -> None:
    """On every rank: all kinds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    for kind, most in KINDS.items():
        check(kind, most, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
