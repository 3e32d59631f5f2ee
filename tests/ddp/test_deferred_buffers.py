"""Buffers behind the gradients: when they are sent, installed, refused and thrown away."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch import DataParallel
from anabranch.ddp.deferred_buffers import DeferredBuffers
from anabranch.exchange.groups import clone_group
from anabranch.exchange.lanes import Lanes
from parallel.twins import WIDTH, batch, plain_train, ring, scatter
from ranks import cases_on_ranks, on_ranks

CPU = torch.device("cpu")


class Rig:
    """Some buffers of several dtypes, other values on every rank."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        self.buffers = [
            torch.full((3,), 1.0 + rank),
            torch.tensor(5 + rank),
            torch.full((2, 2), 7.0 + rank, dtype=torch.float64),
            torch.tensor([rank == 0, rank == 1]),
            torch.zeros(0),
            torch.full((5,), 2.0 + rank, dtype=torch.bfloat16),
            torch.arange(6.0).reshape(2, 3).t() + rank,  # not contiguous
        ]
        assert dist.group.WORLD is not None
        self.lanes = Lanes(dist.group.WORLD, CPU)
        self.lanes.grow(1)
        self.behind = DeferredBuffers(lambda: self.buffers)
        self.behind.control = clone_group(dist.group.WORLD, "gloo", "control")

    def send(self) -> None:
        self.behind.send(self.lanes[0])

    def values(self) -> list[Any]:
        return [buffer.tolist() for buffer in self.buffers]


def sent(rank: int) -> dict[str, Any]:
    rig = Rig()
    answer: dict[str, Any] = {"before anything": rig.behind.install()}
    own = rig.values()
    rig.send()
    rig.behind.drain()
    answer["untouched until installed"] = rig.values() == own
    versions = [buffer._version for buffer in rig.buffers]
    answer["installed"] = rig.behind.install()
    answer["values"] = rig.values()
    answer["versions kept"] = versions == [buffer._version for buffer in rig.buffers]
    answer["twice"] = rig.behind.install()
    rig.send()
    rig.behind.discard()
    answer["discarded"] = rig.behind.install()
    rig.lanes.close()
    return answer


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_0s_values_on_every_rank(world_size: int) -> None:
    answers = on_ranks(sent, world_size)
    for answer in answers:
        assert not answer["before anything"] and not answer["twice"] and not answer["discarded"]
        assert answer["untouched until installed"] and answer["installed"] and answer["versions kept"]
        assert answer["values"] == answers[0]["values"]
    assert answers[0]["values"][:2] == [[1.0] * 3, 5]


def changed(rank: int, what: str) -> dict[str, Any]:
    """Something happens to the buffers between sending and installing."""
    rig = Rig()
    rig.send()
    if what == "in place on rank 0" and rank == 0:
        rig.buffers[0].add_(1)
    if what == "in place on rank 1" and rank == 1:
        rig.buffers[0].add_(1)
    if what == "replaced on rank 0" and rank == 0:
        rig.buffers[2] = rig.buffers[2].clone()
    if what == "replaced on rank 1" and rank == 1:
        rig.buffers[2] = rig.buffers[2].clone()
    if what == "another shape":
        rig.buffers[0] = torch.zeros(4)
    if what == "another dtype":
        rig.buffers[0] = torch.zeros(3, dtype=torch.float64)
    if what == "one more":
        rig.buffers.append(torch.zeros(1))
    if what == "one less":
        del rig.buffers[0]
    installed = rig.behind.install()
    values = rig.values()
    rig.lanes.close()
    return {"installed": installed, "values": values}


def test_all_ranks_decide_alike() -> None:
    installed = {
        "nothing": True,
        "in place on rank 0": False,
        "in place on rank 1": True,
        "replaced on rank 0": False,
        "replaced on rank 1": True,
        "another shape": False,
        "another dtype": False,
        "one more": False,
        "one less": False,
    }
    for what, answers in cases_on_ranks({what: (changed, what) for what in installed}, 2).items():
        assert [answer["installed"] for answer in answers] == [installed[what]] * 2, what
        if installed[what]:
            assert answers[0]["values"] == answers[1]["values"], what


def none(rank: int) -> bool:
    rig = Rig()
    rig.buffers = []
    rig.send()
    answer = rig.behind.install()
    rig.lanes.close()
    return answer


def broadcasts(rank: int, doing: str) -> int:
    """How many of six planned steps had to broadcast buffers before the forward, as DDP does."""
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    plan = scatter({name: "" for name, _ in module.named_parameters()})
    model: Any = DataParallel(module, plan=plan, network=ring())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    count = 0
    real = model._sync_module_buffers

    def counted(authoritative_rank: int) -> None:
        nonlocal count
        count += 1
        real(authoritative_rank)

    for step in range(4):
        plain_train(model, optimizer, step)
    assert model.plan is not None
    model._sync_module_buffers = counted
    for step in range(6):
        if doing == "writing" and rank == 0:
            module[1].running_mean.mul_(0.5)  # type: ignore[operator]
        if doing == "evaluating":
            model.eval()
            with torch.no_grad():
                model(batch(step))
            model.train()
        plain_train(model, optimizer, step)
    model.close()
    return count


def test_nothing_is_broadcast_before_a_forward_unless_it_must_be() -> None:
    cases = {doing: (broadcasts, doing) for doing in ("training", "writing", "evaluating")}
    found = cases_on_ranks({**cases, "without buffers": (none,)}, 2)
    assert found == {"training": [0, 0], "writing": [6, 6], "evaluating": [0, 0], "without buffers": [False, False]}
