"""Within a budget: the fastest of all ways that fit, the same on all ranks, and an error where none fits."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import anabranch as ab
from anabranch.lean.activations.solver import Action, BlockCosts, BudgetError, in_use
from anabranch.lean.memory_budget import (
    ALIKE,
    FixedMemory,
    ResidualStorage,
    WithinChoice,
    check_fits,
    choose_within,
    gradients_of,
)
from anabranch.planning.footprint import (
    FRAGMENTATION,
    MemoryUse,
    OptimizerMemory,
    ReadyGradient,
    Setting,
    TrainingMode,
    allocated_nbytes,
    peak_footprint,
)
from anabranch.values.kinds.names import DENSE, OKTOPK
from lean.activations.naive_solver import chains, every_choice, played_extra_s, played_peak
from lean.launches import each_on_ranks
from ranks import on_ranks

INF = math.inf


def brute_force_s(blocks: list[BlockCosts], storages: list[ResidualStorage], budget_nbytes: int) -> float:
    """The least extra time over all ways to store residuals and all choices for activations; infinite if none fits."""
    room = int(budget_nbytes * (1 - FRAGMENTATION))
    best = INF
    for actions in every_choice(blocks):
        for storage in storages:
            peak = storage.held_nbytes + played_peak(storage.occupied(blocks), actions)
            if max(peak, storage.end_nbytes) <= room:
                best = min(best, played_extra_s(blocks, actions) + storage.extra_s)
    return best


def alike_s(blocks: list[BlockCosts]) -> float:
    """By how much the choice may be slower than the best."""
    return ALIKE * sum(block.forward_s + block.backward_s for block in blocks) + 1e-9


def extra_s_of(found: WithinChoice) -> float:
    extra_s = found.tried[found.residuals]
    assert extra_s is not None
    return extra_s


SETTING = Setting(ranks=2, density=0.5, buckets=None, blas_workspace_nbytes=0)


def held_of(blocks: list[BlockCosts], numel: int, clips: bool = False, every: int = 1) -> FixedMemory:
    """A model of which each ``every``-th block has a matrix of ``numel`` elements, a bucket; 0: one dense bucket."""
    made = [
        (block.name, ReadyGradient(f"weight{number}", max(1, numel), allocated_nbytes(4 * max(1, numel))))
        for number, block in reversed(list(enumerate(blocks)))
        if number % every == 0
    ]
    setting = replace(SETTING, clips=clips, buckets=[[one.name] for _, one in made] if numel else None)
    return FixedMemory(
        512, OptimizerMemory(1024), made, [(TrainingMode(OKTOPK if numel else DENSE, lean=True), setting)]
    )


def storages_of(blocks: list[BlockCosts], numel: int) -> list[ResidualStorage]:
    return held_of(blocks, numel, clips=numel % 2 == 1).storages(blocks, 64.0)


def accounted(storage: ResidualStorage, blocks: list[BlockCosts], actions: dict[str, Action]) -> int:
    """The peak that the account finds in a step with these activations."""
    in_use_nbytes, profile = in_use(blocks, actions), storage.profile

    def use(index: int, is_ready: bool) -> MemoryUse:
        names = storage.blocks_at.get((index, is_ready), ())
        return MemoryUse(max((in_use_nbytes[name] for name in names), default=0), profile.gradients[index].nbytes)

    gradients = tuple(
        replace(one, peak_before=use(index, False), when_ready=use(index, True))
        for index, one in enumerate(profile.gradients)
    )
    step = replace(profile, gradients=gradients)
    return max(peak_footprint(step, mode, setting).nbytes for mode, setting in storage.exchanges)


@settings(max_examples=60, deadline=None)
@given(chains(3), st.integers(0, 300), st.integers(1, 3))
def test_the_peak_is_what_the_account_says(blocks: list[BlockCosts], numel: int, every: int) -> None:
    """Played out block by block, and by the account from the same numbers: one number, whatever is chosen."""
    for storage in held_of(blocks, numel, numel % 2 == 1, every).storages(blocks, 64.0):
        for actions in every_choice(blocks):
            played = storage.held_nbytes + played_peak(storage.occupied(blocks), actions)
            found = storage.peak_nbytes(blocks, actions)
            assert found == max(played, storage.end_nbytes) == accounted(storage, blocks, actions)


@settings(max_examples=60, deadline=None)
@given(chains(3), st.integers(0, 300), st.floats(0.8, 1.3))
def test_the_choice_is_the_best_of_all(blocks: list[BlockCosts], numel: int, share: float) -> None:
    storages = storages_of(blocks, numel)
    budget = int(share * storages[-1].end_nbytes)
    best_s = brute_force_s(blocks, storages, budget)
    if best_s == INF:
        with pytest.raises(BudgetError, match=f"within is {budget} bytes"):
            choose_within(blocks, storages, budget)
    else:
        found = choose_within(blocks, storages, budget)
        assert best_s - 1e-9 <= extra_s_of(found) <= best_s + alike_s(blocks)
        assert found.peak_nbytes <= budget * (1 - FRAGMENTATION)


BLOCKS = [BlockCosts(f"{number}", 1.0, 2.0, 100, 10) for number in range(4)]


def test_residuals_stay_exact_where_that_costs_nothing() -> None:
    blocks = [BlockCosts(f"{number}", 1.0, 2.0, 100, 10) for number in range(16)]
    storages = exact, bf16, int8 = held_of(blocks, 256).storages(blocks, 1e9)
    assert [storage.residuals for storage in storages] == ["in place", "bf16", "int8"]
    assert exact.held_nbytes > bf16.held_nbytes > int8.held_nbytes
    roomy = choose_within(blocks, storages, 100_000)
    assert roomy.residuals == "in place" and extra_s_of(roomy) == 0.0
    kept: dict[str, Action] = {block.name: "keep" for block in blocks}
    assert roomy.actions == kept and roomy.peak_nbytes == exact.peak_nbytes(blocks, kept)
    between = (exact.peak_nbytes(blocks, kept) + bf16.peak_nbytes(blocks, kept)) // 2
    tight = choose_within(blocks, storages, int(between / (1 - FRAGMENTATION)))
    assert tight.residuals == "bf16" and tight.actions == kept
    exact_s, rounded_s = tight.tried["in place"], tight.tried["bf16"]
    assert rounded_s is not None and (exact_s is None or exact_s > rounded_s)


def language_model() -> tuple[list[BlockCosts], FixedMemory]:
    """Qwen2.5-0.5B at batch 8 in bfloat16, about as four ranks have measured it on an H200 (2026-11-18)."""
    blocks = [
        BlockCosts("", 0.0, 0.0, 8 << 20, 0, recomputes=False),
        *(BlockCosts(f"{number}", 1.58e-3, 3.2e-3, 280_000_000, 7 << 20) for number in range(24)),
        BlockCosts(
            "(end)", 0.0, 0.0, 4_600_000_000, 0, recomputes=False, work_nbytes=3_100_000_000
        ),
    ]  # fmt: skip
    numels = {f"{number}": 14_910_000 for number in reversed(range(24))} | {"": 136_134_656}  # tied: it comes last
    gradients = [(name, ReadyGradient(f"weight{name}", numel, 4 * numel)) for name, numel in numels.items()]
    names = [one.name for _, one in gradients]
    setting = Setting(ranks=4, buckets=[*(names[i : i + 2] for i in range(0, 24, 2)), names[24:]])
    n = sum(one.nbytes for _, one in gradients)
    return blocks, FixedMemory(n, OptimizerMemory(2 * n), gradients, [(TrainingMode(OKTOPK, lean=True), setting)])


@pytest.mark.parametrize(("memory_nbytes_per_s", "chosen"), [(2.5e12, "int8"), (1e11, "in place")])
def test_rounding_is_weighed_against_recomputing(memory_nbytes_per_s: float, chosen: str) -> None:
    """In 16 GiB residuals are rounded where that is fast; where it is not, more blocks are recomputed."""
    blocks, held = language_model()
    found = choose_within(blocks, held.storages(blocks, memory_nbytes_per_s), 16 << 30)
    assert found.residuals == chosen
    assert "recompute" in found.actions.values()


def test_without_residuals_there_is_nothing_to_store() -> None:
    assert [storage.residuals for storage in storages_of(BLOCKS, 0)] == ["in place"]


def test_the_error_names_the_least_that_would_do() -> None:
    storages = held_of(BLOCKS, 100).storages(BLOCKS, 1e9)
    with pytest.raises(BudgetError, match="give at least") as caught:
        choose_within(BLOCKS, storages, 900)
    (least,) = re.findall(r"at least (\d+) bytes", str(caught.value))
    assert choose_within(BLOCKS, storages, int(least)).peak_nbytes <= int(least)
    with pytest.raises(BudgetError):
        choose_within(BLOCKS, storages, int(int(least) * 0.98))


def test_a_rank_that_needs_more_than_rank_0_says_so() -> None:
    storages = storages_of(BLOCKS, 0)
    budget = int(1.1 * storages[0].peak_nbytes(BLOCKS, dict.fromkeys("0123", "keep")))
    message = choose_within(BLOCKS, storages, budget)._asdict()
    check_fits(message, BLOCKS, storages)
    larger = [BlockCosts(block.name, 1.0, 2.0, 2000, 20) for block in BLOCKS]
    needed = storages[0].peak_nbytes(larger, message["actions"])
    with pytest.raises(BudgetError, match=f"this rank would need {needed}"):
        check_fits(message, larger, storages)


def test_gradients_come_with_the_blocks_of_their_layers() -> None:
    """What is before the first block comes last, what is behind the last one first, what is between with the next."""
    model = nn.Module()
    model.embedding = nn.Linear(2, 2, bias=False)
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()) for _ in range(2))
    model.head = nn.Linear(2, 3, bias=False)
    found = gradients_of(model, dict(model.named_parameters()), lambda parameter: len(parameter) == 2)
    assert [(one.name, block, one.sparse) for block, one in found] == [
        ("head.weight", "(end)", False),
        ("layers.1.0.weight", "layers.1", True),
        ("layers.0.0.weight", "layers.0", True),
        ("embedding.weight", "", True),
    ]
    assert {one.nbytes for _, one in found} == {512}


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
    stored = {state.packed is None for state in lean._collectives.residuals.buckets()} if compress else set()
    assert stored <= {chosen == "in place"}
    explained = lean.explain().splitlines()[-1]
    lean.close()
    return chosen, explained, [p.detach().clone() for p in model.parameters()]


def test_ranks_train_by_one_choice() -> None:
    answers = each_on_ranks(trained_within, 2, [("1GiB", True), ("1GiB", False)])
    for ((chosen, explained, one), (other, _, two)), compress in zip(answers, (True, False), strict=True):
        assert chosen == other == "in place" and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        kept_where = "residuals in place, " if compress else ""  # dense exchanges keep none
        assert explained.startswith(f"within 1.00 GiB: {kept_where}blocks of activations: ")
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"within": "16"}, "Lean within is '16': expected a size in GiB"),
        ({"within": 0}, "Lean within is 0: expected a size such as '16GiB', or a number of bytes"),
        ({"within": True}, "Lean within is True"),
        ({"within": "1GiB", "residuals": "int8"}, "expected within alone, which chooses both"),
        ({"residuals": "host"}, "Lean residuals is 'host': expected one of 'in place', 'bf16', 'int8'"),
        ({"within": "1GiB", "activations": "recompute"}, "expected within alone, which chooses both"),
        ({"activations": "forget"}, "Activations mode is 'forget': expected keep or recompute"),
    ],
)
def test_wrong_requests(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ab.Lean(sgd, **arguments)


def test_a_size_is_read() -> None:
    assert ab.Lean(sgd, within="1.5GiB").within_nbytes == 3 << 29
    assert ab.Lean(sgd, activations="recompute").activations == ab.Activations("recompute")
