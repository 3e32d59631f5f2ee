"""A compiled residual network beside an eager DDP, on Gloo or with two NCCL ranks that share one GPU."""

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel, Network, Plan, Trace, planners
from compiled.models import Log, ResNet, furthest
from parallel.twins import SCENARIOS, steps

RANKS = 2
# NCCL refuses two ranks on one GPU of one host, so each says that it is another host.
ANOTHER_HOST = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
}


def two_buckets(trace: Trace, network: Network) -> Plan:
    """Needs one cut: fewer than graphs are cut by at first."""
    return planners.by_bytes(trace, network, cap_nbytes=trace.nbytes // 2)


def join(rank: int, folder: str, device: torch.device) -> None:
    """Leave Gloo's process group for one of NCCL."""
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(ANOTHER_HOST, NCCL_HOSTID=f"host{rank}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=rank, world_size=RANKS, device_id=device)


def trained(rank: int, folder: str, kind: str, backend: str, compress: str | None) -> dict[str, Any]:
    """Train a compiled DataParallel beside an eager DDP until it has planned."""
    warnings.simplefilter("ignore")  # torch's own, in its compiler
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        join(rank, folder, device)
        torch.backends.cudnn.allow_tf32 = False
    nets: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(7)
        nets.append(ResNet((2, 2), 32, 10).to(device))
    begin = [parameter.detach().clone() for parameter in nets[0].parameters()]
    theirs, log = DistributedDataParallel(nets[0]), Log(name=backend)
    policy = SCENARIOS["keeps the plan"]
    ours = DataParallel(
        nets[1], planner=two_buckets, lanes=1, profile_steps=2, policy=policy, compress=compress, cache=False
    )
    called: Any = torch.compile(ours, backend=log)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (theirs, ours)]
    for step in steps(ours, 1):
        log.step = step
        x = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
        for model, optimizer in zip((theirs, called), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
    trace = ours.trace
    assert trace is not None
    answer = {
        "apart": furthest(theirs, ours),
        "moved": max(float((a - b).abs().max()) for a, b in zip(begin, theirs.parameters(), strict=True)),
        "compiled": log.compiled,
        "spread": sorted({tensor.ready_s / trace.backward_s for tensor in trace.tensors}),
        "explained": ours.explain(),
    }
    ours.close()
    if kind == "cuda":
        torch.cuda.synchronize()
        dist.destroy_process_group()
    return answer


def check(answers: list[dict[str, Any]], allowed: float) -> None:
    """As an eager DDP; gradients were ready part by part; one compilation after planning."""
    for answer in answers:
        explained = answer["explained"]
        print(explained, answer["apart"], answer["moved"], answer["spread"])
        assert answer["apart"] < allowed * answer["moved"], explained
        first = answer["compiled"].count(0)
        later = [step for step in answer["compiled"] if step]
        assert first > 2, "at first the graph is cut finely"
        assert len(set(later)) == 1, "once after planning"
        assert 1 < len(later) < first, "with fewer cuts"
        assert "where buckets end" in explained
        assert len(answer["spread"]) >= first, "gradients of one part are ready together"
        assert answer["spread"][0] < 0.6, "the first part is ready long before the last one"
