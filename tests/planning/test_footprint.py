"""Predicted peaks by kind, by arithmetic; and what a quantised exchange really holds."""

from collections.abc import Callable

import pytest
import torch
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.interface import Steps
from anabranch.exchange.quantised.exchange import exchange
from anabranch.planning.footprint import (
    KINDS,
    Footprint,
    MemoryUse,
    OptimizerMemory,
    ReadyGradient,
    Setting,
    StepProfile,
    buckets_by_size,
    quantised_nbytes,
)
from anabranch.tools.predict.memory.probe import probe
from anabranch.tools.predict.memory.training_modes import DEFAULT_MODES, OUR_MODES, modes_of, predict
from anabranch.values.kinds.formats import FORMATS
from anabranch.values.kinds.names import COMPRESSED, OKTOPK
from anabranch.values.kinds.options import Quantised
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
    found = {
        mode: predict(small(activations=MIB), mode, Setting(ranks=4, blas_workspace_nbytes=0)) for mode in DEFAULT_MODES
    }
    n = 160_000_000
    assert found["naive sparse"].at in ("selection", "decompression")
    assert found["naive sparse"].nbytes >= 5 * n > found["ddp"].nbytes
    # weights, residual, owners' sums (with 4 ranks as wide as the bucket), and two slots of a quarter
    lean = found["lean"].kinds
    assert (lean["weights"], lean["residual"], lean["gradients"]) == (n, n, n // 2 + 40_000_000)
    assert found["lean"].nbytes < found["oktopk"].nbytes


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
    less = {mode: (ddp - predict(profile, mode).nbytes) / n for mode in DEFAULT_MODES if mode.startswith("lean")}
    assert less["lean, dense"] == pytest.approx(1 - 0.05)
    assert less["lean"] == pytest.approx(0.0 - 0.05, abs=0.03)
    assert less["lean, residuals bf16"] == pytest.approx(0.5 - 3 * 0.05, abs=0.03)
    assert less["lean, residuals int8"] == pytest.approx(1 - 65 / 256 - 3 * 0.05, abs=0.03)


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
    assert sparse.kinds["gradients"] == 3 * 40_000_000 + n * 12 // 400  # two slots, one whole average, 1 % sparse
    early = small(activations=1000 * MIB, layers=20)
    assert predict(early, "lean, dense", Setting(clips=True)) == predict(early, "lean, dense"), "none at its peak"


def test_wrong_requests_are_told() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: predict(small(), "ddpp"), "mode is 'ddpp': expected one of ddp, naive sparse"),
        (lambda: Setting(ranks=0), "ranks is 0: expected a whole number from 1 on"),
        (lambda: Setting(density=2.0), r"density is 2.0: expected a share of the elements in \(0, 1\]"),
        (lambda: Footprint({"gravel": 1}, ""), "a footprint has the kind 'gravel': expected some of weights"),
    ]
    for wrong, words in cases:
        with pytest.raises(ValueError, match=words):
            wrong()


def test_every_mode_grows_with_the_batch() -> None:
    few, many = (probe(images(batch)) for batch in (2, 16))
    for mode in DEFAULT_MODES:
        assert predict(few, mode).nbytes < predict(many, mode).nbytes, mode


def test_a_model_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the step has no gradients: expected a model with parameters"):
        StepProfile(0, (), MemoryUse(0))


def test_buckets_close_at_their_size_and_vectors_keep_apart() -> None:
    profile = probe(images(8))
    buckets = buckets_by_size(profile, 64 * 1024, OUR_MODES[OKTOPK].compresses)
    assert sorted(index for bucket in buckets for index in bucket.indices) == list(range(len(profile.gradients)))
    assert all(profile.gradients[index].sparse == bucket.compressed for bucket in buckets for index in bucket.indices)
    assert {bucket.compressed for bucket in buckets} == {True, False}


N = 160_000_000  # bytes of the gradients of ``small``
QUIET = Setting(ranks=4, blas_workspace_nbytes=0)


def held(steps: Steps, buffer: torch.Tensor, counts: list[dict[str, int]]) -> Steps:
    """The same steps; before each, record the bytes of all tensors of the exchange except the bucket, by name."""
    for work in steps:
        local = steps.gi_frame.f_locals  # type: ignore[attr-defined]  # of a generator
        tensors = {name: value for name, value in local.items() if isinstance(value, torch.Tensor)}
        counts.append({name: t.nbytes for name, t in tensors.items() if t is not buffer and name != "residual"})
        yield work


@pytest.mark.parametrize("kind", FORMATS)
def test_the_prediction_is_what_a_quantised_exchange_holds(kind: str) -> None:
    for ranks, numel in ((2, 4096), (4, 10_000), (8, 129)):
        largest = largest_held(kind, ranks, numel)
        keeps = Quantised(kind).keeps_residual
        assert set(largest) == {"sent", "received", "message", "gathered"} | ({"rounding_error"} if keeps else set())
        predicted = quantised_nbytes(kind, numel, ranks, keeps)
        assert predicted["send"] == largest["sent"] + largest["message"]
        assert predicted["receive"] == largest["received"] + largest["gathered"]
        assert predicted["workspace"] == largest.get("rounding_error", 0)


def largest_held(kind: str, ranks: int, numel: int) -> dict[str, int]:
    """Bytes by name of the tensors of one rank at the fullest moment of an exchange."""
    world, form = VirtualWorld(ranks), FORMATS[kind]
    counts: list[dict[str, int]] = []
    running = []
    for comm in world.comms:
        buffer = torch.randn(numel)
        residual = torch.zeros(numel) if Quantised(kind).keeps_residual else None
        running.append(held(exchange(buffer, residual, comm, float(ranks), form), buffer, counts))
    world.run(running)
    return max(counts, key=lambda count: sum(count.values()))


def test_rounding_needs_messages_and_only_int4_a_residual() -> None:
    found = {kind: predict(small(activations=MIB), kind, QUIET).kinds for kind in COMPRESSED}
    assert [found[kind]["residual"] for kind in COMPRESSED] == [0, 0, N]
    assert all(found[kind]["gradients"] == N + 40_000_000 for kind in COMPRESSED)
    # Two buckets of 10 M values are under way, each with five messages to send and eight to receive.
    assert found["int8"]["send"] + found["int8"]["receive"] == pytest.approx(2 * 13 * 2_500_000 * 65 / 64, rel=1e-3)
    assert found["bf16"]["send"] + found["bf16"]["receive"] == pytest.approx(2 * 13 * 5_000_000, rel=1e-3)
    assert found["int4"]["send"] < found["int8"]["send"] < found["bf16"]["send"]


def test_lean_with_int8_holds_neither_gradients_nor_residual() -> None:
    profile = small(activations=MIB, layers=16)
    ddp, lean, oktopk = (predict(profile, mode, QUIET) for mode in ("ddp", "lean, int8", "lean"))
    assert lean.kinds["residual"] == 0 and lean.kinds["gradients"] == 3 * 40_000_000  # two slots, and autograd's own
    assert lean.nbytes < ddp.nbytes and lean.nbytes < oktopk.nbytes


def test_modes_by_exchange() -> None:
    rounded = ["residuals bf16", "residuals int8"]
    assert modes_of("dense") == ["lean, dense"]
    assert modes_of("oktopk") == ["oktopk", "lean", *(f"lean, {how}" for how in rounded)]
    assert modes_of("int8") == ["int8", "lean, int8"]
    assert modes_of("int4") == ["int4", "lean, int4", *(f"lean, int4, {how}" for how in rounded)]
    assert all(mode in OUR_MODES for kind in COMPRESSED for mode in modes_of(kind))
