"""ab.replicate: what cannot work, in a model, a mesh, a torch or a backward, is refused with a sentence."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import anabranch as ab
from fsdp.small_model import batch_of, model_of, oktopk, train, two_nodes
from ranks import on_ranks


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What every rank found, by scenario."""
    return on_ranks(scenarios, 4)


def scenarios(rank: int) -> dict[str, Any]:
    return {"refusals": refusals(rank), "broken_off": [broken_off(rank, block) for block in (1, 3)]}


def finalized_by_hand(rank: int) -> str:
    mesh = two_nodes()
    model: Any = model_of(mesh["shard"])
    ab.replicate(model, mesh, compress="int8")
    model.set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError) as caught:
        train(model, range(1))
    return str(caught.value)


@pytest.mark.skipif(not hasattr(FSDPModule, "finalize_backward"), reason="newer torch has it")
def test_a_backward_that_ends_by_hand_is_refused() -> None:
    for said in on_ranks(finalized_by_hand, 2):
        assert "set_manual_backward_finalization(True) and ab.replicate() do not work together" in said


def broken_off(rank: int, block: int) -> tuple[str, int]:
    """What forward says after a backward that an error has ended before this block, and the steps that were counted.

    Before the last block nothing was sent yet; before the first, all others are.
    """
    mesh = two_nodes()
    model = model_of(mesh["shard"])
    replication = ab.replicate(model, mesh, compress=oktopk())
    train(model, range(2))

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("a bug in backward")

    def trouble(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = model[block].register_forward_hook(trouble)
    with pytest.raises(ArithmeticError):
        train(model, [2])
    handle.remove()
    with torch.no_grad():
        model(batch_of(3))
    with pytest.raises(RuntimeError) as caught:
        train(model, [3])
    replication.close()
    return str(caught.value), replication.state_dict()["steps_trained"]


def test_no_step_follows_a_backward_that_was_broken_off(found: list[dict[str, Any]]) -> None:
    for said, steps in (case for one in found for case in one["broken_off"]):
        assert "was broken off by an error" in said and "load the last checkpoint" in said and steps == 2


def refusals(rank: int) -> list[str]:
    mesh = two_nodes()
    loose = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    fully_shard(loose[0], mesh=mesh["shard"])
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    watched, twice = model_of(mesh["shard"]), model_of(mesh["shard"])
    first = [ab.replicate(model, mesh) for model in (watched, twice)]
    ab.watch(watched)
    frozen = model_of(mesh["shard"]).requires_grad_(False)
    wide = model_of(mesh["shard"])
    wide[0].weight.grad_dtype = torch.float64
    with torch.device("meta"):
        without_values = model_of(mesh["shard"])
    attempts: list[tuple[nn.Module, Any, Any]] = [
        (watched, mesh, None),
        (twice, mesh, None),
        (nn.Linear(7, 7), mesh, None),
        (frozen, mesh, None),
        (model_of(mesh), mesh, None),
        (loose, mesh, None),
        (model_of(mesh["shard"]), flat, None),
        (model_of(mesh["replicate"]), mesh, None),
        (model_of(mesh["shard"]), mesh, "auto"),
        (model_of(mesh["shard"]), mesh, "int9"),
        (wide, mesh, None),
        (without_values, mesh, None),
        (model_of(mesh["shard"]), mesh, "int8" if rank < 2 else "int4"),
    ]
    said = []
    for model, given, compress in attempts:
        with pytest.raises((ValueError, ab.DisagreementError)) as caught:
            ab.replicate(model, given, compress=compress)
        said.append(str(caught.value))
    first[1].close()
    ab.replicate(twice, mesh)
    return said


def test_what_cannot_work_is_refused_with_a_sentence(found: list[dict[str, Any]]) -> None:
    expected = [
        "has an all-reduce hook already: close() the Replication or the Watch",
        "has an all-reduce hook already: close() the Replication or the Watch",
        "has no unit that is trained: call fully_shard",
        "none of the 20 parameters of the model is trained, so that nothing would be sent between nodes",
        "sharded over a mesh of two dimensions",
        "1.weight is in no unit",
        "mesh has 1 dimension: expected two",
        "is sharded among ranks",
        "every unit travels by one kind",
        "int9",
        "0.weight is torch.float32 and its grad_dtype is torch.float64",
        "0.weight is on the meta device, and has no values that nodes could share: call model.to_empty",
        "not the same on all ranks",
    ]
    for said in (one["refusals"] for one in found):
        for text, words in zip(said, expected, strict=True):
            assert words in text
