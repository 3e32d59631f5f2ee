"""Parameters that are frozen after wrapping: on all ranks nothing is lost, on some ranks all get an error."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from lean.launches import each_on_ranks
from ranks import on_ranks

ROWS, COLUMNS = 12, 25
NAMES = ("first", "second")
DENSE = ab.Plan((ab.Bucket(("second",)), ab.Bucket(("first", "third"), 1)))
SPARSE = ab.Plan((ab.Bucket(("second", "first"), collective="oktopk:0.1"), ab.Bucket(("third",))))


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


class Sums(nn.Module):
    """Matrices whose gradients are what they are multiplied by: with a rate of 1, weights are the sum of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(3))

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        weights = (self.first, self.second, self.third)
        return torch.stack([(w * g).sum() for w, g in zip(weights, gradients, strict=True)]).sum()


def drawn(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, ROWS, COLUMNS, generator=torch.Generator().manual_seed(10 * step + rank)) ** 3


def wrapped(model: nn.Module, plan: ab.Plan, residuals: Any = "in place", **options: Any) -> Any:
    compress = ab.OkTopk(0.1, warmup_steps=0, deterministic=True) if plan is SPARSE else None
    memory = ab.Lean(sgd, residuals=residuals)
    return ab.DataParallel(model, plan=plan, compress=compress, profile_steps=0, memory=memory, **options)


# --------------------------------------------------------------------------------------------------- on some ranks


def frozen_on_some(rank: int, plan: str, ranks: Sequence[int], find_unused: bool) -> list[Any]:
    model = Sums()
    lean = wrapped(model, SPARSE if plan == "sparse" else DENSE, find_unused_parameters=find_unused)
    for step in range(2):
        lean(drawn(step, rank)).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.first.requires_grad_(rank not in ranks)
    with pytest.raises(ab.DisagreementError) as caught:
        lean(drawn(2, rank)).backward()
    updated = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    weights = torch.stack([parameter.detach() for parameter in model.parameters()])
    theirs = weights.clone()
    dist.broadcast(theirs, 0)
    with pytest.raises(RuntimeError, match="broken off"):
        lean(drawn(3, rank))
    lean.close()
    return [str(caught.value), any(updated), torch.equal(theirs, weights)]


def test_freezing_on_some_ranks_is_an_error_on_all_before_any_update() -> None:
    scenarios = [("dense", [1], False), ("sparse", [0], False), ("sparse", [0, 2], True), ("dense", [2], True)]
    for scenario, answers in zip(scenarios, each_on_ranks(frozen_on_some, 3, scenarios), strict=True):
        ranks = scenario[1]
        for words, updated, same in answers:
            assert "which parameters are frozen (no rank has updated anything in this step) is not the same" in words
            assert f"rank 0 has 'first with requires_grad={0 not in ranks}'" in words
            assert not updated and same


# ---------------------------------------------------------------------------------------------------- on all ranks


def frozen_for_a_while(rank: int, residuals: str, find_unused: bool) -> dict[str, Any]:
    """``first`` is frozen in steps 3 to 5, and trained again: the weights, and what is still in residuals."""
    model = Sums()
    lean = wrapped(model, SPARSE, residuals, find_unused_parameters=find_unused)
    kept = {}
    given = torch.zeros(3, ROWS, COLUMNS)
    for step in range(9):
        model.first.requires_grad_(step not in (3, 4, 5))
        made = drawn(step, rank)
        if step in (3, 4, 5):
            before = model.first.detach().clone()
        lean(made).backward()
        if step in (3, 4, 5):
            assert torch.equal(model.first, before)
            made[0] = 0
        given += made
        kept[step] = lean.comm_state_dict()["residuals"]
    for step in (3, 4, 5):
        assert torch.equal(kept[step]["first"], kept[2]["first"]), "what waits for a frozen parameter waits on"
    assert not torch.equal(kept[6]["first"], kept[2]["first"])
    left = {name: kept[8].get(name, torch.zeros(ROWS * COLUMNS)).view(ROWS, COLUMNS) for name in NAMES}
    weights = {name: getattr(model, name).detach().clone() for name in (*NAMES, "third")}
    lean.close()
    return {"given": given, "left": left, "weights": weights}


def test_nothing_is_lost_while_a_parameter_is_frozen_on_all_ranks() -> None:
    for answers in each_on_ranks(frozen_for_a_while, 2, [("in place", False), ("in place", True)]):
        for index, name in enumerate((*NAMES, "third")):
            assert torch.equal(answers[0]["weights"][name], answers[1]["weights"][name])
            total = sum(answer["given"][index].double() for answer in answers)
            left = sum(answer["left"][name].double() for answer in answers) if name in NAMES else 0.0
            torch.testing.assert_close(-2 * answers[0]["weights"][name].double() + left, total, rtol=1e-4, atol=1e-4)


