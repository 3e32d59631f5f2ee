"""A model under Lean: every change of the wrapped module's parts or parameters is noticed."""

import gc
import threading
import weakref
from functools import partial
from unittest import mock

import torch
from torch import nn

import anabranch as ab
from anabranch.lean.trained_model import TrainedModel, trained_parameters
from anabranch.tuning.tuner import Tuner
from ranks import on_ranks


def test_it_notices_every_change_but_new_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    trained = TrainedModel(model)
    assert trained.unchanged()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert trained.unchanged()
    inner = model[1]
    assert isinstance(inner, nn.Sequential)
    inner.append(nn.Linear(2, 2))
    assert not trained.unchanged()
    assert TrainedModel(model).unchanged()


def test_it_notices_freezing_and_another_dtype() -> None:
    model = nn.Linear(2, 2)
    trained = TrainedModel(model)
    model.bias.requires_grad_(False)
    assert not trained.unchanged()
    model.bias.requires_grad_(True)
    assert trained.unchanged()
    model.to(torch.float64)
    assert not trained.unchanged()


def test_trained_parameters_are_those_that_need_gradients_and_are_synchronised() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["c"] = model["a"]  # shared
    model["b"].bias.requires_grad_(False)
    assert list(trained_parameters(model)) == ["a.weight", "a.bias", "b.weight"]
    model._ddp_params_and_buffers_to_ignore = ["a.bias"]  # type: ignore[assignment] # the name that torch defines
    assert list(trained_parameters(model)) == ["a.weight", "b.weight"]


def closed(rank: int) -> list[bool]:
    """After close() nothing of the engine is left, and the module's parameters have no hooks."""
    module = nn.Linear(3, 3)
    lean = ab.LeanDataParallel(module, memory=ab.Lean(optimizer=partial(torch.optim.SGD, lr=0.1)), profile_steps=0)
    lean(torch.ones(2, 3)).sum().backward()
    layout = weakref.ref(lean.layout)
    lean.close()
    lean.close()
    gc.collect()
    return [layout() is None, not any(p._post_accumulate_grad_hooks for p in module.parameters())]


def test_close_frees_slots_and_optimizer_state() -> None:
    assert on_ranks(closed, 2) == [[True, True]] * 2


def broken(rank: int) -> list[object]:
    """A constructor that fails behind the engine leaves no hook on the module, which can be wrapped again."""
    module, memory = nn.Linear(3, 3), ab.Lean(optimizer=partial(torch.optim.SGD, lr=0.1))
    with mock.patch.object(Tuner, "_tuning", side_effect=RuntimeError("planted")):
        try:
            ab.LeanDataParallel(module, memory=memory)
        except RuntimeError as error:
            said = str(error)
    hooked = any(p._post_accumulate_grad_hooks for p in module.parameters())
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("anabranch")]
    ab.LeanDataParallel(module, memory=memory).close()
    return [said, hooked, threads]


def test_a_constructor_that_fails_leaves_nothing_behind() -> None:
    assert on_ranks(broken, 2) == [["planted", False, []]] * 2
