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

pytestmark = pytest.mark.slow

KINDS: dict[str, Any] = {"oktopk": oktopk(), "int4": "int4"}
LOADED = {4: (2, 4), 2: (2, 1), 3: (3,)}  # by number of ranks, in how many nodes a checkpoint is loaded

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saves(folder: Path) -> Found:
    """What each of four ranks found, in two nodes, by scenario; the checkpoints of both kinds are in the folder."""
    return on_ranks(scenarios, 4, str(folder), timeout_s=150)


def scenarios(rank: int, folder: str) -> dict[str, Any]:
    return {
        "saved": {kind: saved(f"{folder}/{kind}", compress) for kind, compress in KINDS.items()},
        "frozen": [frozen_since(f"{folder}/frozen-{kind}", compress) for kind, compress in KINDS.items()],
        "resumed": resumed(),
        "went on": went_on(f"{folder}/went-on"),
        "without": other_checkpoint(f"{folder}/without"),
        "not everywhere": not_everywhere(rank, f"{folder}/somewhere"),
    }


def resumed() -> bool:
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


def test_a_resumed_run_is_as_if_it_had_not_been_stopped(saves: Found) -> None:
    assert all(one["resumed"] for one in saves)


def saved(folder: str, compress: Any) -> dict[str, torch.Tensor]:
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


def loads(rank: int, folder: str) -> list[list[dict[str, torch.Tensor]]]:
    """By number of nodes, then by kind; first a model with shards of one element."""
    if dist.get_world_size() == 2:
        _small(f"{folder}/small", 2, saves=True)
        _small(f"{folder}/small", 1, saves=False)
    every = LOADED[dist.get_world_size()]
    return [[loaded(f"{folder}/{kind}", nodes, compress) for kind, compress in KINDS.items()] for nodes in every]


def loaded(folder: str, nodes: int, compress: Any) -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("ranks", LOADED)
def test_a_checkpoint_is_loaded_by_other_nodes_of_other_sizes(ranks: int, saves: Found, folder: Path) -> None:
    """On two ranks also one with shards of one element."""
    found = on_ranks(loads, ranks, str(folder), timeout_s=120)
    for place, nodes in enumerate(LOADED[ranks]):
        for number, kind in enumerate(KINDS):
            before = [one["saved"][kind] for one in saves]
            after = [one[place][number] for one in found]
            names = [name for name in before[0] if not name.startswith("weight of ")]
            assert any(before[0][name].any() for name in names)
            for name in names:
                torch.testing.assert_close(after[0][name], before[0][name], rtol=0, atol=1e-6)
            if (nodes, ranks) == (2, 4):
                assert all(same(one, other) for one, other in zip(before, after, strict=True)), "bit by bit"


def went_on(folder: str) -> bool:
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


def test_rounding_errors_in_padding_are_saved(saves: Found) -> None:
    """Blocks of int4 reach from a shard's last value into the zeros behind it."""
    assert all(one["went on"] for one in saves)


def other_checkpoint(folder: str) -> str:
    mesh = two_nodes()
    model = model_of(mesh["shard"])
    replication = ab.replicate(model, mesh, compress=oktopk())
    save({"model": model.state_dict()}, checkpoint_id=folder)
    with pytest.raises(ValueError) as caught:
        load({"comm": ab.ReplicationState(replication, folder)}, checkpoint_id=folder)
    return str(caught.value)


def test_a_checkpoint_without_the_state_is_refused_with_a_sentence(saves: Found) -> None:
    assert all("has no entry anabranch/node" in one["without"] for one in saves)


def not_everywhere(rank: int, folder: str) -> str:
    mesh = two_nodes()
    model = model_of(mesh["shard"])
    replication = ab.replicate(model, mesh, compress=oktopk())
    save({"comm": ab.ReplicationState(replication)}, checkpoint_id=folder)
    saved_at = f"{folder}-of-another-host" if rank == 3 else folder
    with pytest.raises((ab.DisagreementError, OSError)) as caught:
        load({"comm": ab.ReplicationState(replication, saved_at)}, checkpoint_id=folder)
    return str(caught.value)


def test_a_checkpoint_that_one_rank_cannot_read_is_an_error_on_all(saves: Found) -> None:
    *others, last = (one["not everywhere"] for one in saves)
    assert "somewhere-of-another-host" in last
    for said in others:
        assert "reading the checkpoint failed on ranks 3, and not here" in said


def _small(folder: str, nodes: int, saves: bool) -> None:
    """A model with shards of one element on two ranks."""
    mesh = init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(24, 2)
    fully_shard(model, mesh=mesh["shard"])
    replication = ab.replicate(model, mesh, compress=oktopk())
    if saves:
        model(torch.randn(4, 24)).square().mean().backward()
        save({"comm": ab.ReplicationState(replication)}, checkpoint_id=folder)
    else:
        load({"comm": ab.ReplicationState(replication, folder)}, checkpoint_id=folder)


def frozen_since(folder: str, compress: Any) -> list[bool]:
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


def test_the_residual_of_a_block_that_is_frozen_is_kept_in_checkpoints(saves: Found) -> None:
    assert [one["frozen"] for one in saves] == [[[True] * 3] * 2] * 4
