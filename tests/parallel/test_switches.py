"""ANABRANCH=off: a switch without code, of which rank 0's counts."""

import os
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel, Lean, OkTopk
from parallel.twins import different, dtypes_of, mlp, plain_train, scatter, sgd
from ranks import on_ranks


def turned_off(rank: int, init_sync: bool) -> dict[str, Any]:
    """Rank 0 turns it off; a setting of rank 1 that would be refused does not matter then."""
    os.environ["ANABRANCH"] = "Off" if rank == 0 else ""
    torch.manual_seed(3)
    theirs, ours = mlp(), mlp()
    ours.load_state_dict(theirs.state_dict())
    options: dict[str, Any] = {"compress": OkTopk(0.1 + 0.1 * rank), "plan": scatter(dtypes_of(mlp()))}
    models = [DistributedDataParallel(theirs), DataParallel(ours, init_sync=init_sync, **options)]
    for step in range(8):
        for model in models:
            plain_train(model, sgd(model), step)
    wrapped = models[1]
    assert isinstance(wrapped, DataParallel)
    return {
        "apart": different(models[0], wrapped, 0.0),
        "explained": wrapped.explain(),
        "plan": wrapped.plan is None,
        "state": wrapped.comm_state_dict(),
    }


def test_off_is_stock_ddp() -> None:
    for answer in on_ranks(turned_off, 2, True):
        assert answer["apart"] == [] and answer["plan"] and answer["state"] == {}
        assert answer["explained"].startswith("No plan: ANABRANCH=off turns it off. Gradients are averaged as under D")


def test_off_without_init_sync_is_agreed_in_the_first_step() -> None:
    for answer in on_ranks(turned_off, 2, False):
        assert answer["apart"] == [] and answer["plan"]
        assert answer["explained"].startswith("anabranch: not planning: ANABRANCH=off turns it off")


def lean_off(rank: int) -> tuple[str, bool]:
    os.environ["ANABRANCH"] = "off"
    memory = Lean(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    model: Any = DataParallel(mlp(), memory=memory, compress=OkTopk(0.1))
    for step in range(3):
        plain_train(model, model.optimizer, step)
    return model.explain(), bool(model.comm_state_dict())


def test_off_under_lean_sends_everything() -> None:
    for explained, keeps_residuals in on_ranks(lean_off, 2):
        assert "not planning: ANABRANCH=off turns it off" in explained and not keeps_residuals


def misspelt(rank: int) -> str:
    os.environ["ANABRANCH"] = "of" if rank == 0 else "off"
    with pytest.raises(ValueError) as caught:
        DataParallel(mlp())
    return str(caught.value)


def test_a_misspelt_switch_is_an_error_on_all_ranks() -> None:
    for said in on_ranks(misspelt, 2):
        assert said == "the environment variable ANABRANCH is 'of' on rank 0: expected off, or on"
