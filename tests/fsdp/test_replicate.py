"""ab.replicate: two nodes of two ranks, a model that FSDP2 shards inside each; between them every kind of exchange."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

import anabranch as ab
from anabranch.exchange.lanes import Lanes
from anabranch.fsdp import replicate
from anabranch.fsdp import torch_internals as internals
from fsdp.small_model import (
    batch_of,
    groups_of,
    model_of,
    oktopk,
    same,
    train,
    two_nodes,
    weights,
)
from ranks import on_ranks

pytestmark = pytest.mark.slow  # four ranks with eleven scenarios; test_replicate_steps and others are in --quick

STEPS = range(5)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What every rank found, by scenario: two nodes of two ranks, one launch."""
    return on_ranks(scenarios, 4, timeout_s=150)


def scenarios(rank: int) -> dict[str, Any]:
    plain = (
        dense_and_hsdp, accumulated_in_the_node, accumulated_and_clipped, divided_otherwise, half_precision,
        reduced_dtypes, frozen_and_unused, unfrozen_later, compressed, skipped_in_half_precision, lanes_of,
    )  # fmt: skip
    found: dict[str, Any] = {scenario.__name__: scenario(rank) for scenario in plain}
    found["conserved"] = [conserved(rank, compress) for compress in (oktopk(0.05), "int4")]
    found["not_finite"] = [
        not_finite(rank, compress, scaled) for compress in (oktopk(0.05), "int4") for scaled in (True, False)
    ]
    return found


def dense_and_hsdp(rank: int) -> bool:
    mesh = two_nodes()
    ours, stock = model_of(mesh["shard"], seed=mesh.get_local_rank(0)), model_of(mesh)  # other nodes start elsewhere
    replication = ab.replicate(ours, mesh)
    equal = train(ours, STEPS) == train(stock, STEPS)
    replication.close()
    return equal and same(weights(ours), weights(stock))


def test_dense_is_stock_hsdp_bit_by_bit(found: list[dict[str, Any]]) -> None:
    assert all(one["dense_and_hsdp"] for one in found)


