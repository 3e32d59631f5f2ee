"""A network as inductor's estimator of collectives, asked as inductor asks it."""

import pickle
import warnings
from typing import Any

import pytest
import torch
import torch._inductor.config as config
import torch.distributed as dist
from torch import fx
from torch._inductor.fx_passes import overlap_scheduling as scheduling
from torch._inductor.fx_passes.overlap_scheduling import estimate_collective_time
from torch.distributed import _functional_collectives as functional
from torch.fx.experimental.proxy_tensor import make_fx

from anabranch import Network
from anabranch.frameworks import inductor
from anabranch.frameworks.inductor import inductor_believes
from ranks import on_ranks

ELEMENTS = 1 << 10
NETWORK = Network.ring(8, 1e-4, 1e-8)


def collectives() -> dict[str, fx.Node]:
    """The functional collectives of a traced function, by name."""
    warnings.simplefilter("ignore")  # torch 2.13 has other names for these functions
    group: Any = dist.group.WORLD

    def function(x: torch.Tensor) -> Any:
        reduced = functional.all_reduce(x, "sum", group)
        part = functional.reduce_scatter_tensor(reduced, "sum", 0, group)
        return functional.all_gather_tensor(part, 0, group)

    graph = make_fx(function, tracing_mode="fake")(torch.randn(ELEMENTS)).graph
    return {node.target._opname: node for node in graph.nodes if "_c10d_functional" in str(node.target)}


def estimates(rank: int) -> dict[str, Any]:
    nodes = collectives()
    before = config.aten_distributed_optimizations.custom_runtime_estimation
    with inductor_believes(NETWORK):
        asked: Any = config.aten_distributed_optimizations.custom_runtime_estimation
        found = {
            name: estimate_collective_time(nodes[name], custom_runtime_estimation=asked)
            for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
        }
        half = estimate_collective_time(nodes["all_reduce"], ELEMENTS * 4, custom_runtime_estimation=asked)
        other = asked(nodes["wait_tensor"], None)
    restored = config.aten_distributed_optimizations.custom_runtime_estimation is before
    return {"found": found, "half": half, "other": other, "restored": restored}


def test_estimates_are_the_networks_at_the_groups_size() -> None:
    two = NETWORK.at(2)
    whole_ms = two.allreduce_s(ELEMENTS * 4) * 1e3
    for answer in on_ranks(estimates, 2):
        assert answer["found"]["all_reduce"] == pytest.approx(whole_ms)
        assert answer["found"]["reduce_scatter_tensor"] == pytest.approx(whole_ms / 2)
        assert answer["found"]["all_gather_into_tensor"] == pytest.approx(whole_ms / 2)
        assert answer["half"] == pytest.approx(two.allreduce_s(ELEMENTS * 2) * 1e3)
        assert answer["other"] is None
        assert answer["restored"]


def test_a_torch_that_asks_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_options", object)
    with pytest.raises(RuntimeError, match="has no custom_runtime_estimation; it is tested with"):
        inductor_believes(NETWORK).__enter__()


def test_a_torch_that_asks_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate_collective_time(node: fx.Node, estimator: Any) -> float:
        return float(estimator(node))

    monkeypatch.setattr(scheduling, "estimate_collective_time", estimate_collective_time)
    with pytest.raises(RuntimeError, match=r"overlap_scheduling.estimate_collective_time\(\) takes no override_size"):
        inductor_believes(NETWORK).__enter__()
    assert config.aten_distributed_optimizations.custom_runtime_estimation is None


def test_inductors_caches_know_the_network() -> None:
    """Inductor keeps what it compiled by its settings, as bytes: graphs scheduled for another network are not found."""

    def key(network: Network) -> bytes:
        with inductor_believes(network):
            return pickle.dumps(config.aten_distributed_optimizations.custom_runtime_estimation)

    assert key(NETWORK) == key(Network.ring(8, 1e-4, 1e-8)) != key(Network.ring(8, 1e-4, 2e-8))
