"""Within a budget: the fastest of all ways that fit, the same on all ranks, and an error where none fits."""

import math
import re
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import anabranch as ab
from activations.naive_solver import chains, every_choice, links, moves, played_extra_s, played_peak
from anabranch.activations.cost_model import BlockCosts, HostLink
from anabranch.activations.solver import BudgetError, choose_with_windows, smallest_budget
from anabranch.lean.within import ALIKE, MARGIN, Held, Storage, WithinBudget, check_fits, choose_within
from ranks import on_ranks

INF = math.inf


def brute_force_s(blocks: list[BlockCosts], link: HostLink, storages: list[Storage], budget_nbytes: int) -> float:
    """The least extra time over all ways to store residuals and all choices for activations; infinite if none fits."""
    room = int(budget_nbytes * (1 - MARGIN))
    windows = (link.window_nbytes or 0) + (link.ahead_nbytes or 0)
    backward_s = sum(block.backward_s for block in blocks)
    best = INF
    for actions in every_choice(blocks):
        moved = sum(sum(moves(blocks, actions, number)) for number in range(len(blocks)))
        peak, extra_s = played_peak(blocks, actions) + (windows if moved else 0), played_extra_s(blocks, link, actions)
        for storage in storages:
            if max(storage.held_nbytes + peak, storage.end_nbytes) <= room:
                over = storage.over_link_nbytes
                rate = min(link.out_nbytes_per_s, link.back_nbytes_per_s)
                waited_s = max(0.0, (over + moved) / rate - backward_s) if over else 0.0
                best = min(best, extra_s + storage.extra_s + waited_s)
    return best


def alike_s(blocks: list[BlockCosts]) -> float:
    """By how much the choice may be slower than the best."""
    return ALIKE * sum(block.forward_s + block.backward_s for block in blocks) + 1e-9


def storages_of(numel: int) -> list[Storage]:
    """Of a model whose residuals have so many elements."""
    return Held(20, 40, 4, numel, 1, averages_nbytes=10).storages(64.0, with_host=True)


@settings(max_examples=60, deadline=None)
@given(chains(3), links, st.integers(0, 40), st.integers(1, 500))
def test_the_choice_is_the_best_of_all(blocks: list[BlockCosts], link: HostLink, numel: int, budget: int) -> None:
    on_device = [storage for storage in storages_of(numel) if storage.residuals != "host"]
    best_s = brute_force_s(blocks, link, on_device, budget)
    if best_s == INF:
        with pytest.raises(BudgetError, match=f"within is {budget} bytes"):
            choose_within(blocks, link, on_device, budget)
    else:
        found = choose_within(blocks, link, on_device, budget)
        assert best_s - 1e-9 <= found.extra_s <= best_s + alike_s(blocks) and found.peak_nbytes <= budget * (1 - MARGIN)


@settings(max_examples=40, deadline=None)
@given(chains(3), links, st.integers(1, 40), st.integers(100, 500))
def test_host_memory_is_used_where_it_is_better(
    blocks: list[BlockCosts], link: HostLink, numel: int, budget: int
) -> None:
    """Copies of residuals and activations share the link, so the best for both together is not searched for."""
    everything = storages_of(numel)
    on_device = [storage for storage in everything if storage.residuals != "host"]
    best_s, without_s = (brute_force_s(blocks, link, storages, budget) for storages in (everything, on_device))
    if best_s < INF:
        found = choose_within(blocks, link, everything, budget)
        assert best_s - 1e-9 <= found.extra_s <= without_s + alike_s(blocks)


BLOCKS = [BlockCosts(f"{number}", 1.0, 2.0, 100, 10) for number in range(4)]
LINK = HostLink(1000.0, 1000.0, 0, 0)


def test_residuals_stay_exact_where_that_costs_nothing() -> None:
    held = Held(100, 200, 10, residual_numel=100, bucket_numel=2, compressed=True)
    roomy = choose_within(BLOCKS, LINK, held.storages(1e9, with_host=True), 10_000)
    assert roomy.residuals == "in place" and roomy.extra_s == 0.0
    assert set(roomy.choice.actions.values()) == {"keep"}
    assert roomy.peak_nbytes == 100 + 200 + 4 * 10 + 400 + 440
    tight = choose_within(BLOCKS, HostLink(1.0, 1.0, 0, 0), held.storages(1e9, with_host=True), 1_100)
    assert tight.residuals == "bf16" and set(tight.choice.actions.values()) == {"keep"}
    assert tight.tried["in place"] is not None and tight.tried["in place"] > tight.extra_s


def test_without_residuals_there_is_nothing_to_store() -> None:
    assert [storage.residuals for storage in Held(1, 1, 1).storages(1.0, with_host=True)] == ["in place"]


def test_the_error_names_the_least_that_would_do() -> None:
    storages = Held(1000, 0, 10, residual_numel=100, bucket_numel=2).storages(1e9, with_host=False)
    with pytest.raises(BudgetError, match="give at least") as caught:
        choose_within(BLOCKS, LINK, storages, 900)
    (least,) = re.findall(r"at least (\d+) bytes", str(caught.value))
    assert choose_within(BLOCKS, LINK, storages, int(least)).peak_nbytes <= int(least)
    with pytest.raises(BudgetError):
        choose_within(BLOCKS, LINK, storages, int(int(least) * 0.99))


