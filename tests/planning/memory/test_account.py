"""Predicted peaks by kind, by arithmetic."""

from collections.abc import Callable

import pytest

from anabranch.planning.memory.account import KINDS, MODES, Footprint, Setting, predict
from anabranch.planning.memory.step_profile import MemoryUse, OptimizerMemory, ReadyGradient, StepProfile
from anabranch.tools.predict.memory.probe import probe
from tools.predict.memory.models import images

MIB = 2**20


def small(activations: int = 100 * MIB, layers: int = 4, optimizer: OptimizerMemory | None = None) -> StepProfile:
    """Layers of 10 M elements; activations go linearly, and each gradient is 40 MB of its own until it is taken."""
    numel, nbytes = 10_000_000, 40_000_000
    gradients = []
    for index in range(layers):
        left = activations * (layers - index) // layers
        use = MemoryUse(left, nbytes)
        gradients.append(ReadyGradient(f"layer.{index}", numel, nbytes, use, use))
    return StepProfile(layers * nbytes, tuple(gradients), MemoryUse(MIB), optimizer or OptimizerMemory())


def test_ddp_is_weights_gradients_state_and_the_fullest_moment() -> None:
    found = predict(small(), "ddp", Setting(blas_workspace_nbytes=0))
    assert found.kinds["weights"] == 160_000_000 and found.kinds["gradients"] == 160_000_000 + 40_000_000
    assert found.nbytes == 360_000_000 + 100 * MIB and found.at == "until the gradient of layer.0"
    assert list(found.kinds) == list(KINDS)


def test_ballooning_is_where_activations_are_gone() -> None:
    found = {mode: predict(small(activations=MIB), mode, Setting(ranks=4, blas_workspace_nbytes=0)) for mode in MODES}
    n = 160_000_000
    assert found["naive sparse"].at in ("selection", "decompression")
    assert found["naive sparse"].nbytes >= 5 * n > found["ddp"].nbytes
    # weights, residual, owners' sums (with 4 ranks as wide as the bucket), and two slots of a quarter
    lean = found["lean"].kinds
    assert (lean["weights"], lean["residual"], lean["gradients"]) == (n, n, n // 2 + 40_000_000)
    assert found["lean, host"].kinds["residual"] == n // 2 and found["lean, host"].host_nbytes == n
    assert found["lean, host"].nbytes < found["lean"].nbytes < found["oktopk"].nbytes


def test_with_many_ranks_owners_hold_little() -> None:
    few, many = (predict(small(), "oktopk", Setting(ranks=ranks)) for ranks in (4, 64))
    assert few.nbytes - many.nbytes == pytest.approx(40_000_000 * (1 - 4 / 64), rel=0.02)


def test_an_optimizers_step_can_be_the_fullest_moment() -> None:
    found = predict(small(activations=0, optimizer=OptimizerMemory(320_000_000, 160_000_000)), "ddp")
    assert found.at == "optimizer step" and found.kinds["optimizer state"] == 320_000_000


def test_a_plans_buckets_are_taken_and_unknown_names_refused() -> None:
    one = [[f"layer.{index}" for index in range(4)]]
    whole = predict(small(activations=0), "lean", Setting(buckets=one))
    assert whole.kinds["gradients"] == 160_000_000 + 40_000_000 and whole.at == "exchange of the bucket to layer.3"
    with pytest.raises(ValueError, match=r"a bucket names layer\.9, which has no gradient in this step"):
        predict(small(), "lean", Setting(buckets=[["layer.9"]]))


def test_lean_needs_less_than_ddp() -> None:
    """Where activations are most of the memory, at the peak there is a bucket or two, each 1/20 of all."""
    profile, n = small(activations=1000 * MIB, layers=20), 20 * 40_000_000
    ddp = predict(profile, "ddp").nbytes
    less = {mode: (ddp - predict(profile, mode).nbytes) / n for mode in MODES if mode.startswith("lean")}
    assert less["lean, dense"] == pytest.approx(1 - 0.05)
    assert less["lean"] == pytest.approx(0.0 - 0.05, abs=0.03)
    assert less["lean, residuals bf16"] == pytest.approx(0.5 - 3 * 0.05, abs=0.03)
    assert less["lean, residuals int8"] == pytest.approx(1 - 65 / 256 - 3 * 0.05, abs=0.03)
    assert less["lean, host"] == pytest.approx(1 - 3 * 0.05, abs=0.03), "two slots of residuals are there all the time"


def test_slots_where_there_are_no_activations() -> None:
    profile = small(activations=0, layers=20)
    bucket = 40_000_000
    dense, rounded = (predict(profile, mode).kinds for mode in ("lean, dense", "lean, residuals bf16"))
    assert dense["gradients"] == 3 * bucket and dense["residual"] == 0  # two slots, and autograd's own
    assert rounded["gradients"] == 3 * bucket and rounded["residual"] == 20 * bucket // 2 + 2 * bucket


def test_gradients_wait_for_the_rest_of_their_bucket() -> None:
    pairs = [[f"layer.{index}", f"layer.{index + 1}"] for index in (0, 2)]
    for mode, waiting in (("lean", 0), ("lean, dense", 40_000_000), ("lean, residuals bf16", 40_000_000)):
        found = predict(small(activations=0), mode, Setting(buckets=pairs))
        assert found.kinds["gradients"] == 2 * 80_000_000 + waiting + 40_000_000, mode


def test_clipping_holds_averages_until_the_end() -> None:
    profile, n = small(activations=0, layers=20, optimizer=OptimizerMemory(0, 20 * 40_000_000)), 20 * 40_000_000
    dense, sparse = (predict(profile, mode, Setting(clips=True)) for mode in ("lean, dense", "lean"))
    assert dense.at == "a bucket's step" and dense.kinds["gradients"] == n
    assert sparse.kinds["gradients"] == 3 * 40_000_000 + n * 8 // 400  # two slots, one whole average, 1 % as pairs
    early = small(activations=1000 * MIB, layers=20)
    assert predict(early, "lean, dense", Setting(clips=True)) == predict(early, "lean, dense"), "none at its peak"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: predict(small(), "ddpp"), "mode is 'ddpp': expected one of ddp, naive sparse"),
        (lambda: Setting(ranks=0), "ranks is 0: expected a whole number from 1 on"),
        (lambda: Setting(density=2.0), r"density is 2.0: expected a share of the elements in \(0, 1\]"),
        (lambda: Footprint({"gravel": 1}, ""), "a footprint has the kind 'gravel': expected some of weights"),
    ],
)
def test_wrong_requests_are_told(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_grows_with_the_batch(mode: str) -> None:
    few, many = (predict(probe(images(batch)), mode).nbytes for batch in (2, 16))
    assert few < many