def accumulated_in_the_node(rank: int) -> list[bool]:
    """Three batches a step, the first two reduced inside the node alone; ours, exact and by int8, beside stock HSDP."""
    mesh = two_nodes()
    models = [model_of(mesh["shard"]), model_of(mesh), model_of(mesh["shard"])]
    ab.replicate(models[0], mesh)
    ab.replicate(models[2], mesh, compress="int8")
    averaged: list[bool] = []

    def noted(hook: Any, buffer: torch.Tensor) -> None:
        hook(buffer)
        averaged.append(bool(buffer.any()))

    groups = groups_of(models[2])
    for group in groups:
        group._all_reduce_hook = partial(noted, group._all_reduce_hook)
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in STEPS:
            for part in range(3):
                model.set_requires_all_reduce(part == 2)  # type: ignore[operator]
                model(batch_of(3 * step + part)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    once = averaged == len(STEPS) * ([False] * 2 * len(groups) + [True] * len(groups))
    return [same(weights(models[0]), weights(models[1])), once]


def test_what_is_accumulated_in_a_node_is_sent_once(found: list[dict[str, Any]]) -> None:
    assert [one["accumulated_in_the_node"] for one in found] == [[True, True]] * 4


def accumulated_and_clipped(rank: int) -> bool:
    """Two batches a step, the first without any reduction, and gradients clipped by their norm over all ranks."""
    mesh = two_nodes()
    models = [model_of(mesh["shard"]), model_of(mesh)]
    ab.replicate(models[0], mesh)
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in STEPS:
            for half in range(2):
                model.set_requires_gradient_sync(half == 1)  # type: ignore[operator]
                model(batch_of(2 * step + half)).square().mean().backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return same(weights(models[0]), weights(models[1]))


def test_accumulation_and_clipping_are_those_of_hsdp(found: list[dict[str, Any]]) -> None:
    assert all(one["accumulated_and_clipped"] for one in found)


def divided_otherwise(rank: int) -> list[bool]:
    """Gradients divided by a number of the user's, such as 1 for sums, beside stock HSDP; the last by int8, roughly."""
    mesh = two_nodes()
    found = []
    for factor, compress in ((1.0, None), (4.0, None), (6.0, None), (1.0, "int8")):
        models: list[Any] = [model_of(mesh["shard"]), model_of(mesh)]
        ab.replicate(models[0], mesh, compress=compress)
        for model in models:
            for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
                unit.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply in a message
                unit.set_gradient_divide_factor(factor)
            model(batch_of(0)).square().mean().backward()
        ours, stock = ([p.grad.to_local() for p in model.parameters()] for model in models)
        near = 1e-6 if compress is None else 0.05
        found.append(all((a - b).norm() <= near * b.norm() for a, b in zip(ours, stock, strict=True)))
    return found


def test_gradients_are_divided_as_under_hsdp(found: list[dict[str, Any]]) -> None:
    assert [one["divided_otherwise"] for one in found] == [[True] * 4] * 4


KINDS: list[tuple[Any, float]] = [("bf16", 1e-2), ("int8", 2e-2), ("int4", 0.2), (oktopk(), 0.5)]


def compressed(rank: int) -> list[dict[str, Any]]:
    """Every kind beside HSDP: losses, and whether nodes have the same weights."""
    mesh = two_nodes()
    found = []
    for compress, _ in [(None, 0.0), *KINDS]:
        model = model_of(mesh["shard"])
        replication = ab.replicate(model, mesh, compress=compress)
        losses = train(model, range(30))
        mine = torch.cat([weight.flatten() for weight in weights(model).values()])
        others = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(others, mine, group=mesh.get_group(0))
        found.append({
            "losses": losses, "same": all(torch.equal(other, mine) for other in others), "text": replication.explain(),
            "weights": mine, "metrics": replication.metrics(),
        })  # fmt: skip
        replication.close()
    return found


def test_every_kind_trains_and_nodes_keep_the_same_weights(found: list[dict[str, Any]]) -> None:
    for dense, *others in (one["compressed"] for one in found):
        for (compress, near), by_kind in zip(KINDS, others, strict=True):
            assert by_kind["same"], compress
            moved = (by_kind["weights"] - dense["weights"]).norm() / dense["weights"].norm()
            assert 0 < moved < near, (compress, moved)
            assert sum(by_kind["losses"][-5:]) < 0.8 * sum(by_kind["losses"][:5]), compress
        sent = [float(by_kind["text"].split("sends ")[1].split(" MiB")[0]) for by_kind in (dense, *others)]
        assert all(0 < less < sent[0] for less in sent[1:]), sent
        assert dense["metrics"]["sent_nbytes"] == dense["metrics"]["dense_nbytes"]
        assert sent == [round(by_kind["metrics"]["sent_nbytes"] / 2**20, 3) for by_kind in (dense, *others)]


def conserved(rank: int, compress: Any) -> list[float]:
    """What was applied, and what waits on all nodes, beside the sum of the gradients of all ranks."""
    mesh = two_nodes()
    model, stock = model_of(mesh["shard"]), model_of(mesh)
    replication = ab.replicate(model, mesh, compress=compress)
    applied = {name: torch.zeros_like(weight) for name, weight in weights(model).items()}
    whole = {name: torch.zeros_like(weight) for name, weight in applied.items()}
    for step in range(20):
        for one, total in ((model, applied), (stock, whole)):
            one(batch_of(step)).square().mean().backward()
            for name, parameter in one.named_parameters():
                assert parameter.grad is not None
                total[name] += parameter.grad.to_local()  # type: ignore[attr-defined]
                parameter.grad = None
    residuals = replication.state_dict()["residuals"]
    off = []
    for name, expected in whole.items():
        waiting = residuals.get(name, torch.zeros(expected.numel()))[: expected.numel()].clone()
        dist.all_reduce(waiting, group=mesh.get_group(0))
        off.append(float((applied[name].flatten() + waiting / 2 - expected.flatten()).abs().max()))
    assert residuals and any(residual.any() for residual in residuals.values())
    return off


def test_nothing_is_lost_between_nodes(found: list[dict[str, Any]]) -> None:
    assert max(off for one in found for by_kind in one["conserved"] for off in by_kind) < 1e-5


def not_finite(rank: int, compress: Any, scaled: bool) -> dict[str, Any]:
    """A step with a NaN on one rank between others: what waits behind it, and whether this rank's gradients have it."""
    mesh = two_nodes()
    model = model_of(mesh["shard"])
    replication = ab.replicate(model, mesh, compress=compress)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    if scaled:
        replication.follow(scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: dict[str, Any] = {}
    for step in range(4):
        inputs = batch_of(step)
        if step == 2 and rank == 3:
            inputs[0, 0] = float("nan")
        before = {name: piece.clone() for name, piece in replication.state_dict()["residuals"].items()}
        scaler.scale(model(inputs).square().mean()).backward()
        if step == 2:
            found["waits"] = any(bool(piece.any()) for piece in before.values())
            found["kept"] = same(replication.state_dict()["residuals"], before)
            found["reached"] = all(not bool(p.grad.to_local().isfinite().all()) for p in model.parameters())  # type: ignore[union-attr]
        if scaled or step < 2:  # else the weights would be no numbers
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    found["finite"] = all(bool(weight.isfinite().all()) for weight in weights(model).values())
    found["scale"] = scaler.get_scale()
    state = replication.state_dict()["residuals"]
    found["goes on"] = not same(state, before) and all(bool(piece.isfinite().all()) for piece in state.values())
    return found


def test_a_nan_on_one_rank_reaches_all_and_no_residual_is_lost(found: list[dict[str, Any]]) -> None:
    expected = {"waits": True, "kept": True, "reached": True, "finite": True, "goes on": True}
    for one in found:
        assert one["not_finite"] == [{**expected, "scale": scale} for scale in (2.0, 1.0, 2.0, 1.0)]


def half_precision(rank: int) -> bool:
    mesh = two_nodes()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours, stock = model_of(mesh["shard"], policy=policy), model_of(mesh, policy=policy)
    ab.replicate(ours, mesh)
    train(ours, STEPS), train(stock, STEPS)
    return same(weights(ours), weights(stock))


def test_mixed_precision_is_that_of_hsdp(found: list[dict[str, Any]]) -> None:
    assert all(one["half_precision"] for one in found)


def reduced_dtypes(rank: int) -> list[list[torch.dtype]]:
    """By policy, the dtypes of gradients as they are known before a step, and as FSDP2 then has them in its buffers."""
    mesh = two_nodes()
    found = []
    for policy in (
        None,
        *(MixedPrecisionPolicy(torch.bfloat16, dtype) for dtype in (None, torch.bfloat16, torch.float)),
    ):
        model, buffers = model_of(mesh["shard"], policy=policy), set[torch.dtype]()
        for group in groups_of(model):
            group._all_reduce_hook = lambda buffer, buffers=buffers: buffers.add(buffer.dtype)
        known = {internals.gradient_dtype(one) for group in groups_of(model) for one in group.fsdp_params}
        train(model, range(1))
        found.append([*known, *buffers])
    return found


def test_the_dtype_of_gradients_is_known_before_a_step(found: list[dict[str, Any]]) -> None:
    assert all(known == buffer for one in found for known, buffer in one["reduced_dtypes"])


class PartlyUsed(nn.Module):
    """Three blocks, of which it uses two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.blocks[1](self.blocks[0](x)))


def frozen_and_unused(rank: int) -> bool:
    """A frozen block, and one that no loss depends on, whose unit FSDP2 leaves out."""
    mesh = two_nodes()
    results = []
    for hsdp in (False, True):
        torch.manual_seed(0)
        model = PartlyUsed()
        model.blocks[0].requires_grad_(False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh if hsdp else mesh["shard"])
        fully_shard(model, mesh=mesh if hsdp else mesh["shard"])
        if not hsdp:
            ab.replicate(model, mesh, compress=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in STEPS:
            model(batch_of(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
    return same(*results)


def test_frozen_and_unused_parts_are_left_alone(found: list[dict[str, Any]]) -> None:
    assert all(one["frozen_and_unused"] for one in found)


def unfrozen_later(rank: int) -> list[Any]:
    """What is said and counted where a parameter was frozen, and is not, and then where all were known."""
    mesh = two_nodes()
    found: list[Any] = []
    for late in (True, False):
        model = model_of(mesh["shard"])
        model.get_parameter("1.up.weight").requires_grad_(not late)
        replication = ab.replicate(model, mesh, compress="int8")
        model.get_parameter("1.up.weight").requires_grad_(True)
        train(model, range(1))
        found += [replication.explain(), replication.metrics()]
    return found


def test_a_unit_whose_parameters_were_unfrozen_later_is_named(found: list[dict[str, Any]]) -> None:
    for said, counted, usual, whole in (one["unfrozen_later"] for one in found):
        assert "the unit 1 travelled exactly in the last step, 663 elements for the 351 that were" in said
        assert "parameters were unfrozen since, or frozen: close() this Replication" in said and "exactly" not in usual
        assert 0 < whole["sent_nbytes"] < counted["sent_nbytes"] < whole["dense_nbytes"]


class OneNan(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")


class Poisoned(nn.Module):
    """Two units; the gradient of the first is not finite if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.poison = nn.Linear(16, 64), nn.Linear(64, 64), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.as_tensor(self.second(OneNan.apply(x) if self.poison else x))  # type: ignore[no-untyped-call]


def skipped_in_half_precision(rank: int) -> float:
    """A step that a scaler skips, in one node of four ranks, where FSDP2 divides float16 averages once more, in place.

    How far the residual of the unit that was finite is from its gradient, all of which must be put back.
    """
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    gradients = []
    for compress in (None, oktopk(0.05)):
        torch.manual_seed(0)
        model = Poisoned()
        for unit in (model.first, model.second, model):
            fully_shard(unit, mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))
        model.poison = compress is not None
        replication = ab.replicate(model, mesh, compress=compress)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        replication.follow(scaler)
        torch.manual_seed(rank)
        scaler.scale(model(torch.randn(8, 16)).square().mean()).backward()
        if compress is None:
            gradients = [model.second.weight.grad.to_local().flatten()]  # type: ignore[union-attr]
    # Before the last division by two, which an average of FSDP2's has behind it.
    expected, found = 2 * gradients[0].float(), replication.state_dict()["residuals"]["second.weight"]
    return float((found[: expected.numel()] - expected).norm() / expected.norm())


def test_a_skipped_step_in_half_precision_puts_back_what_was_sent(found: list[dict[str, Any]]) -> None:
    assert max(one["skipped_in_half_precision"] for one in found) < 1e-3


def lanes_of(rank: int) -> list[Any]:
    """What the lanes of a replication are given: how many multiprocessors, and which ranks make groups together."""
    given: list[Any] = []

    class Recorded(Lanes):
        def __init__(self, group: Any, device: Any, max_ctas: Any, siblings: Any, own_streams: bool) -> None:
            given.append([max_ctas, siblings, own_streams])
            super().__init__(group, device, max_ctas, siblings, own_streams)

    replicate.Lanes = Recorded  # type: ignore[assignment, attr-defined]
    mesh = two_nodes()
    for compress in (None, "bf16", "int8", oktopk()):
        ab.replicate(model_of(mesh["shard"]), mesh, compress=compress).close()
    replicate.Lanes = Lanes  # type: ignore[attr-defined]
    return given


def test_compressed_messages_between_nodes_take_few_multiprocessors(found: list[dict[str, Any]]) -> None:
    lines = [[0, 2], [1, 3]]
    assert [one["lanes_of"] for one in found] == [[[ctas, lines, False] for ctas in (None, 2, 1, 1)]] * 4
