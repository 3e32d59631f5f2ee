"""The state of ab.replicate in checkpoints: resumed bit by bit, and by other nodes of other sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import anabranch as ab
from fsdp.small_model import model_of, oktopk, same, train, two_nodes, weights
from ranks import on_ranks


def resumed(rank: int) -> bool:
    mesh = two_nodes()
    whole = model_of(mesh["shard"])
    ab.replicate(whole, mesh, compress=oktopk())
    train(whole, range(10))
    first = model_of(mesh["shard"])
    replication = ab.replicate(first, mesh, compress=oktopk())
    train(first, range(6))
    state, kept = replication.state_dict(), weights(first)
    replication.close()
    second = model_of(mesh["shard"], seed=3)
    with torch.no_grad():
        for name, parameter in second.named_parameters():
            parameter.to_local().copy_(kept[name])  # type: ignore[attr-defined]
    ab.replicate(second, mesh, compress=oktopk()).load_state_dict(state)
    train(second, range(6, 10))
    return same(weights(second), weights(whole))


def test_a_resumed_run_is_as_if_it_had_not_been_stopped() -> None:
    assert all(on_ranks(resumed, 4))


def saved(rank: int, folder: str, compress: Any) -> dict[str, torch.Tensor]:
    """Train and save; the sums of the residuals of both nodes, whole parameters by name."""
    mesh = two_nodes()
    model = model_of(mesh["shard"])
    replication = ab.replicate(model, mesh, compress=compress)
    train(model, range(6))
    save({"model": model.state_dict(), "comm": ab.ReplicationState(replication)}, checkpoint_id=folder)
    whole = sums(replication, mesh)
    train(model, range(6, 10))
    return {**whole, **{f"weight of {name}": weight for name, weight in weights(model).items()}}


def sums(replication: ab.Replication, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The sum over the nodes of what waits for each parameter, whole."""
    found = {}
    residuals = replication.state_dict()["residuals"]
    for name, parameter in replication.parameters.items():
        local = parameter.to_local()
        waiting = residuals.get(name, torch.zeros(local.numel()))[: local.numel()].clone().view(local.shape)
        dist.all_reduce(waiting, group=mesh.get_group(0))
        shard = DTensor.from_local(
            waiting, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
        found[name] = shard.full_tensor()
    return found


def loaded(rank: int, folder: str, nodes: int, compress: Any) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("replicate", "shard"))
    model = model_of(mesh["shard"], seed=5)
    replication = ab.replicate(model, mesh, compress=compress)
    weights_read = model.state_dict()
    comm = ab.ReplicationState(replication, folder)
    load({"model": weights_read, "comm": comm}, checkpoint_id=folder)
    model.load_state_dict(weights_read)
    whole = sums(replication, mesh)
    train(model, range(6, 10))
    return {**whole, **{f"weight of {name}": weight for name, weight in weights(model).items()}}


SIZES = [(nodes, ranks, oktopk()) for nodes, ranks in [(2, 4), (4, 4), (2, 2), (1, 2), (3, 3)]]


