"""What Lean would choose within a budget, found on tensors without data."""

import pytest
import torch
from torch import nn

from anabranch.lean.activations.profiler import BlockProfiler
from anabranch.lean.activations.solver import BudgetError
from anabranch.planning.memory import Setting
from anabranch.tools.predict.memory.estimator import OPTIMIZERS
from anabranch.tools.predict.memory.probe import Loss
from anabranch.tools.predict.memory.training_modes import LEAN, OUR_MODES
from anabranch.tools.predict.memory.within_budget import AssumedClock, Device, chosen_within, profile
from lean.test_one_account import LAYERS, ROWS, WIDTH, build_at
from tools.predict.memory.test_probe import Asking

EXCHANGE = (OUR_MODES[LEAN], Setting(ranks=2, density=0.1, blas_workspace_nbytes=0))


def test_blocks_show_the_same_bytes_with_data_and_without() -> None:
    model, loss = build_at(ROWS)(torch.device("cpu"))
    profiler = BlockProfiler(model)
    for _ in range(2):
        loss(model).backward()
    found = profile(build_at(ROWS)).blocks
    sizes = ("name", "inner_nbytes", "input_nbytes", "work_nbytes", "joins", "recomputes")
    for with_data, without in zip(profiler.costs(), found, strict=True):
        assert [getattr(with_data, name) for name in sizes] == [getattr(without, name) for name in sizes]
    profiler.undo()


def test_questions_about_values_are_answered_as_where_memory_is_predicted() -> None:
    def build(device: torch.device) -> tuple[nn.Module, Loss]:
        model, given = nn.Sequential(Asking(64, 64), nn.ReLU(), Asking(64, 64)), torch.ones(8, 64, device=device)
        return model, lambda wrapped: wrapped(given).sum() if (given == given).all() else given.sum()

    assert [block.name for block in profile(build).blocks] == ["", "0", "2", "(end)"]


def test_blocks_take_the_time_of_their_arithmetic() -> None:
    blocks = profile(build_at(ROWS), device=Device(fp32_per_s=1e9, memory_nbytes_per_s=1e15)).blocks
    seconds = [block.forward_s for block in blocks if block.name.startswith("layers")]
    of_two_matrices_s = 2 * 2 * ROWS * WIDTH * WIDTH / 1e9
    assert seconds == [pytest.approx(of_two_matrices_s, rel=0.01)] * LAYERS


def test_the_clock_counts_bytes_where_these_take_longer() -> None:
    given = torch.zeros(1000, device="meta")
    with AssumedClock(Device(memory_nbytes_per_s=8000.0)) as clock:
        before = clock.mark()
        given.view(10, 100).t() + 1  # views take no time
        assert clock.elapsed_s(before, clock.mark()) == pytest.approx(1.0)


@pytest.mark.parametrize("share", [1.2, 0.8])
def test_the_choice_keeps_within_the_budget(share: float) -> None:
    profiled = profile(build_at(ROWS))
    _, all_kept = chosen_within(profiled, OPTIMIZERS["adamw"], EXCHANGE, 1 << 40)
    budget_nbytes = int(share * all_kept.nbytes)
    chosen, peak = chosen_within(profiled, OPTIMIZERS["adamw"], EXCHANGE, budget_nbytes)
    assert chosen.peak_nbytes == peak.nbytes <= budget_nbytes
    assert (set(chosen.actions.values()) == {"keep"}) == (share > 1)
    assert (chosen.forecast.extra_s > 0) == (share < 1)


def test_a_budget_that_nothing_fits_is_an_error() -> None:
    with pytest.raises(BudgetError, match="give at least"):
        chosen_within(profile(build_at(ROWS)), OPTIMIZERS["adamw"], EXCHANGE, 1000)
