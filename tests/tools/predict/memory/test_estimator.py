"""MemoryEstimator: the example of its documentation, and each batch probed once."""

import doctest
from collections.abc import Callable

import pytest
import torch
from torch import nn

from anabranch.planning.footprint import Setting, StepProfile
from anabranch.tools.predict.memory import estimator
from anabranch.tools.predict.memory.estimator import ActivationMode, MemoryEstimator
from anabranch.tools.predict.memory.fitting import largest_batches
from anabranch.tools.predict.memory.probe import Build, Loss, probe
from anabranch.tools.predict.memory.training_modes import DEFAULT_MODES, predict
from anabranch.tools.predict.scaling import strategy_kinds
from tools.predict.memory.models import images


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)  # type: ignore[arg-type]


def counted(looks: list[int]) -> Callable[[int], Build]:
    def build_at(batch: int) -> Build:
        looks.append(batch)
        return images(batch)

    return build_at


def test_the_example_of_the_documentation_is_true() -> None:
    assert doctest.testmod(estimator) == doctest.TestResults(failed=0, attempted=4)


def test_each_batch_is_probed_once() -> None:
    looks: list[int] = []
    found = MemoryEstimator(counted(looks), sgd)
    footprints = found.footprints(4, Setting(ranks=8))
    assert looks == [4] and list(footprints) == list(DEFAULT_MODES)
    assert footprints["lean"] == predict(probe(images(4), sgd), "lean", Setting(ranks=8))
    largest = found.largest_batch("ddp", Setting(), 100 << 20)
    assert largest > 0 and len(looks) == len(set(looks))


def test_only_lean_modes_keep_activations_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = MemoryEstimator(images, sgd, "recompute")
    profile, asked = found._profile, list[str]()

    def spied(batch: int, activations: ActivationMode) -> StepProfile:
        asked.append(activations)
        return profile(batch, activations)

    monkeypatch.setattr(found, "_profile", spied)
    found.footprints(4, Setting())
    assert asked == ["recompute" if mode.startswith("lean") else "keep" for mode in DEFAULT_MODES]


def test_strategies_that_do_not_fit_are_left_out() -> None:
    found = largest_batches(MemoryEstimator(images, sgd), {"optimal": "dense"}, 1 << 20, 4, "sgd")
    assert found.batches == {}
    assert "left out, since not even one sample fits: optimal" in found.assumptions
    both = largest_batches(MemoryEstimator(images, sgd), {"optimal": "dense", "lean:0.01": "lean"}, 100 << 20, 4, "sgd")
    assert set(both.batches) == {"optimal", "lean:0.01"} and all(both.batches.values())
    assert "memory: sgd as the optimizer" in both.assumptions


def wide(batch: int) -> Build:
    """Many weights and few activations: 67 MB in three buckets, so that a residual counts more than messages do."""

    def build(device: torch.device) -> tuple[nn.Module, Loss]:
        model = nn.Sequential(*(nn.Linear(1024, 1024, device=device) for _ in range(16)))
        return model, lambda wrapped: wrapped(torch.ones(batch, 1024, device=device)).sum()

    return build


def test_auto_has_room_for_the_residual_of_int4() -> None:
    names = ["bf16", "int8", "int4", "auto", "auto:int8", "lean:int4", "lean:auto"]
    found = largest_batches(MemoryEstimator(wide, sgd), strategy_kinds([], names), 400 << 20, 4, "sgd").batches
    assert found["auto"] == found["int4"] < found["bf16"] == found["auto:int8"] <= found["int8"]
    assert found["lean:auto"] == found["lean:int4"] > found["int4"]
