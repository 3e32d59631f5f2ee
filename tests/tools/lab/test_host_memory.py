"""Links inside a host by way of shared memory: the same results as the process group's own collectives."""

import os
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import anabranch as ab
from anabranch.exchange.groups import default_group
from anabranch.exchange.interface import all_gather
from anabranch.fsdp.find_sharding import measure_links
from anabranch.observe.measure import drive, reduce_scatter
from anabranch.tools.lab.inside import host_memory, install
from anabranch.tools.lab.inside.host_memory import HostMemory
from anabranch.values.network import ALL_GATHER
from fsdp.small_model import model_of, train, two_nodes
from ranks import on_ranks

CPU = torch.device("cpu")


def collectives(rank: int) -> list[bool]:
    group = default_group()
    memory, same = HostMemory(), []
    for dtype, numel in (
        (torch.bfloat16, 3),
        (torch.int64, 1),
        (torch.float32, 5),
        (torch.bfloat16, 7),
        (torch.float32, 4099),
    ):
        torch.manual_seed(rank)
        own = (100 * torch.randn(numel)).to(dtype)
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own)
        expected = torch.cat(parts)
        whole = torch.empty_like(expected)
        memory.all_gather(whole, own, group)
        in_place = torch.zeros_like(expected)
        mine = in_place.chunk(group.size())[rank].copy_(own)
        memory.all_gather(in_place, mine, group)
        total = whole.float() * (rank + 1)
        reduced, average = torch.empty(numel), torch.empty(numel)
        memory.reduce_scatter(reduced, total, group)
        memory.reduce_scatter(average, total, group, average=True)
        ranks = group.size() * (group.size() + 1) / 2
        given = (whole * (rank + 1)).view(group.size(), numel)
        sent, received = torch.empty_like(given), torch.empty_like(given)
        dist.all_to_all_single(sent, given)
        memory.all_to_all(received, given, group)
        same += [torch.equal(whole, expected), torch.equal(in_place, expected), torch.equal(received, sent)]
        torch.testing.assert_close(reduced, own.float() * ranks)
        torch.testing.assert_close(average, reduced / group.size())
    return same


def test_gathers_sums_and_parts_are_those_of_the_process_group() -> None:
    for same in on_ranks(collectives, 3):
        assert len(same) == 15 and all(same)


def use_memory() -> list[str]:
    """As the lab does in ranks on two to a host; returns the collectives that will have run as copies."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    install.install(distributed_c10d)
    copied: list[str] = []
    for kind in install.METHODS:
        real = getattr(HostMemory, kind)

        def noted(*arguments: Any, real: Any = real, kind: str = kind, **options: Any) -> None:
            copied.append(kind)
            real(*arguments, **options)

        setattr(HostMemory, kind, noted)
    return copied


def by_group(rank: int) -> dict[str, Any]:
    """What each group's collectives give, and which of them were copies in memory."""
    copied = use_memory()
    lines = [[0, 1], [2, 3], [0, 2], [1, 3]]
    groups = [dist.new_group(ranks) for ranks in lines]
    found: dict[str, Any] = {}
    for ranks, group in [([0, 1, 2, 3], default_group()), *zip(lines, groups, strict=True)]:
        if rank not in ranks:
            continue
        copied.clear()
        place, size = ranks.index(rank), len(ranks)
        given = torch.arange(3.0 * size) + 100 * rank
        received, gathered, total = torch.empty(3 * size), torch.empty(3 * size), given.clone()
        work = dist.all_to_all_single(received, given, group=group, async_op=True)
        assert work is not None and work.wait() and work.is_completed()
        all_gather(gathered, given[:3], group, async_op=False)
        drive(reduce_scatter(total, group, 1.0))
        lengths = [place + 1] * size  # uneven parts pass the group's own collective
        uneven = torch.empty(sum(range(1, size + 1)))
        dist.all_to_all_single(
            uneven, torch.full((sum(lengths),), float(rank)), list(range(1, size + 1)), lengths, group=group
        )
        parts = [torch.arange(3.0) + 100 * other for other in ranks]
        expected = torch.cat([part + 3 * place for part in parts])
        found[str(ranks)] = {
            "right": torch.equal(received, expected)
            and torch.equal(gathered, torch.cat(parts))
            and torch.equal(total.chunk(size)[place], torch.stack(parts).sum(0) + 3 * place * size),
            "uneven": [float(one) for one in uneven] == [float(ranks[i]) for i in range(size) for _ in range(i + 1)],
            "copied": list(copied),
        }
    return found


def test_a_group_whose_ranks_are_on_one_host_copies_and_no_other_does() -> None:
    for rank, found in enumerate(on_ranks(by_group, 4)):
        assert len(found) == 3
        for ranks, result in found.items():
            assert result["right"] and result["uneven"]
            on_one_host = ranks in ("[0, 1]", "[2, 3]")
            assert result["copied"] == (["all_to_all", "all_gather", "reduce_scatter"] if on_one_host else []), rank


def trained(rank: int) -> dict[str, Any]:
    mesh = two_nodes()
    copied = use_memory()
    found = dict[str, Any]()
    for name in ("hsdp", "bf16", "int8"):
        for by_memory in (False, True):
            model: nn.Module = model_of(mesh if name == "hsdp" else mesh["shard"])
            replication = None if name == "hsdp" else ab.replicate(model, mesh, compress=name)
            copied.clear()
            with nullcontext() if by_memory else patch.object(host_memory, "is_on_one_host", return_value=False):
                found.setdefault(name, []).append(train(model, range(5)))
            assert bool(copied) == by_memory
            if replication is not None:
                replication.close()
    links = measure_links(mesh, CPU, 1 << 20).inside
    return {**found, "positive": links.seconds(ALL_GATHER, 1 << 20) > 0}


@pytest.mark.campaign
def test_a_model_trains_to_the_same_losses_and_links_can_be_measured() -> None:
    for found in on_ranks(trained, 4, timeout_s=100):
        for name in ("hsdp", "bf16", "int8"):
            stock, fast = found[name]
            assert stock == fast, name  # of two ranks that add there is one order
        assert found["positive"]


def test_operations_that_are_no_sums_pass_the_group_s_own_collective() -> None:
    options: Any = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group: Any = None  # which is not asked
    assert host_memory.run("reduce_scatter", group, (torch.zeros(1), torch.zeros(2), options)) is None
