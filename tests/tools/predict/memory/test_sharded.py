"""Predicted peaks of models that FSDP2 shards, by arithmetic."""

import pytest

from anabranch.fsdp.planning import Block, ShardedTrace, ShardingPlan, peak_nbytes
from anabranch.planning.footprint import MemoryUse, OptimizerMemory, ReadyGradient, Setting, StepProfile
from anabranch.tools.predict.memory.training_modes import predict

N = 1_000_000
NO_BLAS = Setting(ranks=4, blas_workspace_nbytes=0)
KEPT_AND_FREED = ("fsdp2", "fsdp2:reshard")


def model(activations: int = 0, optimizer: OptimizerMemory | None = None) -> StepProfile:
    """A head, three layers and a stem, in the order of backward."""
    sizes = {"head.w": N, "layers.2.w": 3 * N, "layers.1.w": 2 * N, "layers.0.w": 4 * N, "stem.w": N}
    gradients = []
    for place, (name, nbytes) in enumerate(sizes.items()):
        use = MemoryUse(activations * (len(sizes) - place), nbytes)
        gradients.append(ReadyGradient(name, nbytes // 4, nbytes, use, use))
    return StepProfile(sum(sizes.values()), tuple(gradients), MemoryUse(0), optimizer or OptimizerMemory())


def test_without_activations_it_is_shards_and_what_the_simulator_holds() -> None:
    """All but the head's own gradient, which the simulator counts with the rest's."""
    for mode, reshard in [("fsdp2", False), ("fsdp2:reshard", True)]:
        found = predict(model(), mode, NO_BLAS)
        layers = tuple(Block(f"layers.{i}", size, size, 0.0, 0.0) for i, size in enumerate((4 * N, 2 * N, 3 * N)))
        peak = peak_nbytes(
            ShardedTrace(layers, 2 * N, 2 * N), ShardingPlan.per_block([b.name for b in layers], reshard)
        )
        shards = 2 * 11 * N // 4
        assert found.nbytes == shards + peak


def test_freeing_after_forward_saves_where_activations_are_many() -> None:
    kept, freed = (predict(model(activations=100 * N), mode, NO_BLAS) for mode in KEPT_AND_FREED)
    ddp = predict(model(activations=100 * N), "ddp", NO_BLAS)
    assert kept.kinds["activations"] == freed.kinds["activations"] == 500 * N
    assert freed.nbytes < kept.nbytes and freed.kinds["weights"] < kept.kinds["weights"]
    assert freed.nbytes < ddp.nbytes


def test_more_ranks_have_smaller_shards() -> None:
    few, many = (
        predict(model(optimizer=OptimizerMemory(22 * N, 0)), "fsdp2:reshard", Setting(ranks=r, blas_workspace_nbytes=0))
        for r in (2, 22)
    )
    assert (few.kinds["optimizer state"], many.kinds["optimizer state"]) == (11 * N, N)
    assert few.nbytes - many.nbytes == (22 + 11 + 11) * N // 2 - (22 + 11 + 11) * N // 22


def test_hsdp_has_the_shards_of_a_node_and_nothing_else_for_its_averages() -> None:
    """Two nodes of four ranks need on each rank what four ranks of FSDP2 do: averages are made in place."""
    for units in ["", ":reshard"]:
        whole = model(activations=7, optimizer=OptimizerMemory(22 * N, 4 * N))
        setting = Setting(ranks=8, ranks_per_node=4, blas_workspace_nbytes=0)
        inside, flat = predict(whole, f"hsdp{units}", setting), predict(whole, f"fsdp2{units}", setting)
        assert inside == predict(whole, f"fsdp2{units}", NO_BLAS)
        assert inside.nbytes - flat.nbytes == (11 + 11 + 22) * N // 4 - (11 + 11 + 22) * N // 8
        assert predict(whole, f"hsdp{units}", NO_BLAS) == predict(whole, f"fsdp2{units}", NO_BLAS), "one node"


def test_nodes_are_of_one_size() -> None:
    with pytest.raises(ValueError, match="ranks_per_node is 3, and there are 8 ranks: expected a number that divides"):
        Setting(ranks=8, ranks_per_node=3)


def test_a_model_without_numbers_in_its_names_is_one_unit() -> None:
    use = MemoryUse(5, 8)
    whole = StepProfile(8, (ReadyGradient("weight", 2, 8, use, use),), MemoryUse(0))
    assert predict(whole, "fsdp2", NO_BLAS).nbytes >= 8 + 8


def test_the_first_layers_activations_count_although_they_are_of_the_rest() -> None:
    large, small = MemoryUse(1000 * N, N), MemoryUse(N, N)
    gradients = (ReadyGradient("layers.0.w", N // 4, N, small, small), ReadyGradient("stem.w", N // 4, N, large, large))
    found = predict(StepProfile(2 * N, gradients, MemoryUse(0)), "fsdp2", NO_BLAS)
    assert found.at == "until the gradient of stem.w"
    # Shards of both and of their gradients; the stem, its gradient, and the buffer in which the layer is reduced.
    assert found.nbytes == (4 * N) // 4 + N + N + N + 1000 * N
