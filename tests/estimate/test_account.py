"""Predicted memory: tensors without data against real ones, against the allocator of real runs, and by arithmetic."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

from anabranch.estimate import probe as probing
from anabranch.estimate.account import KINDS, MODES, Footprint, Setting, predict
from anabranch.estimate.largest_batch import largest_batch
from anabranch.estimate.probe import Build, probe
from anabranch.estimate.profile import Arrival, Moment, OptimizerCost, Profile, by_bytes
from estimate.models import images, language

CPU = torch.device("cpu")
MIB = 2**20
SUBJECTS = {"images": images(8), "language": language(4), "recomputed": language(4, recompute=True)}


def highest(profile: Profile) -> int:
    return max(arrival.highest.nbytes for arrival in profile.arrivals)


def as_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    none: Callable[[], AbstractContextManager[None]] = nullcontext
    monkeypatch.setattr(probing, "gpu_like", none)


def allocated(build: Build) -> int:
    """The peak of torch's CPU allocator over one step, above what was there before, every gradient gone at once."""
    model, loss = build(CPU)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    loss(model).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        loss(model).backward()
    level = peak = 0
    assert seen.profiler is not None
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


# ------------------------------------------------------------------------------------------------------ the probe


@pytest.mark.parametrize("name", ["images", "recomputed"])
def test_tensors_without_data_live_as_real_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_cpu(monkeypatch)
    real, empty = (probe(SUBJECTS[name], device=device) for device in (CPU, probing.META))
    # Dropout's mask and attention's sums are the two things in which the meta device differs from a CPU by itself.
    assert [arrival.name for arrival in empty.arrivals] == [arrival.name for arrival in real.arrivals]
    assert empty.weights == real.weights and empty.after == real.after
    assert highest(empty) == pytest.approx(highest(real), rel=0.01)


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_real_run_allocates_what_was_predicted(name: str) -> None:
    predicted = probe(SUBJECTS[name], convolution_workspace=0.0)
    batch = predicted.after.nbytes  # is there before the step
    assert highest(predicted) - batch == pytest.approx(allocated(SUBJECTS[name]), rel=0.1)


def test_nothing_of_a_probe_stays() -> None:
    before = nn.functional.dropout, nn.functional.scaled_dot_product_attention
    first, second = probe(SUBJECTS["language"]), probe(SUBJECTS["language"])
    assert first == second
    assert before == (nn.functional.dropout, nn.functional.scaled_dot_product_attention)


def test_gradients_come_in_the_order_of_backward_and_frozen_ones_never() -> None:
    names = [arrival.name for arrival in probe(SUBJECTS["language"]).arrivals]
    assert names[-1] == "embedding.weight"  # tied: whole only when both its uses are through
    assert not any("frozen" in name for name in names) and len(set(names)) == len(names)
    vectors = {arrival.name for arrival in probe(SUBJECTS["images"]).arrivals if not arrival.sparse}
    assert {"0.bias", "1.norms.0.weight"} <= vectors and "0.weight" not in vectors


def test_dropout_keeps_a_byte_and_attention_no_probabilities_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    like = highest(probe(SUBJECTS["language"]))
    as_on_cpu(monkeypatch)
    assert like < 0.95 * highest(probe(SUBJECTS["language"]))


def test_offloaded_and_recomputed_activations_take_less() -> None:
    kept, recomputed = highest(probe(SUBJECTS["language"])), highest(probe(SUBJECTS["recomputed"]))
    offloaded = highest(probe(SUBJECTS["language"], offload=True))
    assert offloaded < 0.6 * kept and recomputed < 0.75 * kept
    with pytest.raises(ValueError, match="offload is asked for on cpu: expected the meta device"):
        probe(SUBJECTS["language"], offload=True, device=CPU)


@pytest.mark.parametrize(
    ("factory", "state", "workspace"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True), 1, 0),
        (lambda p: torch.optim.AdamW(p, foreach=True), 2, 1),
        (None, 0, 0),
    ],
)
def test_optimizers_are_counted(
    factory: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None, state: int, workspace: int
) -> None:
    profile = probe(SUBJECTS["images"], factory)
    n = profile.gradients_nbytes
    assert profile.optimizer.state == state * n
    assert profile.optimizer.workspace == pytest.approx(workspace * n, abs=0.02 * n)