def test_a_rank_that_needs_more_than_rank_0_says_so() -> None:
    storages = Held(100, 0, 0).storages(1e9, with_host=False)
    message = choose_within(BLOCKS, LINK, storages, 600).message(600)
    check_fits(message, BLOCKS, LINK, storages)
    larger = [BlockCosts(block.name, 1.0, 2.0, 200, 20) for block in BLOCKS]
    with pytest.raises(BudgetError, match="this rank would need 980"):
        check_fits(message, larger, LINK, storages)


@settings(max_examples=40, deadline=None)
@given(chains(3), links)
def test_what_is_hidden_costs_nothing_and_less_would(blocks: list[BlockCosts], link: HostLink) -> None:
    budget = smallest_budget(blocks, link, extra_s=0.0)
    assert choose_with_windows(blocks, link, budget).forecast.extra_s == 0.0
    if budget:
        with suppress(BudgetError):
            assert choose_with_windows(blocks, link, budget - 1).forecast.extra_s > 0.0


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


WIDTH = 32


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def batch(step: int, rank: int, rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained_within(rank: int, within: Any, compress: bool) -> tuple[str, str, list[torch.Tensor]]:
    """What was chosen, the explanation, and the weights."""
    model = made()
    options = ab.OkTopk(density=0.1, warmup_steps=0) if compress else None
    names = [name for name, _ in reversed(list(model.named_parameters()))]
    matrices = ab.Bucket(
        tuple(n for n in names if n.endswith("weight")), collective="oktopk:0.1" if compress else "dense"
    )
    plan = ab.Plan((matrices, ab.Bucket(tuple(n for n in names if n.endswith("bias")))))
    lean: Any = ab.DataParallel(model, plan=plan, compress=options, profile_steps=0, memory=ab.Lean(sgd, within=within))
    before = lean.explain()
    assert "within" not in before
    for step in range(6):
        lean(batch(step, rank)).square().mean().backward()
    chosen = str(lean._activations.agreed["residuals"])
    stored = {state.packed is None for state in lean._collectives._memory._state.buckets()} if compress else set()
    assert stored <= {chosen == "in place"}
    explained = lean.explain().splitlines()[-1]
    lean.close()
    return chosen, explained, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("compress", [True, False])
def test_ranks_train_by_one_choice(compress: bool) -> None:
    (chosen, explained, one), (other, _, two) = on_ranks(trained_within, 2, "1GiB", compress)
    assert chosen == other == "in place" and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert explained.startswith("within 1.00 GiB: residuals in place, blocks of activations: ")
    assert "predicted peak 0.00 GiB" in explained and ("otherwise: bf16" in explained) == compress


def weights_nbytes() -> int:
    return sum(p.nbytes for p in made().parameters())


def too_little(rank: int) -> str:
    lean: Any = ab.DataParallel(made(), profile_steps=0, memory=ab.Lean(sgd, within=2 * weights_nbytes()))
    for step in range(2):
        lean(batch(step, rank)).sum().backward()
    with pytest.raises(BudgetError, match="no mode keeps within it; give at least") as caught:
        lean(batch(9, rank))
    lean.close()
    return str(caught.value)


def test_a_budget_that_nothing_fits_is_an_error_on_every_rank() -> None:
    one, other = on_ranks(too_little, 2)
    assert one == other


def larger_batch(rank: int) -> str:
    """Rank 1's batch is eight times as large."""
    lean: Any = ab.DataParallel(made(), profile_steps=0, memory=ab.Lean(sgd, within=8 * weights_nbytes()))
    for step in range(2):
        lean(batch(step, rank, 64 + 448 * rank)).sum().backward()
    with pytest.raises((BudgetError, ab.DisagreementError)) as caught:
        lean(batch(9, rank))
    lean.close()
    return str(caught.value)


def test_a_rank_on_which_the_choice_does_not_fit_stops_all() -> None:
    zero, one = on_ranks(larger_batch, 2)
    assert "this rank would need" in one and "checking what rank 0 has chosen" in zero


def for_nothing(rank: int) -> dict[str, str]:
    lean: Any = ab.DataParallel(made(), profile_steps=0, memory=ab.Lean(sgd, activations="auto"))
    for step in range(4):
        lean(batch(step, rank)).sum().backward()
    assert lean._activations.choice.forecast.extra_s == 0.0
    actions = dict(lean._activations.actions)
    lean.close()
    return actions


def test_a_mix_for_nothing_needs_no_number() -> None:
    one, other = on_ranks(for_nothing, 2)
    assert one == other and "recompute" not in one.values()


def test_what_was_not_profiled_is_not_checked() -> None:
    budget = WithinBudget(1, lambda: Held(1, 1, 1), torch.device("cpu"))
    budget.check({"actions": {"0": "keep"}, "residuals": "in place", "within_nbytes": 1})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"within": "16"}, "Lean within is '16': expected a size in GiB"),
        ({"within": 0}, "Lean within is 0: expected a size such as '16GiB', or a number of bytes"),
        ({"within": True}, "Lean within is True"),
        ({"within": "1GiB", "residuals": "host"}, "expected within alone, which chooses both"),
        ({"within": "1GiB", "activations": "recompute"}, "expected within alone, which chooses both"),
        ({"activations": "forget"}, "Activations mode is 'forget': expected one of keep"),
    ],
)
def test_wrong_requests(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ab.Lean(sgd, **arguments)


def test_a_size_is_read() -> None:
    assert ab.Lean(sgd, within="1.5GiB").within_nbytes == 3 << 29
    assert ab.Lean(sgd, activations="recompute").activations == ab.Activations("recompute")
