"""Predicted peaks by kind, by arithmetic."""

from collections.abc import Callable

import pytest

from anabranch.estimate.account import KINDS, MODES, Footprint, Setting, predict
from anabranch.estimate.probe import probe
from anabranch.estimate.step_profile import MemoryUse, OptimizerMemory, ReadyGradient, StepProfile
from estimate.models import images

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
    assert predict(small(), "lean", Setting(buckets=one)).kinds["gradients"] >= 2 * 160_000_000
    with pytest.raises(ValueError, match=r"a bucket names layer\.9, which has no gradient in this step"):
        predict(small(), "lean", Setting(buckets=[["layer.9"]]))


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
