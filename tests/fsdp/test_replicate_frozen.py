"""ab.replicate: parameters that are frozen or unfrozen after it was called are averaged between nodes all the same."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import anabranch as ab
from fsdp.small_model import model_of, oktopk, same, train, two_nodes, weights
from ranks import on_ranks

WHOLE_UNIT: list[Any] = [None, "int8"]
IN_TURN: list[Any] = [oktopk(), "int4"]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What every rank found, by scenario."""
    return on_ranks(scenarios, 4, timeout_s=120)


def scenarios(rank: int) -> dict[str, Any]:
    return {
        "whole_unit_unfrozen": [whole_unit_unfrozen(rank, compress) for compress in WHOLE_UNIT],
        "trained_in_turn": [trained_in_turn(rank, compress) for compress in IN_TURN],
    }


def whole_unit_unfrozen(rank: int, compress: Any) -> list[Any]:
    """A unit is frozen when replicate() is called, and trained later, beside stock HSDP."""
    mesh = two_nodes()
    models = [model_of(mesh["shard"]), model_of(mesh)]
    for model in models:
        model[2].requires_grad_(False)
    replication = ab.replicate(models[0], mesh, compress=compress)
    for model in models:
        train(model, range(2))
        model[2].requires_grad_(True)
    said = replication.explain()
    for model in models:
        train(model, range(2, 5))
    near = all(
        torch.allclose(weight, weights(models[1])[name], atol=1e-3) for name, weight in weights(models[0]).items()
    )
    metrics = replication.metrics()
    sent, dense = metrics["sent_nbytes"], metrics["dense_nbytes"]
    return [same(weights(models[0]), weights(models[1])), near, said, replication.explain(), sent, dense]


def test_a_unit_that_was_frozen_as_a_whole_is_averaged_when_it_is_trained(found: list[dict[str, Any]]) -> None:
    for _, near, before, after, sent, dense in (case for one in found for case in one["whole_unit_unfrozen"]):
        assert near
        assert "3 units between 2 nodes" in before and "exactly" not in before
        assert "the unit 2 travelled exactly in the last step" in after and "parameters were unfrozen since" in after
        assert sent <= dense
    assert all(one["whole_unit_unfrozen"][WHOLE_UNIT.index(None)][0] for one in found), "bit by bit"


def trained_in_turn(rank: int, compress: Any) -> tuple[float, bool, str]:
    """Two parameters of one size in one unit: one is trained and then the other, whose gradient is zero."""
    mesh = two_nodes()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False))
    fully_shard(model, mesh=mesh["shard"])
    first, second = model.parameters()
    second.requires_grad_(False)
    replication = ab.replicate(model, mesh, compress=compress)
    train(model, range(6))
    waits = any(bool(residual.any()) for residual in replication.state_dict()["residuals"].values())
    first.requires_grad_(False)
    second.requires_grad_(True)
    (model(torch.ones(3, 7)) * 0).sum().backward()
    assert second.grad is not None
    return float(second.grad.to_local().abs().max()), waits, replication.explain()  # type: ignore[attr-defined]


def test_the_residual_of_a_parameter_is_not_given_to_another_of_its_size(found: list[dict[str, Any]]) -> None:
    for moved, waits, said in (case for one in found for case in one["trained_in_turn"]):
        assert moved == 0 and waits and "parameters were unfrozen since" in said
