"""What the cost model predicts is what a played-out step shows; the chosen mix keeps within the budget, and is best."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.lean.activations.solver import (
    RESOLUTION,
    Action,
    BlockCosts,
    BudgetError,
    choose,
    predict,
    smallest_budget,
)
from lean.activations.naive_solver import chains, every_choice, least_extra_s, played_extra_s, played_peak

GIB = 1 << 30


@given(chains(5))
def test_prediction_is_what_playing_it_out_shows(blocks: list[BlockCosts]) -> None:
    for actions in every_choice(blocks):
        forecast = predict(blocks, actions)
        assert forecast.extra_s == pytest.approx(played_extra_s(blocks, actions), abs=1e-9)
        assert forecast.peak_nbytes == played_peak(blocks, actions)


@given(chains(6), st.integers(0, 200))
def test_no_choice_is_better(blocks: list[BlockCosts], budget: int) -> None:
    best_s = least_extra_s(blocks, budget)
    if best_s == float("inf"):
        with pytest.raises(BudgetError, match=f"no choice of blocks to recompute keeps within {budget} bytes"):
            choose(blocks, budget)
        return
    choice = choose(blocks, budget)
    assert choice.forecast == predict(blocks, choice.actions)
    assert choice.forecast.peak_nbytes <= budget
    assert choice.forecast.extra_s == pytest.approx(best_s, abs=1e-9)


@given(chains(5))
def test_the_smallest_budget_is_the_least_that_something_fits(blocks: list[BlockCosts]) -> None:
    least = smallest_budget(blocks)
    assert least == min(played_peak(blocks, actions) for actions in every_choice(blocks))


def like_resnet() -> list[BlockCosts]:
    """50 blocks with sizes as in ResNet-152 at batch 128, in MiB, and times of an H200."""
    stages = [(3, 392, 784, 1.2e-3), (8, 196, 392, 0.9e-3), (36, 98, 196, 0.8e-3), (3, 49, 98, 0.8e-3)]
    return [
        BlockCosts(f"{stage}.{n}", s, 2 * s, inner << 20, given << 20, n > 0)
        for stage, (count, given, inner, s) in enumerate(stages)
        for n in range(count)
    ]


@pytest.mark.parametrize("budget", [3, 4, 8, 16])
def test_a_large_model_uses_its_budget(budget: int) -> None:
    """Bytes are rounded up to a part of the budget: what is left unused is less than a block and these roundings."""
    blocks = like_resnet()
    choice = choose(blocks, budget * GIB)
    recomputed: dict[str, Action] = {block.name: "recompute" for block in blocks}
    assert choice.forecast.extra_s < predict(blocks, recomputed).extra_s
    assert choice.forecast.peak_nbytes <= budget * GIB
    smallest, rounding = min(block.inner_nbytes for block in blocks), len(blocks) * budget * GIB // RESOLUTION
    assert choice.forecast.peak_nbytes > budget * GIB - smallest - rounding - max(block.nbytes for block in blocks)


def test_everything_is_kept_where_it_fits() -> None:
    assert set(choose(like_resnet(), 20 * GIB).actions.values()) == {"keep"}


def test_what_is_cheap_is_recomputed() -> None:
    blocks = [BlockCosts("a", 1.0, 2.0, 100, 0), BlockCosts("b", 0.1, 0.2, 100, 0), BlockCosts("c", 1.0, 2.0, 100, 0)]
    assert list(choose(blocks, 200).actions.values()) == ["keep", "recompute", "keep"]


def test_joined_blocks_keep_one_input() -> None:
    blocks = [BlockCosts(name, 1.0, 2.0, 10, 100, joins=name > "a") for name in "abc"]
    assert list(choose(blocks, 330).actions.values()).count("keep") == 3
    assert choose(blocks, 325).forecast.extra_s == 1.0
    with pytest.raises(BudgetError):
        choose([BlockCosts(name, 1.0, 2.0, 10, 100) for name in "abc"], 300)
    again = [BlockCosts("before", 1.0, 2.0, 10, 100), *blocks, BlockCosts("end", 1.0, 2.0, 190, 10)]
    assert "join" in choose(again, 440).actions.values()
