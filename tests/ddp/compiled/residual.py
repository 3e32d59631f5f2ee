"""A compiled residual network beside eager and compiled DDPs, on Gloo or with two NCCL ranks that share one GPU."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch import Bucket, DataParallel, Network, OkTopk, Plan, Trace
from anabranch import planning as planners
from anabranch.values.kinds.names import kind_of
from ddp.compiled.models import Log, ResNet, furthest
from parallel.twins import SCENARIOS, steps

RANKS = 2
DENSITY = 0.25
REDUCE_OVERHEAD = "reduce-overhead"  # a mode of torch.compile, which records CUDA graphs
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


@contextmanager
def on_device(rank: int, folder: str, kind: str) -> Iterator[torch.device]:
    """This rank's device, with NCCL if it is a GPU."""
    warnings.simplefilter("ignore")  # torch's own, in its compiler
    if kind == "cpu":
        yield torch.device(kind)
        return
    device = torch.device(kind, 0)
    join(rank, folder, device)
    torch.backends.cudnn.allow_tf32 = False
    yield device
    torch.cuda.synchronize()
    dist.destroy_process_group()


def built(device: torch.device) -> nn.Module:
    """The network, the same each time."""
    torch.manual_seed(7)
    return ResNet((2, 2), 32, 10).to(device)


def train(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], rank: int, step: int) -> None:
    """One step of each, on this rank's inputs."""
    x = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad(set_to_none=True)
        model(x.to(next(model.parameters()).device)).square().mean().backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def trained(rank: int, folder: str, kind: str, backend: str, compress: str | None) -> dict[str, Any]:
    """Train a compiled DataParallel beside an eager and a compiled DDP until it has planned.

    backend   of torch.compile; or the mode "reduce-overhead"
    """
    with on_device(rank, folder, kind) as device:
        begin = built(device)
        theirs = DistributedDataParallel(built(device))
        # Compiled by a backend of its own, it has graphs of its own. Beside the other ways an eager one is enough.
        both = compress is None and backend != REDUCE_OVERHEAD
        stock = [DistributedDataParallel(built(device))] if both else []
        policy, log = SCENARIOS["keeps the plan"], Log(name=backend)
        ours = DataParallel(
            built(device), planner=two_buckets, lanes=1, profile_steps=2, policy=policy, compress=compress, cache=False
        )
        how: dict[str, Any] = {"mode": backend} if backend == REDUCE_OVERHEAD else {"backend": log}
        called: list[Any] = [theirs, torch.compile(ours, **how)]
        called += [torch.compile(model, backend=Log(name=backend)) for model in stock]
        optimizers = [sgd(model) for model in (theirs, ours, *stock)]
        for log.step in steps(ours, 1):
            train(called, optimizers, rank, log.step)
        trace = ours.trace
        assert trace is not None
        answer = {
            "apart": max(furthest(model, ours) for model in (theirs, *stock)),
            "moved": furthest(begin, theirs),
            "compiled": log.compiled,
            "ready": {tensor.name: tensor.ready_s for tensor in trace.tensors},
            "explained": ours.explain(),
        }
        ours.close()
    return answer


def sparse(rank: int, folder: str, kind: str, backend: str) -> dict[str, Any]:
    """Train with Ok-Topk and a given plan, compiled and eager, from the first step on."""
    with on_device(rank, folder, kind) as device:
        begin = built(device)
        names = [name for name, _ in begin.named_parameters()][::-1]
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        plan = planners.using(Plan(tuple(Bucket(tuple(half)) for half in halves)), kind_of(DENSITY))
        compress, log = OkTopk(density=DENSITY, warmup_steps=0), Log(name=backend)
        ours = [
            DataParallel(built(device), plan=plan, compress=compress, profile_steps=0, cache=False) for _ in range(2)
        ]
        called: list[Any] = [ours[0], torch.compile(ours[1], backend=log)]
        optimizers = [sgd(model) for model in ours]
        for log.step in range(8):
            train(called, optimizers, rank, log.step)
        answer = {
            "apart": furthest(*ours),
            "moved": furthest(begin, ours[0]),
            "compiled": log.compiled,
            "explained": ours[1].explain(),
        }
        for model in ours:
            model.close()
    return answer


def check(answers: list[dict[str, Any]], allowed: float) -> None:
    """As DDP; gradients were ready part by part; one compilation after planning."""
    for answer in answers:
        explained = answer["explained"]
        print(explained, answer["apart"], answer["moved"], answer["ready"])
        assert answer["apart"] < allowed * answer["moved"], explained
        first = answer["compiled"].count(0)
        later = [step for step in answer["compiled"] if step]
        assert first > 2, "at first the graph is cut finely"
        assert len(set(later)) == 1, "once after planning"
        assert 1 < len(later) < first, "with fewer cuts"
        assert "where buckets end" in explained
        ready = answer["ready"]
        assert len(set(ready.values())) >= first, "gradients of one part are ready together"
        head, stem = ([ready[name] for name in ready if name.startswith(part)] for part in ("head.", "stem."))
        assert head and stem and max(head) < min(stem), "they are ready part by part, in backward's order"


def check_reduce_overhead(answers: list[dict[str, Any]], allowed: float) -> None:
    """As an eager DDP; torch cuts, and explain() says so."""
    for answer in answers:
        print(answer["explained"], answer["apart"], answer["moved"])
        assert answer["apart"] < allowed * answer["moved"]
        assert "so torch cuts by bytes" in answer["explained"]


def check_sparse(answers: list[dict[str, Any]], allowed: float) -> None:
    """As an eager DataParallel with the same plan, for which graphs were compiled once."""
    for answer in answers:
        print(answer["explained"], answer["apart"], answer["moved"])
        assert answer["apart"] < allowed * answer["moved"]
        assert answer["compiled"] == [0, 0], "a part for each bucket"
