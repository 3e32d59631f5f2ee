"""The chosen mix keeps within the budget, and no choice is better."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.lean.activations.cost_model import Action, BlockCosts, HostLink, predict
from anabranch.lean.activations.solver import BudgetError, choose, choose_with_windows
from lean.activations.naive_solver import chains, every_choice, least_extra_s, links

GIB = 1 << 30


@given(chains(5, all_offload=False), links, st.integers(0, 150))
def test_no_choice_is_better(blocks: list[BlockCosts], link: HostLink, room: int) -> None:
    budget = max(block.nbytes + block.work_nbytes for block in blocks) + room
    if least_extra_s(blocks, link, budget) == float("inf"):
        with pytest.raises(BudgetError, match=f"budget_nbytes is {budget}: no choice keeps within it"):
            choose(blocks, link, budget)
        return
    choice = choose(blocks, link, budget)
    assert choice.forecast == predict(blocks, link, choice.actions)
    assert choice.forecast.peak_nbytes <= budget
    assert choice.forecast.extra_s == pytest.approx(least_extra_s(blocks, link, budget), abs=1e-9)
    assert choice.at_least_s == choice.forecast.extra_s  # nothing was dropped


@given(chains(5), links, st.integers(0, 100), st.integers(1, 4))
def test_a_narrow_search_stays_within_the_budget_and_knows_what_it_may_have_missed(
    blocks: list[BlockCosts], link: HostLink, room: int, width: int
) -> None:
    budget = max(block.nbytes + block.work_nbytes for block in blocks) + room
    choice = choose(blocks, link, budget, width)
    best = least_extra_s(blocks, link, budget)
    assert choice.forecast.peak_nbytes <= budget
    assert choice.at_least_s <= best + 1e-9
    assert best <= choice.forecast.extra_s + 1e-9


@given(chains(5, all_offload=False), links, st.integers(0, 60))
def test_the_narrowest_search_gives_up_only_where_nothing_fits(
    blocks: list[BlockCosts], link: HostLink, room: int
) -> None:
    budget = max(block.nbytes + block.work_nbytes for block in blocks) + room
    if least_extra_s(blocks, link, budget) == float("inf"):
        with pytest.raises(BudgetError):
            choose(blocks, link, budget, width=1)
    else:
        assert choose(blocks, link, budget, width=1).forecast.peak_nbytes <= budget


@given(chains(6), links, st.integers(0, 100), st.integers(0, 100))
def test_more_room_never_costs_time(blocks: list[BlockCosts], link: HostLink, room: int, more: int) -> None:
    budget = max(block.nbytes + block.work_nbytes for block in blocks) + room
    less = choose(blocks, link, budget).forecast.extra_s
    assert choose(blocks, link, budget + more).forecast.extra_s <= less + 1e-9


@given(chains(5), links, st.integers(0, 150))
def test_windows_need_room_only_where_something_is_offloaded(
    blocks: list[BlockCosts], link: HostLink, room: int
) -> None:
    windows = (link.window_nbytes or 0) + (link.ahead_nbytes or 0)
    budget = max(block.nbytes + block.work_nbytes for block in blocks) + room
    best = min(
        least_extra_s([replace(block, offloads=False) for block in blocks], link, budget),
        least_extra_s(blocks, link, budget - windows),
    )
    if best == float("inf"):
        with pytest.raises(BudgetError):
            choose_with_windows(blocks, link, budget)
        return
    choice = choose_with_windows(blocks, link, budget)
    assert choice.forecast.extra_s == pytest.approx(best, abs=1e-9)
    assert choice.forecast.peak_nbytes + (windows if choice.forecast.moved_nbytes else 0) <= budget


def like_resnet() -> list[BlockCosts]:
    """50 blocks with sizes as in ResNet-152 at batch 128, in MiB, and times of an H200."""
    stages = [(3, 392, 784, 1.2e-3), (8, 196, 392, 0.9e-3), (36, 98, 196, 0.8e-3), (3, 49, 98, 0.8e-3)]
    return [
        BlockCosts(f"{stage}.{n}", s, 2 * s, inner << 20, given << 20, given << 20 if n else 0, n > 0)
        for stage, (count, given, inner, s) in enumerate(stages)
        for n in range(count)
    ]


@pytest.mark.parametrize("budget", [2, 4, 8, 16])
def test_a_large_model_is_near_its_optimum(budget: int) -> None:
    blocks, link = like_resnet(), HostLink(50e9, 50e9)
    choice = choose(blocks, link, budget * GIB)
    assert choice.forecast == predict(blocks, link, choice.actions)
    assert choice.forecast.extra_s <= 1.1 * choice.at_least_s
    for action in ("offload", "recompute"):
        alone = predict(blocks, link, {block.name: action for block in blocks})
        assert choice.forecast.extra_s < alone.extra_s


def test_everything_is_kept_where_it_fits() -> None:
    blocks = like_resnet()
    actions = choose(blocks, HostLink(50e9, 50e9), 20 * GIB).actions
    assert set(actions.values()) == {"keep"}


def actions_of(blocks: Sequence[BlockCosts], link: HostLink, budget: int) -> list[Action]:
    return list(choose(blocks, link, budget).actions.values())


def test_what_the_link_hides_is_offloaded_and_what_is_cheap_recomputed() -> None:
    blocks = [BlockCosts(name, 1.0, 2.0, 100, 0) for name in "abc"]
    assert actions_of(blocks, HostLink(100, 100), 200) == ["offload", "keep", "keep"]
    cheap = [BlockCosts("a", 1.0, 2.0, 100, 0), BlockCosts("b", 0.1, 0.2, 100, 0), BlockCosts("c", 1.0, 2.0, 100, 0)]
    assert actions_of(cheap, HostLink(1, 1), 200) == ["keep", "recompute", "keep"]


def test_the_twin_knows_all_choices_of_two_blocks() -> None:
    blocks = [BlockCosts("a", 1, 1, 1, 1), BlockCosts("b", 1, 1, 1, 1, joins=True)]
    assert len(list(every_choice(blocks))) == 4 * 4 + 2


@pytest.mark.parametrize(
    ("count", "budget", "message"),
    [(1, 10, r"budget_nbytes is 10: block 'a' alone has 11"), (2, 100, "two blocks are called 'a'")],
)
def test_refusals(count: int, budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose([BlockCosts("a", 1, 1, 5, 6)] * count, HostLink(1, 1), budget)
