"""The layout of a model under Lean: every change of the wrapped module's parts or parameters is noticed."""

import torch
from torch import nn

from anabranch.lean.layout import ModuleFingerprint, trained_parameters


def test_a_fingerprint_notices_every_change_but_new_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    fingerprint = ModuleFingerprint(model)
    assert fingerprint.unchanged()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert fingerprint.unchanged()
    inner = model[1]
    assert isinstance(inner, nn.Sequential)
    inner.append(nn.Linear(2, 2))
    assert not fingerprint.unchanged()
    assert ModuleFingerprint(model).unchanged()


def test_a_fingerprint_notices_freezing_and_another_dtype() -> None:
    model = nn.Linear(2, 2)
    fingerprint = ModuleFingerprint(model)
    model.bias.requires_grad_(False)
    assert not fingerprint.unchanged()
    model.bias.requires_grad_(True)
    assert fingerprint.unchanged()
    model.to(torch.float64)
    assert not fingerprint.unchanged()


def test_trained_parameters_are_those_that_need_gradients_and_are_synchronised() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["c"] = model["a"]  # shared
    model["b"].bias.requires_grad_(False)
    assert list(trained_parameters(model)) == ["a.weight", "a.bias", "b.weight"]
    model._ddp_params_and_buffers_to_ignore = ["a.bias"]  # type: ignore[assignment] # the name that torch defines
    assert list(trained_parameters(model)) == ["a.weight", "b.weight"]
