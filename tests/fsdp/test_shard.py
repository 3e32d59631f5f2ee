"""ab.shard: FSDP2 in planned units has the losses and weights of a unit per block, and the order that is simulated."""

import re
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import anabranch as ab
from anabranch.fsdp.planning import Unit, save
from anabranch.fsdp.planning.sharded_step import REST, host_order, unit_label
from anabranch.fsdp.shard import no_groups_reason
from fsdp.small_model import (
    BLOCKS,
    HALF,
    WIDTH,
    Block,
    as_before_torch_2_13,
    groups_of,
    model_of,
    train,
    two_nodes,
    weights,
)
from ranks import on_ranks

STEPS = range(4)
NAMES = [str(index) for index in range(1, BLOCKS + 1)]  # the first layer is left to the root, as in model_of
PLANS = [
    ab.ShardingPlan.per_block(NAMES),
    ab.ShardingPlan.per_block(NAMES, reshard=False),
    ab.ShardingPlan.from_cuts(NAMES, []),
    ab.ShardingPlan.from_cuts(NAMES, [1], reshard=True, prefetch=2),
    ab.ShardingPlan((Unit(("1",), True), Unit(("2", "3"), False)), 3),
    ab.ShardingPlan((Unit(("1", "2"), False), Unit(("3",), True)), 2),
    ab.ShardingPlan.from_cuts(NAMES, [1, 2], reshard=True, prefetch=3),
]


def whole(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, WIDTH), *(Block() for _ in range(BLOCKS)))


def one_node() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def same(one: nn.Module, other: nn.Module) -> bool:
    stock = weights(other)
    return all(torch.equal(weight, stock[name]) for name, weight in weights(one).items())


Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two() -> Found:
    """What each of two ranks found, by scenario."""
    return on_ranks(on_two, 2, timeout_s=150)


@pytest.fixture(scope="module")
def four() -> Found:
    """What each of four ranks found, in two nodes."""
    return on_ranks(on_four, 4, timeout_s=120)


def on_two(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {one.__name__: one(rank) for one in (mixed_precision, layout, other_plans)}
    found["planned"] = planned_and_stock(rank, 1, False)
    found["order"] = [order(plan) for plan in PLANS]
    found["memory"] = [memory(plan) for plan in PLANS]
    found["older"] = on_an_older_torch(rank)
    return found


def on_four(rank: int) -> dict[str, Any]:
    planned = [planned_and_stock(rank, 2, replicated) for replicated in (False, True)]
    return {"planned": planned, "replicated": replicated_units(rank)}


def planned_and_stock(rank: int, nodes: int, replicated: bool) -> list[bool]:
    mesh = one_node() if nodes == 1 else two_nodes()
    stock = model_of(mesh)
    losses = train(stock, STEPS)
    found = []
    for plan in PLANS:
        ours = ab.shard(whole(), mesh["shard"] if replicated else mesh, plan)
        replication = ab.replicate(ours, mesh) if replicated else None
        found.append(train(ours, STEPS) == losses and same(ours, stock))
        if replication is not None:
            replication.close()
    return found


@pytest.mark.slow
def test_planned_units_are_stock_fsdp2_bit_by_bit(two: Found, four: Found) -> None:
    for equal in [*(one["planned"] for one in two), *(case for one in four for case in one["planned"])]:
        assert equal == [True] * len(PLANS)


def mixed_precision(rank: int) -> bool:
    plan = PLANS[1] if no_groups_reason({"mp_policy": HALF}) else PLANS[2]
    stock, ours = model_of(one_node(), policy=HALF), ab.shard(whole(), one_node(), plan, mp_policy=HALF)
    return train(ours, STEPS) == train(stock, STEPS) and same(ours, stock)


@pytest.mark.slow
def test_options_of_fully_shard_are_passed_on(two: Found) -> None:
    assert all(one["mixed_precision"] for one in two)


def on_an_older_torch(rank: int) -> str:
    """What a grouped unit is told; units of one block, and blocks that are given what they compute with, are not."""
    as_before_torch_2_13()  # from here on
    ab.shard(whole(), one_node(), PLANS[1], mp_policy=HALF)
    assert not no_groups_reason({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)})
    assert not no_groups_reason({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)})
    with pytest.raises(ab.PlanError) as caught:
        ab.shard(whole(), one_node(), PLANS[4], mp_policy=HALF)
    return str(caught.value)


@pytest.mark.slow
def test_an_older_torch_cannot_cast_for_grouped_units(two: Found) -> None:
    for said in (one["older"] for one in two):
        assert "a unit of the plan has 2 blocks, 2 to 3, and FSDP2 of torch" in said
        assert "casts to torch.bfloat16 only what the first block of a unit is given: give a plan" in said


