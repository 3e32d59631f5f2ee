"""Links inside a host by way of shared memory: the same results as the process group's own collectives."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.host_memory import FastHost, HostMemory, ReduceScatter
from torch import nn

import anabranch as ab
from anabranch.exchange.groups import default_group
from anabranch.fsdp.find_sharding import measure_links
from anabranch.values.network import ALL_GATHER, REDUCE_SCATTER
from fsdp.small_model import model_of, train, two_nodes
from ranks import on_ranks

CPU = torch.device("cpu")


def collectives(rank: int) -> list[bool]:
    group = default_group()
    memory, same = HostMemory(group, CPU), []
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
        memory.gather(whole, own)
        in_place = torch.zeros_like(expected)
        mine = in_place.chunk(group.size())[rank].copy_(own)
        memory.gather(in_place, mine)
        total = whole.float() * (rank + 1)
        reduced, average = torch.empty(numel), torch.empty(numel)
        memory.reduce_scatter(reduced, total, average=False)
        memory.reduce_scatter(average, total, average=True)
        ranks = group.size() * (group.size() + 1) / 2
        same += [torch.equal(whole, expected), torch.equal(in_place, expected)]
        torch.testing.assert_close(reduced, own.float() * ranks)
        torch.testing.assert_close(average, reduced / group.size())
    return same


def test_gathers_and_sums_are_those_of_the_process_group() -> None:
    for same in on_ranks(collectives, 3):
        assert len(same) == 10 and all(same)


def trained(rank: int) -> dict[str, Any]:
    mesh = two_nodes()
    host = FastHost(mesh.get_group(1), CPU)
    found: dict[str, Any] = {}
    for name in ("hsdp", "bf16", "int8"):
        models: list[nn.Module] = [model_of(mesh if name == "hsdp" else mesh["shard"]) for _ in range(2)]
        host.apply_to(models[1])
        replications = [ab.replicate(model, mesh, compress=name) for model in models if name != "hsdp"]
        found[name] = [train(model, range(5)) for model in models]
        for replication in replications:
            replication.close()
    inside = measure_links(mesh, CPU, 1 << 20, host.collectives()).inside
    return {**found, "measured": sorted(inside.curves), "positive": inside.seconds(ALL_GATHER, 1 << 20) > 0}


@pytest.mark.campaign
def test_a_model_trains_to_the_same_losses_and_links_can_be_measured() -> None:
    for found in on_ranks(trained, 4, timeout_s=100):
        for name in ("hsdp", "bf16", "int8"):
            stock, fast = found[name]
            assert stock == fast, name  # of two ranks that add there is one order
        assert found["measured"] == sorted(["dense", ALL_GATHER, REDUCE_SCATTER]) and found["positive"]


def test_an_operation_that_is_no_sum_is_named() -> None:
    class Two:
        def size(self) -> int:
            return 2

    reduce_scatter: Any = ReduceScatter(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected SUM or AVG"):
        reduce_scatter(torch.zeros(1), torch.zeros(2), Two(), dist.ReduceOp.MAX)
