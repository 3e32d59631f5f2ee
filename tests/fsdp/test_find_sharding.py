"""ab.find_sharding: recorded, planned and tried on live ranks; never units that are slower than one per block."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import anabranch as ab
from anabranch.fsdp import find_sharding as sharding_trial
from anabranch.fsdp.planning import Block, Links, ShardedTrace, step_s
from fsdp.small_model import HALF, as_before_torch_2_13, two_nodes
from ranks import on_ranks

WIDTH = 64


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def step(model: nn.Module) -> None:
    model(torch.randn(4, WIDTH)).square().mean().backward()


def costly_messages(
    mesh: DeviceMesh, device: torch.device, largest_nbytes: int = 0, inside_collectives: object = None
) -> Links:
    """As measured, were the machine idle."""
    network = ab.Network.linear(2, 1e-3, 1e-10)
    return Links(network, network if mesh.ndim == 2 else None, overlaps=False)


Found = list[dict[str, Any]]
BOUND_NBYTES = 6 * 4 * (WIDTH * WIDTH + WIDTH)  # six layers' parameters: too little to keep all of them


@pytest.fixture(scope="module")
def two() -> Found:
    """What each of two ranks found, by scenario."""
    return on_ranks(on_two, 2, timeout_s=150)


@pytest.fixture(scope="module")
def four() -> Found:
    """What each of four ranks found, in two nodes."""
    return on_ranks(on_four, 4, timeout_s=150)


def on_two(rank: int) -> dict[str, Any]:
    sharding_trial.measure_links = costly_messages
    found: dict[str, Any] = {"merged": [trial(1, None, None)], "bound": trial(1, None, BOUND_NBYTES)}
    return {**found, "one_dimension": one_dimension(rank), "no_gain": no_gain(rank), "ungrouped": ungrouped(rank)}


def on_four(rank: int) -> dict[str, Any]:
    measured = links(rank)
    sharding_trial.measure_links = costly_messages
    return {"links": measured, "merged": [trial(2, compress, None) for compress in (None, "int8")]}


def trial(nodes: int, compress: Any, memory_nbytes: int | None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if nodes == 1 else two_nodes()
    found = ab.find_sharding(build, mesh, step, compress=compress, memory_nbytes=memory_nbytes, rounds=3)
    ab.shard(build(), mesh, found.plan)
    return {
        "plan": str(found.plan), "units": len(found.fastest), "kept": not any(u.reshard for u in found.fastest.units),
        "peak": ab.sharded.peak_nbytes(found.trace, found.fastest), "kind": found.links.kind, "text": found.explain(),
        "planned": found.plan == found.fastest,
    }  # fmt: skip


@pytest.mark.slow
def test_small_blocks_are_merged_and_kept(two: Found, four: Found) -> None:
    """On CPUs every message is waited for, so that fewer are faster."""
    for ranks, number, kind in ((two, 0, "dense"), (four, 0, "dense"), (four, 1, "int8")):
        assert len({rank["merged"][number]["plan"] for rank in ranks}) == 1  # the same on every rank
        one = ranks[0]["merged"][number]
        assert one["units"] < 6 and one["kept"] and one["kind"] == kind
        assert one["planned"] == (len(one["text"].split("The planned units are used.")) == 2)
        assert "ms simulated" in one["text"] and "measured" in one["text"]


@pytest.mark.slow
def test_a_bound_on_memory_is_kept(two: Found) -> None:
    found = two[0]["bound"]
    assert found["peak"] <= BOUND_NBYTES and not found["kept"]


def ungrouped(rank: int) -> tuple[list[int], bool, str]:
    """Blocks by unit, whether all are kept, and what is said, where FSDP2 cannot cast for grouped units."""
    as_before_torch_2_13()  # from here on
    found = ab.find_sharding(build, init_device_mesh("cpu", (2,)), step, rounds=1, mp_policy=HALF)
    units = found.fastest.units
    return [len(unit.names) for unit in units], not any(unit.reshard for unit in units), found.explain()


@pytest.mark.slow
def test_an_older_torch_gets_units_of_one_block_under_mixed_precision(two: Found) -> None:
    for sizes, kept, said in (one["ungrouped"] for one in two):
        assert sizes == [1] * 6 and kept
        assert "Units have one block each: FSDP2 of torch" in said and "only what the first block" in said


def no_gain(rank: int) -> dict[str, Any]:
    """A plan that loses its trial, and one that promises nothing."""
    mesh = init_device_mesh("cpu", (2,))
    seconds = iter(range(100))
    # Ours takes 2 s, stock 1 s.
    usual = sharding_trial._Trial.timed, sharding_trial.WORTH
    sharding_trial._Trial.timed = lambda *_: 1.0 + next(seconds) % 2  # type: ignore[method-assign]
    lost = ab.find_sharding(build, mesh, step, rounds=3)
    sharding_trial.WORTH = 0.0
    untried = ab.find_sharding(build, mesh, step)
    sharding_trial._Trial.timed, sharding_trial.WORTH = usual  # type: ignore[method-assign]
    return {
        "lost": lost.plan == lost.default != lost.fastest, "why": lost.explain(),
        "untried": untried.plan == untried.default and untried.fastest_s is None, "why not": untried.explain(),
    }  # fmt: skip


@pytest.mark.slow
def test_a_plan_that_does_not_gain_is_not_used(two: Found) -> None:
    found = two[0]["no_gain"]
    assert found["lost"] and "did not gain 1 % here" in found["why"]
    assert found["untried"] and "no plan is predicted to gain 1 %" in found["why not"]


def test_predictions_follow_what_a_unit_per_block_took() -> None:
    names = [f"layers.{number}" for number in range(3)]
    trace = ShardedTrace(tuple(Block(name, 1 << 20, 1 << 20, 1e-3, 2e-3) for name in names))
    links = Links(ab.Network.linear(2, 1e-4, 1e-9))
    default, planned = ab.ShardingPlan.per_block(names), ab.ShardingPlan.from_cuts(names, [])
    simulated_s = {plan: step_s(trace, plan, links) for plan in (default, planned)}
    untried = ab.FoundSharding(default, default, planned, trace, links)
    assert [untried.predicted_s(plan) for plan in simulated_s] == list(simulated_s.values())
    tried = replace(untried, default_s=1.2 * simulated_s[default], fastest_s=1.0)
    assert tried.predicted_s(default) == pytest.approx(tried.default_s)
    assert tried.predicted_s(planned) == pytest.approx(1.2 * simulated_s[planned])


def one_dimension(rank: int) -> str:
    try:
        ab.find_sharding(build, init_device_mesh("cpu", (2,)), step, compress="int8")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_compression_needs_nodes(two: Found) -> None:
    words = "mesh has 1 dimension, and compress is 'int8': between nodes, mesh must have two"
    assert words in two[0]["one_dimension"]


def links(rank: int) -> list[Any]:
    sharding_trial.MEASURING_S = 0.2
    found = sharding_trial.measure_links(two_nodes(), torch.device("cpu"), 1 << 20)
    assert found.between is not None
    networks = (found.inside, found.between)
    return [[n.world_size, sorted(n.curves), n.allreduce_s(1 << 20)] for n in networks] + [found.overlaps]


@pytest.mark.slow
def test_networks_are_measured_and_the_same_on_all_ranks(four: Found) -> None:
    found = [one["links"] for one in four]
    assert all(one == found[0] for one in found)
    inside, between, overlaps = found[0]
    assert inside[:2] == [2, ["all_gather", "dense", "reduce_scatter"]] and between[:2] == [2, ["dense"]]
    assert inside[2] > 0 and not overlaps