@pytest.mark.parametrize(("nodes", "ranks", "compress"), [*SIZES, (2, 4, "int4"), (4, 4, "int4"), (1, 2, "int4")])
def test_a_checkpoint_is_loaded_by_other_nodes_of_other_sizes(
    nodes: int, ranks: int, compress: Any, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    before = on_ranks(saved, 4, folder, compress)
    after = on_ranks(loaded, ranks, folder, nodes, compress)
    names = [name for name in before[0] if not name.startswith("weight of ")]
    assert any(before[0][name].any() for name in names)
    for name in names:
        torch.testing.assert_close(after[0][name], before[0][name], rtol=0, atol=1e-6)
    if (nodes, ranks) == (2, 4):
        assert all(same(one, other) for one, other in zip(before, after, strict=True)), "bit by bit"


def went_on(rank: int, folder: str) -> bool:
    """From a checkpoint, as the run that has written it does."""
    mesh = two_nodes()
    runs = [model_of(mesh["shard"]) for _ in range(2)]
    first, second = (ab.replicate(model, mesh, compress="int4") for model in runs)
    train(runs[0], range(4))
    save({"model": runs[0].state_dict(), "comm": ab.ReplicationState(first)}, checkpoint_id=folder)
    read = runs[1].state_dict()
    load({"model": read, "comm": ab.ReplicationState(second, folder)}, checkpoint_id=folder)
    for model in runs:
        train(model, range(4, 10))
    return same(weights(runs[0]), weights(runs[1]))


def test_rounding_errors_in_padding_are_saved(tmp_path: Path) -> None:
    """Blocks of int4 reach from a shard's last value into the zeros behind it."""
    assert all(on_ranks(went_on, 4, str(tmp_path / "checkpoint")))


def other_checkpoint(rank: int, folder: str) -> str:
    mesh = two_nodes()
    model = model_of(mesh["shard"])
    replication = ab.replicate(model, mesh, compress=oktopk())
    save({"model": model.state_dict()}, checkpoint_id=folder)
    with pytest.raises(ValueError) as caught:
        load({"comm": ab.ReplicationState(replication, folder)}, checkpoint_id=folder)
    return str(caught.value)


def test_a_checkpoint_without_the_state_is_refused_with_a_sentence(tmp_path: Path) -> None:
    for said in on_ranks(other_checkpoint, 4, str(tmp_path / "checkpoint")):
        assert "has no entry anabranch/node" in said


def not_everywhere(rank: int, folder: str) -> str:
    mesh = two_nodes()
    model = model_of(mesh["shard"])
    replication = ab.replicate(model, mesh, compress=oktopk())
    save({"comm": ab.ReplicationState(replication)}, checkpoint_id=folder)
    saved_at = f"{folder}-of-another-host" if rank == 3 else folder
    with pytest.raises((ab.DisagreementError, OSError)) as caught:
        load({"comm": ab.ReplicationState(replication, saved_at)}, checkpoint_id=folder)
    return str(caught.value)


def test_a_checkpoint_that_one_rank_cannot_read_is_an_error_on_all(tmp_path: Path) -> None:
    *others, last = on_ranks(not_everywhere, 4, str(tmp_path / "checkpoint"))
    assert "checkpoint-of-another-host" in last
    for said in others:
        assert "reading the checkpoint failed on ranks 3, and not here" in said


def small_saved(rank: int, folder: str) -> None:
    """A model with shards of one element on two ranks."""
    _small(folder, 2, saves=True)


def small_loaded(rank: int, folder: str) -> None:
    _small(folder, 1, saves=False)


def _small(folder: str, nodes: int, saves: bool) -> None:
    mesh = init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(24, 2)
    fully_shard(model, mesh=mesh["shard"])
    replication = ab.replicate(model, mesh, compress=oktopk())
    if saves:
        model(torch.randn(4, 24)).square().mean().backward()
        save({"comm": ab.ReplicationState(replication)}, checkpoint_id=folder)
    else:
        load({"comm": ab.ReplicationState(replication, folder)}, checkpoint_id=folder)


def test_shards_of_one_element_are_loaded(tmp_path: Path) -> None:
    on_ranks(small_saved, 2, str(tmp_path / "checkpoint"))
    on_ranks(small_loaded, 2, str(tmp_path / "checkpoint"))


def frozen_since(rank: int, folder: str, compress: Any) -> list[bool]:
    """A block is frozen when a checkpoint is loaded, and trained again when the next one is; what waits then."""
    mesh = two_nodes()
    runs = [model_of(mesh["shard"]) for _ in range(4)]
    runs[1][1].requires_grad_(False)
    replications = [ab.replicate(model, mesh, compress=compress) for model in runs]
    train(runs[0], range(4))
    save({"model": runs[0].state_dict(), "comm": ab.ReplicationState(replications[0])}, checkpoint_id=f"{folder}-0")
    for model, replication, saved_at in zip(runs[1:], replications[1:], ("-0", "-1", "-0"), strict=True):
        path = f"{folder}{saved_at}"
        load({"model": model.state_dict(), "comm": ab.ReplicationState(replication, path)}, checkpoint_id=path)
        if model is runs[1]:
            state = {"model": model.state_dict(), "comm": ab.ReplicationState(replication)}
            save(state, checkpoint_id=f"{folder}-1")
    waiting = [replication.state_dict()["residuals"] for replication in replications]
    waits = bool(waiting[2]["1.up.weight"].any())
    for model in runs:
        train(model, range(4, 8))
    return [waits, same(waiting[2], waiting[0]), same(weights(runs[3]), weights(runs[0]))]


@pytest.mark.parametrize("compress", [oktopk(), "int4"], ids=["oktopk", "int4"])
def test_what_waits_for_a_block_that_is_frozen_is_kept_in_checkpoints(compress: Any, tmp_path: Path) -> None:
    assert on_ranks(frozen_since, 4, str(tmp_path / "checkpoint"), compress) == [[True] * 3] * 4