def order(plan: ab.ShardingPlan) -> tuple[list[str], list[str], list[str], list[str]]:
    """Messages, and messages with computing, as they were and as simulated."""
    model = ab.shard(whole(), one_node(), plan)
    watch = ab.watch(model)
    train(model, range(3))
    spans = [span.name for span in watch.timeline().spans]
    labels = [*(unit_label(unit.names) for unit in plan.units), "the rest"]
    kinds = ("gather", "forward", "backward", "reduce")
    simulated = [
        f"{kind} {labels[unit]}"
        for kind, unit in host_order([unit.reshard for unit in plan.units], plan.prefetch)
        if kind in kinds and (kind, unit) != ("forward", REST)
    ]
    found = [name for name in spans if name.split()[0] in kinds]

    def messages(names: Sequence[str]) -> list[str]:
        return [name for name in names if name.split()[0] in ("gather", "reduce")]

    return messages(found), messages(simulated), found, simulated


@pytest.mark.slow
def test_fsdp2_does_what_the_simulator_says_in_that_order(two: Found) -> None:
    for plan, (messages, simulated_messages, every, every_simulated) in zip(PLANS, two[0]["order"], strict=True):
        assert messages == simulated_messages, plan
        if plan.prefetch > 1:  # else FSDP2 launches a gather when the device is asked for it: on CPUs, later
            assert every == every_simulated, plan