def saved_while_frozen(rank: int) -> list[Any]:
    """A checkpoint made while a parameter is frozen holds its residual, whether it is frozen or not when loaded."""
    model = Sums()
    lean = wrapped(model, SPARSE)
    for step in range(4):
        model.first.requires_grad_(step < 3)
        lean(drawn(step, rank)).backward()
    kept = lean.comm_state_dict()
    lean.close()
    again = []
    for trained in (True, False):
        model = Sums()
        model.first.requires_grad_(trained)
        plan = SPARSE if trained else ab.Plan((ab.Bucket(("second",), collective="oktopk:0.1"), ab.Bucket(("third",))))
        lean = ab.DataParallel(
            model, plan=plan, compress=ab.OkTopk(0.1, warmup_steps=0), profile_steps=0, memory=ab.Lean(sgd)
        )
        lean.load_comm_state_dict(kept)
        again.append(torch.equal(lean.comm_state_dict()["residuals"]["first"], kept["residuals"]["first"]))
        lean(drawn(4, rank)).backward()
        now = lean.comm_state_dict()["residuals"]["first"]
        again.append(torch.equal(now, kept["residuals"]["first"]) != trained)
        lean.close()
    return again


def test_a_checkpoint_holds_the_residual_of_a_frozen_parameter() -> None:
    assert on_ranks(saved_while_frozen, 2) == [[True] * 4] * 2


def toggled(rank: int) -> bool:
    """Two parts in turn, as adversarial networks are trained; what was added up under no_sync() waits, too."""
    ours, theirs = Sums(), Sums()
    lean = wrapped(ours, DENSE)
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    optimizer = sgd(list(theirs.parameters()))
    for step in range(6):
        for model in (ours, theirs):
            model.first.requires_grad_(step % 2 == 0)
            model.third.requires_grad_(step % 2 == 1)
        lean(drawn(step, rank)).backward()
        optimizer.zero_grad()
        ddp(drawn(step, rank)).backward()
        optimizer.step()
    same = all(torch.allclose(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    lean.close()
    return same


def test_parts_that_are_frozen_in_turn_train_as_under_ddp() -> None:
    assert on_ranks(toggled, 2) == [True, True]


def accumulated_then_frozen(rank: int, plan: str) -> list[torch.Tensor]:
    model = Sums()
    lean = wrapped(model, SPARSE if plan == "sparse" else DENSE)
    with lean.no_sync():
        lean(drawn(0, rank)).backward()
    model.first.requires_grad_(False)
    lean(drawn(1, rank)).backward()
    frozen = model.first.detach().clone()
    waiting = model.first.grad is not None
    model.first.requires_grad_(True)
    lean(drawn(2, rank)).backward()
    left = lean.comm_state_dict().get("residuals", {}).get("first", torch.zeros(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    answer = [frozen, torch.tensor(waiting), model.first.detach().clone(), left]
    lean.close()
    return answer


def test_gradients_added_up_before_freezing_come_when_it_is_trained_again() -> None:
    total = sum(drawn(step, rank)[0].double() for step in (0, 2) for rank in range(2))
    for answers in each_on_ranks(accumulated_then_frozen, 2, [("dense",), ("sparse",)]):
        assert all(not frozen.any() and waiting for frozen, waiting, _, _ in answers)
        accounted = -2 * answers[0][2].double() + sum(left.double() for _, _, _, left in answers)
        torch.testing.assert_close(accounted, total, rtol=1e-4, atol=1e-4)


def at_random(rank: int, seeds: Sequence[int]) -> list[list[torch.Tensor]]:
    """Freezing, training again, no_sync() and other plans, in any order; what was given, is left, and was applied."""
    answers = []
    names = (*NAMES, "third")
    mixed = ab.Plan((ab.Bucket(("first",), collective="oktopk:0.1"), ab.Bucket(("second", "third"))))
    for seed in seeds:
        chance = random.Random(seed)
        model = Sums()
        lean = wrapped(model, SPARSE, find_unused_parameters=chance.random() < 0.3)
        given = torch.zeros(3, ROWS, COLUMNS, dtype=torch.float64)
        for step in range(10):
            for name in NAMES if chance.random() < 0.4 else ():
                getattr(model, name).requires_grad_(step == 9 or chance.random() < 0.6)
            if chance.random() < 0.15:
                lean._tuner.runner.use_plan(chance.choice([SPARSE, mixed]))
            for index, name in enumerate(names):
                given[index] += drawn(step, rank)[index] if getattr(model, name).requires_grad else 0.0
            with lean.no_sync() if step < 9 and chance.random() < 0.25 else nullcontext():
                lean(drawn(step, rank)).backward()
        waiting = lean.comm_state_dict()["residuals"]
        left = [waiting.get(name, torch.zeros(ROWS * COLUMNS)).view(ROWS, COLUMNS) for name in names]
        unsent = [p.grad if p.grad is not None else torch.zeros(ROWS, COLUMNS) for p in model.parameters()]
        answers.append([given, torch.stack(left) + torch.stack(unsent), torch.stack(list(model.parameters())).detach()])
        lean.close()
    return answers


def test_nothing_is_lost_in_random_sequences() -> None:
    for one, other in zip(*on_ranks(at_random, 2, range(5)), strict=True):
        assert torch.equal(one[2], other[2])
        accounted = one[1].double() + other[1].double() - 2 * one[2].double()
        torch.testing.assert_close(accounted, one[0] + other[0], rtol=1e-4, atol=1e-4)
