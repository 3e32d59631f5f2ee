"""What a probe finds: tensors without data against real ones, and against the allocator of real runs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from anabranch.planning.footprint import StepProfile
from anabranch.tools.predict.memory import probe as probing
from anabranch.tools.predict.memory.probe import Build, probe
from tools.predict.memory.models import images, language

CPU = torch.device("cpu")
SUBJECTS = {"images": images(8), "language": language(4), "recomputed": language(4, recompute=True)}


def peak_nbytes(profile: StepProfile) -> int:
    return max(gradient.peak_before.nbytes for gradient in profile.gradients)


def as_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    none: Callable[[], AbstractContextManager[None]] = nullcontext
    monkeypatch.setattr(probing, "saving_as_on_gpu", none)


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


@pytest.mark.parametrize("name", ["images", "recomputed"])
def test_tensors_without_data_live_as_real_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_cpu(monkeypatch)
    real, empty = (probe(SUBJECTS[name], device=device) for device in (CPU, probing.META))
    # Dropout's mask and attention's sums are the two things in which the meta device differs from a CPU by itself.
    assert [gradient.name for gradient in empty.gradients] == [gradient.name for gradient in real.gradients]
    assert empty.weights_nbytes == real.weights_nbytes and empty.after_backward == real.after_backward
    assert peak_nbytes(empty) == pytest.approx(peak_nbytes(real), rel=0.01)


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_real_run_allocates_what_was_predicted(name: str) -> None:
    predicted = probe(SUBJECTS[name], convolution_workspace=0.0)
    batch = predicted.after_backward.nbytes  # is there before the step
    assert peak_nbytes(predicted) - batch == pytest.approx(allocated(SUBJECTS[name]), rel=0.1)


def test_nothing_of_a_probe_stays() -> None:
    before = nn.functional.dropout, nn.functional.scaled_dot_product_attention
    first, second = probe(SUBJECTS["language"]), probe(SUBJECTS["language"])
    assert first == second
    assert before == (nn.functional.dropout, nn.functional.scaled_dot_product_attention)


def test_gradients_come_in_the_order_of_backward_and_frozen_ones_never() -> None:
    names = [gradient.name for gradient in probe(SUBJECTS["language"]).gradients]
    assert names[-1] == "embedding.weight"  # tied: whole only when both its uses are through
    assert not any("frozen" in name for name in names) and len(set(names)) == len(names)
    vectors = {gradient.name for gradient in probe(SUBJECTS["images"]).gradients if not gradient.sparse}
    assert {"0.bias", "1.norms.0.weight"} <= vectors and "0.weight" not in vectors


def test_dropout_keeps_a_byte_and_attention_no_probabilities_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    like = peak_nbytes(probe(SUBJECTS["language"]))
    as_on_cpu(monkeypatch)
    assert like < 0.95 * peak_nbytes(probe(SUBJECTS["language"]))


class GroupedAttention(nn.Module):
    """Attention of 8 heads of queries that share 2 of keys; ``repeated``: each key is copied for its queries before."""

    def __init__(self, repeated: bool) -> None:
        super().__init__()
        self.repeated = repeated
        self.q, self.k, self.v = (nn.Linear(64, heads * 8, bias=False) for heads in (8, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.repeated:
            k, v = (t.repeat_interleave(4, dim=1) for t in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeated)
        return mixed.transpose(1, 2).flatten(2).square()


def grouped(repeated: bool = False) -> Build:
    def build(device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model, given = GroupedAttention(repeated).to(device), torch.ones(4, 256, 64, device=device)
        return model, lambda wrapped: wrapped(given).sum()

    return build


def test_grouped_attention_keeps_all_probabilities_in_float32_as_on_a_gpu() -> None:
    with sdpa_kernel(SDPBackend.MATH):  # which CUDA takes: of its fused kernels only FlashAttention knows groups
        real_nbytes = allocated(grouped())
    found = probe(grouped())
    assert peak_nbytes(found) - found.after_backward.nbytes == pytest.approx(real_nbytes, rel=0.1)
    probabilities_nbytes = 4 * 8 * 256 * 256 * 4
    assert peak_nbytes(found) > peak_nbytes(probe(grouped(repeated=True))) + probabilities_nbytes


def test_grouped_attention_in_bfloat16_keeps_neither_probabilities_nor_copies_of_keys_as_on_a_gpu() -> None:
    found, repeated = (peak_nbytes(probe(grouped(repeated), half=True)) for repeated in (False, True))
    more_nbytes = 2 * 4 * 256 * (64 - 16) * 2  # keys and values for 8 heads, in place of 2, in bfloat16
    assert repeated - found == more_nbytes


def test_recomputed_activations_take_less() -> None:
    kept, recomputed = peak_nbytes(probe(SUBJECTS["language"])), peak_nbytes(probe(SUBJECTS["recomputed"]))
    assert recomputed < 0.75 * kept


def test_optimizers_are_counted() -> None:
    cases: list[tuple[Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None, int, int]] = [
        (lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True), 1, 0),
        (lambda p: torch.optim.AdamW(p, foreach=True), 2, 1),
        (None, 0, 0),
    ]
    for factory, state, workspace in cases:
        profile = probe(SUBJECTS["images"], factory)
        n = profile.gradients_nbytes
        assert profile.optimizer.state_nbytes == state * n
        assert profile.optimizer.workspace_nbytes == pytest.approx(workspace * n, abs=0.02 * n)


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
    assert len(found.gradients) == 2 and peak_nbytes(found) == pytest.approx(peak_nbytes(real), rel=0.01)
