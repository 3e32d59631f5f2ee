"""Predicted peaks of models that FSDP2 shards, by arithmetic, and their throughput."""

import pytest

from anabranch import Network
from anabranch.estimate.throughput import samples_per_s
from anabranch.files import load_bundled_trace
from anabranch.footprint.account import SHARDED_MODES, Setting, predict
from anabranch.footprint.step_profile import MemoryUse, OptimizerMemory, ReadyGradient, StepProfile
from anabranch.sharded import Block, ShardedTrace, ShardingPlan, peak_nbytes

N = 1_000_000
NO_BLAS = Setting(ranks=4, blas_workspace_nbytes=0)


def model(activations: int = 0, optimizer: OptimizerMemory | None = None) -> StepProfile:
    """A head, three layers and a stem, in the order of backward."""
    sizes = {"head.w": N, "layers.2.w": 3 * N, "layers.1.w": 2 * N, "layers.0.w": 4 * N, "stem.w": N}
    gradients = []
    for place, (name, nbytes) in enumerate(sizes.items()):
        use = MemoryUse(activations * (len(sizes) - place), nbytes)
        gradients.append(ReadyGradient(name, nbytes // 4, nbytes, use, use))
    return StepProfile(sum(sizes.values()), tuple(gradients), MemoryUse(0), optimizer or OptimizerMemory())


@pytest.mark.parametrize(("mode", "reshard"), [("fsdp2", False), ("fsdp2:reshard", True)])
def test_without_activations_it_is_shards_and_what_the_simulator_holds(mode: str, reshard: bool) -> None:
    """All but the head's own gradient, which the simulator counts with the rest's."""
    found = predict(model(), mode, NO_BLAS)
    layers = tuple(Block(f"layers.{i}", size, size, 0.0, 0.0) for i, size in enumerate((4 * N, 2 * N, 3 * N)))
    peak = peak_nbytes(ShardedTrace(layers, 2 * N, 2 * N), ShardingPlan.per_block([b.name for b in layers], reshard))
    shards = 2 * 11 * N // 4
    assert found.nbytes == shards + peak


def test_freeing_after_forward_saves_where_activations_are_many() -> None:
    kept, freed = (predict(model(activations=100 * N), mode, NO_BLAS) for mode in SHARDED_MODES)
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


def test_throughput_is_that_of_the_simulated_step() -> None:
    trace, network = load_bundled_trace("gpt2"), Network.ring(4, 30e-6, 1e-9)
    kept, freed = (samples_per_s(trace, network, mode, 8, 0.01) for mode in SHARDED_MODES)
    assert 0 < freed < kept