class Counted:
    """A collective of FSDP2's whose whole buffers are counted while they live."""

    def __init__(self, inner: Any, memory: "Memory", per_message: int) -> None:
        self.inner, self.memory, self.per_message, self.calls = inner, memory, per_message, 0

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer: torch.Tensor = self.inner.allocate(*args, **kwargs)
        if self.calls % self.per_message == 0:  # what a reduction allocates next is a shard
            self.memory.live[self, self.calls] = buffer.nbytes
            weakref.finalize(buffer.untyped_storage(), self.memory.live.pop, (self, self.calls))
        self.calls += 1
        self.memory.sample()
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Memory:
    """What FSDP2 holds besides shards: gathered parameters, whole gradients, buffers of messages."""

    def __init__(self, model: nn.Module, expected: int) -> None:
        self.live: dict[tuple[Counted, int], int] = {}
        self.peak, self.expected = 0, expected
        self.groups = groups_of(model)
        for group in self.groups:
            group._all_gather_comm = Counted(group._all_gather_comm, self, 1)
            group._reduce_scatter_comm = Counted(group._reduce_scatter_comm, self, 2)
        for module in model.modules():
            module.register_forward_pre_hook(self.begin)

    def begin(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        """In forward a unit has its parameters; when its input has a gradient, so have they."""
        self.sample()
        inputs[0].register_hook(lambda _: self.sample())

    def sample(self) -> None:
        """Gloo's thread may hold a buffer for a moment after its message: what is more than expected has to last.

        It has to last until the ranks' deadline, for no shorter time tells a buffer that is kept from a busy machine.
        """
        while (held := self.held()) > self.expected:
            time.sleep(0.001)
        self.peak = max(self.peak, held)

    def held(self) -> int:
        held = sum(self.live.values())
        for one in (param for group in self.groups for param in group.fsdp_params):
            held += sum(tensor.untyped_storage().nbytes() for tensor in one.all_gather_outputs)
            whole = getattr(one, "_unsharded_param", None)
            held += 0 if whole is None or whole.grad is None else whole.grad.nbytes
        return held


def memory(plan: ab.ShardingPlan) -> tuple[int, int]:
    """The most bytes at a time, as counted and as predicted."""
    widths = (16, 64, 16, 32, 8)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
    model = nn.Sequential(OrderedDict(zip([*NAMES, "rest"], layers, strict=True)))
    *sizes, rest = [layer.weight.nbytes for layer in layers]
    ab.shard(model, one_node(), plan)
    blocks = [ab.sharded.Block(name, size, size, 0.0, 0.0) for name, size in zip(NAMES, sizes, strict=True)]
    predicted = ab.sharded.peak_nbytes(ab.ShardedTrace(tuple(blocks), rest, rest), plan)
    counted = Memory(model, predicted)
    for _ in range(2):
        model(torch.randn(2, widths[0], requires_grad=True)).sum().backward()
    return counted.peak, predicted


@pytest.mark.slow
def test_fsdp2_needs_the_memory_that_is_predicted(two: Found) -> None:
    for plan, (counted, predicted) in zip(PLANS, two[0]["memory"], strict=True):
        assert counted == predicted, plan


def layout(rank: int) -> tuple[list[int], list[bool]]:
    model = ab.shard(whole(), one_node(), PLANS[4])
    train(model, range(1))
    groups = groups_of(model)
    return [len(group.modules) for group in groups], [group._reshard_after_forward for group in groups]


@pytest.mark.slow
def test_units_and_what_they_free_are_those_of_the_plan(two: Found) -> None:
    modules, freed = two[0]["layout"]
    assert (modules, freed) == ([1, 1, 2], [False, True, False])  # the root, then the units


def replicated_units(rank: int) -> str:
    mesh = two_nodes()
    model = ab.shard(whole(), mesh["shard"], PLANS[2])
    replication = ab.replicate(model, mesh)
    train(model, range(1))
    return replication.explain()


@pytest.mark.slow
def test_a_unit_of_several_modules_is_exchanged_once(four: Found) -> None:
    """All parameters once: 2 (n - 1) / n of their bytes between n = 2 nodes, half of them on each of two ranks."""
    text = four[0]["replicated"]
    assert "2 units between 2 nodes" in text
    sent, whole_nbytes = (float(word) for word in re.findall(r"([0-9.]+) MiB", text))
    assert sent == whole_nbytes


def from_file(rank: int, path: str) -> int:
    model = ab.shard(whole(), one_node(), path)
    return len(ab.watch(model).plan)


def test_a_plan_may_be_in_a_file(tmp_path: Path) -> None:
    save(PLANS[3], tmp_path / "plan.json")
    assert on_ranks(from_file, 2, str(tmp_path / "plan.json")) == [2, 2]


def other_plans(rank: int) -> str:
    try:
        ab.shard(whole(), one_node(), PLANS[rank])
    except ab.DisagreementError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_with_different_plans_are_told(two: Found) -> None:
    for error in (one["other_plans"] for one in two):
        assert "the sharding plan is not the same on all ranks: rank 0 has" in error


# -------------------------------------------------------------------------------------------------------- blocks


class Tied(nn.Module):
    """The head has the embedding's weight, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(10, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight


class Wrapped(nn.Module):
    """The lists are in a child, as in Transformers' models."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.transformer, self.head = inner, nn.Linear(2, 2)


class Residual(nn.Module):
    """A block with a list inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.downsample = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def test_blocks_are_the_members_of_lists() -> None:
    cases: list[tuple[nn.Module, list[str]]] = [
        (whole(), ["0", *NAMES]),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3))), ["0", "2.0"]),
        (Tied(), ["blocks.0", "blocks.1"]),
        (
            Wrapped(nn.Sequential(nn.Linear(9, 9), Residual(), Residual())),
            ["transformer.0", "transformer.1", "transformer.2"],
        ),
        (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), ["a", "b"]),
    ]
    for model, names in cases:
        assert ab.block_names(model) == names


def test_a_layer_that_is_used_twice_is_no_block() -> None:
    twice = nn.Linear(2, 2)
    assert ab.block_names(nn.Sequential(twice, nn.Linear(2, 2), nn.Sequential(twice))) == ["1"]


# ----------------------------------------------------------------------------------------------------- refusals


REFUSED: list[tuple[list[str], dict[str, Any], str]] = [
    (["blocks.7"], {}, "the plan names blocks.7, which this model does not have"),
    (["embedding", "head"], {}, "embedding.weight is in embedding and in head, which are two units"),
    (["head"], {}, "embedding.weight is in the unit of head, and embedding uses it outside"),
    (["norm"], {"reshard_after_forward": True}, "reshard_after_forward is for the plan to say"),
]


def refused(rank: int) -> list[str]:
    """By case; then a model that is sharded already, and another torch."""
    said = []

    def attempt(error: type[Exception], model: nn.Module, plan: ab.ShardingPlan | None, **options: Any) -> None:
        with pytest.raises(error) as caught:
            ab.shard(model, one_node(), plan, **options)
        said.append(str(caught.value))

    for names, options, _ in REFUSED:
        attempt(ValueError if options else ab.PlanError, Tied(), ab.ShardingPlan.per_block(names), **options)
    attempt(ValueError, ab.shard(whole(), one_node()), None)
    del FSDPModule.set_modules_to_forward_prefetch
    attempt(RuntimeError, Tied(), None)
    return said


def test_what_cannot_be_is_refused() -> None:
    (said,) = on_ranks(refused, 1)
    for text, words in zip(said, [
        *(words for *_, words in REFUSED),
        "the model is sharded already, and FSDP2 cannot change its units: give ab.shard() the whole",
        "FSDPModule has no set_modules_to_forward_prefetch",
    ], strict=True):  # fmt: skip
        assert words in text


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="Wrapped has no list of layers"):
        ab.block_names(Wrapped(nn.ReLU()))