class Asking(nn.Linear):
    """Looks at values on its way, as models do that leave out masks which hide nothing, or that look for NaN."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        assert not torch.isnan(given).any(), "NaN"
        result = super().forward(given)
        return result if (given == given).all() else torch.cat([result, result])


def test_questions_about_values_are_answered_where_there_are_none() -> None:
    def build(device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model, given = Asking(256, 512, device=device), torch.ones(64, 256, device=device)
        return model, lambda wrapped: wrapped(given).square().sum()

    found, real = probe(build), probe(build, device=CPU)
    assert len(found.arrivals) == 2 and highest(found) == pytest.approx(highest(real), rel=0.01)


def test_a_model_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the step has no gradients: expected a model with parameters"):
        Profile(0, (), Moment(0))


# ------------------------------------------------------------------------------------------------- the arithmetic


def small(activations: int = 100 * MIB, layers: int = 4, optimizer: OptimizerCost | None = None) -> Profile:
    """Layers of 10 M elements; activations go linearly, and each gradient is 40 MB of its own until it is taken."""
    numel, nbytes = 10_000_000, 40_000_000
    arrivals = []
    for index in range(layers):
        left = activations * (layers - index) // layers
        moment = Moment(left, nbytes)
        arrivals.append(Arrival(f"layer.{index}", numel, nbytes, moment, moment))
    return Profile(layers * nbytes, tuple(arrivals), Moment(MIB), optimizer or OptimizerCost())


def test_ddp_is_weights_gradients_state_and_the_fullest_moment() -> None:
    found = predict(small(), "ddp", Setting(blas_workspace=0))
    assert found.kinds["weights"] == 160_000_000 and found.kinds["gradients"] == 160_000_000 + 40_000_000
    assert found.nbytes == 360_000_000 + 100 * MIB and found.at == "until the gradient of layer.0"
    assert list(found.kinds) == list(KINDS)


def test_ballooning_is_where_activations_are_gone() -> None:
    found = {mode: predict(small(activations=MIB), mode, Setting(ranks=4, blas_workspace=0)) for mode in MODES}
    n = 160_000_000
    assert found["naive sparse"].at in ("selection", "decompression")
    assert found["naive sparse"].nbytes >= 5 * n > found["ddp"].nbytes
    # weights, residual, owners' sums (with 4 ranks as wide as the bucket), and two slots of a quarter
    lean = found["lean"].kinds
    assert (lean["weights"], lean["residual"], lean["gradients"]) == (n, n, n // 2 + 40_000_000)
    assert found["lean, host"].kinds["residual"] == n // 2 and found["lean, host"].host == n
    assert found["lean, host"].nbytes < found["lean"].nbytes < found["oktopk"].nbytes


def test_with_many_ranks_owners_hold_little() -> None:
    few, many = (predict(small(), "oktopk", Setting(ranks=ranks)) for ranks in (4, 64))
    assert few.nbytes - many.nbytes == pytest.approx(40_000_000 * (1 - 4 / 64), rel=0.02)


def test_an_optimizers_step_can_be_the_fullest_moment() -> None:
    found = predict(small(activations=0, optimizer=OptimizerCost(320_000_000, 160_000_000)), "ddp")
    assert found.at == "optimizer step" and found.kinds["optimizer state"] == 320_000_000


def test_a_plans_buckets_are_taken_and_unknown_names_refused() -> None:
    one = [[f"layer.{index}" for index in range(4)]]
    assert predict(small(), "lean", Setting(buckets=one)).kinds["gradients"] >= 2 * 160_000_000
    with pytest.raises(ValueError, match=r"a bucket names layer\.9, which has no gradient in this step"):
        predict(small(), "lean", Setting(buckets=[["layer.9"]]))


def test_buckets_close_at_their_size_and_vectors_keep_apart() -> None:
    profile = probe(SUBJECTS["images"])
    buckets = by_bytes(profile, 64 * 1024, sparsely=True)
    assert sorted(index for bucket in buckets for index in bucket.arrivals) == list(range(len(profile.arrivals)))
    assert all(profile.arrivals[index].sparse == bucket.sparse for bucket in buckets for index in bucket.arrivals)
    assert {bucket.sparse for bucket in by_bytes(profile, 64 * 1024, sparsely=False)} == {False}


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


# ---------------------------------------------------------------------------------------------- the largest batch


@pytest.mark.parametrize(("fixed", "each", "limit"), [(10, 3, 100), (0, 1, 7), (5, 2, 5), (99, 1, 50), (10, 1, 10_000)])
def test_the_largest_batch_fits_and_the_next_does_not(fixed: int, each: int, limit: int) -> None:
    looked: list[int] = []

    def nbytes(batch: int) -> int:
        looked.append(batch)
        return fixed + each * batch + (batch % 3 == 0)  # nearly a line

    found = largest_batch(nbytes, limit)
    naive = max((batch for batch in range(limit + 2) if fixed + each * batch + (batch % 3 == 0) <= limit), default=0)
    assert abs(found - naive) <= 1 and (found == 0 or nbytes(found) <= limit)
    assert len(looked) <= 10


@pytest.mark.parametrize(("flat", "limit"), [(0, 1000), (600, 1000), (999, 1000), (2000, 1000)])
def test_where_looks_are_dear_nearly_the_largest_will_do(flat: int, limit: int) -> None:
    looked: list[int] = []

    def nbytes(batch: int) -> int:
        """Does not grow at first; too much is not known any better."""
        looked.append(batch)
        found = max(flat, 10 + 3 * batch)
        return found if found <= limit else 2 * limit

    found = largest_batch(nbytes, limit, enough_nbytes=0.95 * limit, growth=4)
    looks = list(looked)
    assert found == 0 if flat > limit else 0.95 * limit <= nbytes(found) <= limit
    for at, batch in enumerate(looks):
        assert batch <= max([8, *(4 * before for before in looks[:at] if nbytes(before) <= limit)])
    assert len(looks) == len(set(looks)) <= 12


def test_a_batch_without_bound_ends_somewhere() -> None:
    assert largest_batch(lambda batch: 1, 10, most=1000) == 1000
