"""LaySA's figures: what is not measured says so, and what is predicted is called that."""

import pytest
import torch
from benchmarks.papers import laysa
from torch import nn

from anabranch.tools.bench import zoo
from anabranch.tools.predict.memory.estimator import OPTIMIZERS, with_recomputation
from anabranch.tools.predict.memory.probe import Loss, probe
from anabranch.tools.predict.memory.training_modes import LEAN_INT8, NAIVE, predict
from tools.predict.memory.models import images


def test_headlines_are_measured_and_say_on_what() -> None:
    section = laysa.headlines()
    assert "benchmarks/lean_h200_2026-11-15.md" in section.how and "one NVIDIA H200" in section.how
    memory, offloaded, mix, slow, faster = section.figures
    assert memory.ours == 82.0
    assert offloaded.ours == pytest.approx(100 * (1 - 820.7 / 1468.7))
    assert mix.ours == pytest.approx(100 * (1 - 206.7 / 1468.7))
    assert slow.ours == pytest.approx(1053) and faster.ours == pytest.approx(739)
    assert [figure.published for figure in section.figures] == [80.5, 12.25, 12.25, 150.0, 150.0]


def test_memory_beside_activations() -> None:
    section = laysa.without_activations()
    assert "predicted" in section.how and "not measured" in section.how
    rows = {(row.case, row.what): row for row in section.figures}
    for model in laysa.MODELS:
        naive = rows[model, "naive sparse over dense"].ours
        assert naive is not None and 1.5 < naive < 2.5  # 3n becomes 6n, and a little
    # One gradient of VGG-16 is 74 % of it: Lean's slots are not much smaller than what they replace.
    for mode in ("lean", "lean, residuals int8"):
        row = rows["vgg16", f"{mode}: saved over naive sparse"]
        assert row.ours is not None and row.ours < 25
        saved = rows["bert-large", f"{mode}: saved over naive sparse"].ours
        assert saved is not None and 30 < saved < 80


@pytest.mark.slow
def test_whole_steps_are_predicted_where_torchvision_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(name: str, device: torch.device, batch: int) -> tuple[nn.Module, Loss]:
        return images(2)(device)

    monkeypatch.setattr(zoo, "model_and_loss", built)
    monkeypatch.setattr(laysa, "find_spec", lambda name: object())
    momentum = OPTIMIZERS["momentum"]
    lean = predict(probe(with_recomputation(images(2)), momentum), LEAN_INT8, laysa.SETTING).nbytes
    naive = predict(probe(images(2), momentum), NAIVE, laysa.SETTING).nbytes
    for row in laysa.with_activations().figures:
        assert row.ours == pytest.approx(100 * (1 - lean / naive))
        assert row.word.startswith("predicted, not measured")


def test_without_torchvision_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laysa, "find_spec", lambda name: None)
    for row in laysa.with_activations().figures:
        assert row.ours is None and "torchvision is not installed" in row.word
