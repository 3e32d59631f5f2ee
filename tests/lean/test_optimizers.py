"""One optimizer per bucket: groups as the user sees them, and optimizers that cannot be split are refused."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from lean.launches import Answers
from ranks import cases_on_ranks, on_ranks


def by_place(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": list(parameters[:-1]), "lr": 0.0}, {"params": list(parameters[-1:]), "lr": 1.0}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)


def grouped(rank: int) -> None:
    """A function that groups parameters by their places: what the user sees is what is done."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    plan = ab.Plan((ab.Bucket(("3.weight", "2.weight", "1.weight")), ab.Bucket(("0.weight",))))
    lean: Any = ab.DataParallel(model, plan=plan, profile_steps=0, memory=ab.Lean(by_place))
    rates = {id(p): group["lr"] for group in lean.optimizer.param_groups for p in group["params"]}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    lean(torch.ones(2, 4)).sum().backward()
    for name, parameter in model.named_parameters():
        assert bool((before[name] != parameter).any()) == (rates[id(parameter)] > 0), name
    lean.close()


def test_groups_are_those_that_the_user_sees(launched: Answers) -> None:
    assert "grouped" in launched  # its own assertions hold on every rank


def refusals(rank: int) -> list[str]:
    model, answers = nn.Linear(4, 4), []
    same = torch.optim.SGD(model.parameters(), lr=0.1)
    factories: list[Any] = [lambda _: same, lambda p: torch.optim.LBFGS(p), lambda _: "none"]
    for factory in factories:
        try:
            ab.DataParallel(model, profile_steps=0, memory=ab.Lean(factory))(torch.ones(1, 4)).sum().backward()
        except ValueError as error:
            answers.append(str(error))
    return answers


def test_optimizers_that_cannot_work_are_refused() -> None:
    answers = on_ranks(refusals, 1)[0]
    twice, closure, no_optimizer = answers
    assert "twice" in twice and "closure" in closure and "expected a torch.optim.Optimizer" in no_optimizer


def rates_differ(rank: int) -> str:
    with pytest.raises(ab.DisagreementError) as caught:
        ab.DataParallel(nn.Linear(4, 4), memory=ab.Lean(lambda params: torch.optim.SGD(params, lr=0.1 * (1 + rank))))
    return str(caught.value)


class Odd(torch.optim.SGD):
    """With a setting that lies elsewhere in memory on every rank."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=torch.tensor(0.1))
        for group in self.param_groups:
            group["shape"] = lambda x: x


def odd_settings(rank: int) -> None:
    keep = [object() for _ in range(100 * rank)]  # other places in memory
    ab.DataParallel(nn.Linear(4, 4), memory=ab.Lean(Odd)).close()
    assert len(keep) == 100 * rank


def test_settings_are_compared_by_value(launched: Answers) -> None:
    assert "odd_settings" in launched  # its own assertions hold on every rank


def test_ranks_must_have_the_same_optimizer(launched: Answers) -> None:
    for answers in launched["rates_differ"]:
        assert "Lean's optimizer" in answers and "lr 0.1" in answers and "lr 0.2" in answers


@pytest.fixture(scope="module")
def launched() -> Answers:
    """What each scenario of this file returns on each rank, in one launch."""
    return cases_on_ranks({one.__name__: (one,) for one in SCENARIOS}, 2, timeout_s=240.0)


SCENARIOS: tuple[Callable[[int], object], ...] = (
    grouped,
    odd_settings,
    rates_differ,
)
