"""Within a budget: the fastest of all ways that fit, the same on all ranks, and an error where none fits."""

import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import anabranch as ab
from anabranch.lean.activations import policy
from anabranch.lean.activations.cost_model import RECOMPUTED, Action, BlockCosts, HostLink
from anabranch.lean.activations.solver import BudgetError, choose_with_windows, smallest_budget
from anabranch.lean.activations.speeds import SpeedMeter, Speeds
from anabranch.lean.host_waits import HostBucket
from anabranch.lean.within import (
    ALIKE,
    HOST_MARGIN,
    Gradient,
    Held,
    Storage,
    WithinBudget,
    check_fits,
    choose_within,
    gradients_of,
)
from anabranch.planning.memory import FRAGMENTATION, OptimizerMemory, Setting, TrainingMode, allocated_nbytes
from anabranch.values.kinds.names import DENSE, OKTOPK
from lean.activations.naive_solver import chains, every_choice, links, moves, played_extra_s, played_peak
from lean.test_host_waits import naive_wait_s
from ranks import on_ranks

INF = math.inf


def brute_force_s(blocks: list[BlockCosts], link: HostLink, storages: list[Storage], budget_nbytes: int) -> float:
    """The least extra time over all ways to store residuals and all choices for activations; infinite if none fits."""
    room = int(budget_nbytes * (1 - FRAGMENTATION))
    windows = (link.window_nbytes or 0) + (link.ahead_nbytes or 0)
    best = INF
    for actions in every_choice(blocks):
        moved, extra_s = moved_nbytes(blocks, actions), played_extra_s(blocks, link, actions)
        for storage in storages:
            peak = storage.held_nbytes + played_peak(storage.occupied(blocks), actions) + (windows if moved else 0)
            if max(peak, storage.end_nbytes) <= room:
                best = min(best, extra_s + storage.extra_s + played_wait_s(blocks, link, storage, actions))
    return best


def played_wait_s(blocks: list[BlockCosts], link: HostLink, storage: Storage, actions: Mapping[str, Action]) -> float:
    """What is waited for residuals on the host, where every block with a matrix is a bucket (``held_of``)."""
    if storage.residuals != "host":
        return 0.0
    computed = [
        (one.name, one.backward_s + (one.forward_s if actions[one.name] in RECOMPUTED else 0.0))
        for one in reversed(blocks)
    ]
    buckets, since_s = [], 0.0
    for name, seconds in computed:
        since_s += seconds
        if owned := storage.step.spans[name]:
            (nbytes,) = {4 * storage.step.profile.gradients[index].numel for index in owned}
            buckets.append(HostBucket(nbytes, since_s))
            since_s = 0.0
    moved = moved_nbytes(blocks, actions) + sum(bucket.nbytes for bucket in buckets)
    moved_s = moved / min(link.out_nbytes_per_s, link.back_nbytes_per_s)
    one_by_one_s = naive_wait_s(buckets, link, sum(block.forward_s for block in blocks))
    return max(one_by_one_s, moved_s - sum(seconds for _, seconds in computed))


def moved_nbytes(blocks: list[BlockCosts], actions: Mapping[str, Action]) -> int:
    return sum(sum(moves(blocks, actions, number)) for number in range(len(blocks)))


def alike_s(blocks: list[BlockCosts]) -> float:
    """By how much the choice may be slower than the best, which may copy to the host."""
    return (ALIKE + HOST_MARGIN) * sum(block.forward_s + block.backward_s for block in blocks) + 1e-9


SETTING = Setting(ranks=2, density=0.5, buckets=None, blas_workspace_nbytes=0)


def held_of(blocks: list[BlockCosts], numel: int, clips: bool = False, every: int = 1) -> Held:
    """A model of which every so many blocks have a matrix of ``numel`` elements, each a bucket; 0: one dense bucket."""
    made = [
        Gradient(f"weight{number}", max(1, numel), allocated_nbytes(4 * max(1, numel)), True, block.name)
        for number, block in reversed(list(enumerate(blocks)))
        if number % every == 0
    ]
    setting = replace(SETTING, clips=clips, buckets=[[one.name] for one in made] if numel else None)
    return Held(512, OptimizerMemory(1024), made, [(TrainingMode(OKTOPK if numel else DENSE, lean=True), setting)])


def storages_of(blocks: list[BlockCosts], numel: int, with_host: bool = True) -> list[Storage]:
    return held_of(blocks, numel, clips=numel % 2 == 1).storages(blocks, 64.0, with_host)


@settings(max_examples=60, deadline=None)
@given(chains(3), links, st.integers(0, 300), st.integers(1, 3))
def test_the_peak_is_what_the_account_says(blocks: list[BlockCosts], link: HostLink, numel: int, every: int) -> None:
    """Played out block by block, and by the account from the same numbers: one number, whatever is chosen."""
    window = max(link.window_nbytes or 0, link.ahead_nbytes or 0)
    for storage in held_of(blocks, numel, numel % 2 == 1, every).storages(blocks, 64.0, with_host=True):
        for actions in every_choice(blocks):
            copies = min(window, moved_nbytes(blocks, actions))
            played = storage.held_nbytes + played_peak(storage.occupied(blocks), actions) + copies
            assert storage.peak_nbytes(blocks, link, actions) == max(played, storage.end_nbytes)


@settings(max_examples=60, deadline=None)
@given(chains(3), links, st.integers(0, 300), st.floats(0.8, 1.3))
def test_the_choice_is_the_best_of_all(blocks: list[BlockCosts], link: HostLink, numel: int, share: float) -> None:
    on_device = storages_of(blocks, numel, with_host=False)
    budget = int(share * on_device[-1].end_nbytes)
    best_s = brute_force_s(blocks, link, on_device, budget)
    if best_s == INF:
        with pytest.raises(BudgetError, match=f"within is {budget} bytes"):
            choose_within(blocks, link, on_device, budget)
    else:
        found = choose_within(blocks, link, on_device, budget)
        assert best_s - 1e-9 <= found.extra_s <= best_s + alike_s(blocks) and found.peak_nbytes <= budget * (
            1 - FRAGMENTATION
        )


@settings(max_examples=40, deadline=None)
@given(chains(3), links, st.integers(1, 300), st.floats(0.9, 1.3))
def test_host_memory_is_used_where_it_is_better(
    blocks: list[BlockCosts], link: HostLink, numel: int, share: float
) -> None:
    """Copies of residuals and activations share the link, so the best for both together is not searched for."""
    everything = storages_of(blocks, numel)
    budget = int(share * everything[-1].end_nbytes)
    on_device = [storage for storage in everything if storage.residuals != "host"]
    best_s, without_s = (brute_force_s(blocks, link, storages, budget) for storages in (everything, on_device))
    if best_s < INF:
        found = choose_within(blocks, link, everything, budget)
        assert best_s - 1e-9 <= found.extra_s <= without_s + alike_s(blocks)


BLOCKS = [BlockCosts(f"{number}", 1.0, 2.0, 100, 10) for number in range(4)]
LINK = HostLink(1000.0, 1000.0, 0, 0)


def test_residuals_stay_exact_where_that_costs_nothing() -> None:
    blocks = [BlockCosts(f"{number}", 1.0, 2.0, 100, 10) for number in range(16)]
    storages = exact, host, bf16, int8 = held_of(blocks, 256).storages(blocks, 1e9, with_host=True)
    assert [storage.residuals for storage in storages] == ["in place", "host", "bf16", "int8"]
    assert exact.held_nbytes > bf16.held_nbytes > int8.held_nbytes > host.held_nbytes
    assert host.over_link_nbytes == 16 * 4 * 256 and exact.over_link_nbytes == bf16.over_link_nbytes == 0
    roomy = choose_within(blocks, LINK, storages, 100_000)
    assert roomy.residuals == "in place" and roomy.extra_s == 0.0
    kept: dict[str, Action] = {block.name: "keep" for block in blocks}
    assert roomy.choice.actions == kept and roomy.peak_nbytes == exact.peak_nbytes(blocks, LINK, kept)
    slow = HostLink(1.0, 1.0, 0, 0)
    between = (exact.peak_nbytes(blocks, slow, kept) + bf16.peak_nbytes(blocks, slow, kept)) // 2
    tight = choose_within(blocks, slow, storages, int(between / (1 - FRAGMENTATION)))
    assert tight.residuals == "bf16" and tight.choice.actions == kept
    assert tight.tried["in place"] is None or tight.tried["in place"] > tight.extra_s


def language_model() -> tuple[list[BlockCosts], Held]:
    """Qwen2.5-0.5B at batch 8 in bfloat16, about as four ranks have measured it on an H200 (2026-11-18)."""
    blocks = [
        BlockCosts("", 0.0, 0.0, 8 << 20, 0, recomputes=False),
        *(BlockCosts(f"{number}", 1.58e-3, 3.2e-3, 280_000_000, 7 << 20) for number in range(24)),
        BlockCosts(
            "(end)", 0.0, 0.0, 4_600_000_000, 0, recomputes=False, work_nbytes=3_100_000_000, offloads=False
        ),
    ]  # fmt: skip
    numels = {f"{number}": 14_910_000 for number in reversed(range(24))} | {"": 136_134_656}  # tied: it comes last
    gradients = [Gradient(f"weight{name}", numel, 4 * numel, True, name) for name, numel in numels.items()]
    names = [one.name for one in gradients]
    setting = Setting(ranks=4, buckets=[*(names[i : i + 2] for i in range(0, 24, 2)), names[24:]])
    n = sum(one.nbytes for one in gradients)
    return blocks, Held(n, OptimizerMemory(2 * n), gradients, [(TrainingMode(OKTOPK, lean=True), setting)])


@pytest.mark.parametrize(("ranks_at_once", "chosen"), [(1, "int8"), (4, "in place")])
def test_residuals_are_not_sent_to_the_host_where_backward_does_not_hide_it(ranks_at_once: int, chosen: str) -> None:
    """It took 439 ms a step with residuals on the host, and 341 with all blocks recomputed: copies of the first bucket
    and of the tied embedding are hidden by nothing, and the bus is shared by four."""
    blocks, held = language_model()
    rate = 50e9 / ranks_at_once
    storages = held.storages(blocks, 2.5e12 / ranks_at_once, with_host=True)
    found = choose_within(blocks, HostLink(rate, rate, 256 << 20, 256 << 20), storages, 16 << 30)
    assert found.residuals == chosen and found.choice.forecast.moved_nbytes == 0
    host_s, bf16_s = found.tried["host"], found.tried["bf16"]
    assert host_s is not None and bf16_s is not None and host_s > bf16_s
    assert ranks_at_once == 1 or host_s > found.extra_s + 0.04


@pytest.mark.parametrize(("share", "chosen"), [(0.8 * HOST_MARGIN, "int8"), (1.2 * HOST_MARGIN, "host")])
def test_copies_to_the_host_must_win_by_a_margin(share: float, chosen: str) -> None:
    """``share`` of the computing time is what rounding takes; copies take next to none."""
    blocks = [
        BlockCosts(f"{number}", 1.0, 2.0, 100, 10, recomputes=False, offloads=False) for number in range(16)
    ]  # fmt: skip
    held, link = held_of(blocks, 256), HostLink(1e9, 1e9, 0, 0)
    *_, slow = held.storages(blocks, 1.0, with_host=True)
    storages = exact, _, _, rounded = held.storages(blocks, slow.extra_s / (share * 48.0), with_host=True)
    kept: dict[str, Action] = {block.name: "keep" for block in blocks}
    between = (exact.peak_nbytes(blocks, link, kept) + rounded.peak_nbytes(blocks, link, kept)) // 2
    found = choose_within(blocks, link, storages, int(between / (1 - FRAGMENTATION)))
    assert found.residuals == chosen and found.tried["in place"] is None


def test_activations_on_the_host_must_win_by_a_margin_too() -> None:
    """Either a block is recomputed, or its activations are copied in next to no time."""
    link, chosen = HostLink(1e12, 1e12, 0, 0), []
    for forward_s in (0.5 * HOST_MARGIN * 48.0, 1.5 * HOST_MARGIN * 48.0):
        blocks = [BlockCosts(f"{number}", 1.0, 2.0, 100_000, 10, recomputes=False) for number in range(1, 16)]
        blocks = [BlockCosts("0", forward_s, 2.0, 100_000, 10), *blocks]
        (storage,) = held_of(blocks, 0).storages(blocks, 1e9, with_host=False)
        all_kept: dict[str, Action] = {block.name: "keep" for block in blocks}
        budget = int((storage.peak_nbytes(blocks, link, all_kept) - 50_000) / (1 - FRAGMENTATION))
        chosen.append(choose_within(blocks, link, [storage], budget).choice.forecast.moved_nbytes)
    assert chosen[0] == 0 and chosen[1] > 0


def test_without_residuals_there_is_nothing_to_store() -> None:
    assert [storage.residuals for storage in storages_of(BLOCKS, 0)] == ["in place"]


def test_the_error_names_the_least_that_would_do() -> None:
    storages = held_of(BLOCKS, 100).storages(BLOCKS, 1e9, with_host=False)
    with pytest.raises(BudgetError, match="give at least") as caught:
        choose_within(BLOCKS, LINK, storages, 900)
    (least,) = re.findall(r"at least (\d+) bytes", str(caught.value))
    assert choose_within(BLOCKS, LINK, storages, int(least)).peak_nbytes <= int(least)
    with pytest.raises(BudgetError):
        choose_within(BLOCKS, LINK, storages, int(int(least) * 0.98))


def test_a_rank_that_needs_more_than_rank_0_says_so() -> None:
    storages = storages_of(BLOCKS, 0, with_host=False)
    budget = int(1.1 * storages[0].peak_nbytes(BLOCKS, LINK, dict.fromkeys("0123", "keep")))
    message = choose_within(BLOCKS, LINK, storages, budget).message(budget)
    check_fits(message, BLOCKS, LINK, storages)
    larger = [BlockCosts(block.name, 1.0, 2.0, 2000, 20) for block in BLOCKS]
    needed = storages[0].peak_nbytes(larger, LINK, message["actions"])
    with pytest.raises(BudgetError, match=f"this rank would need {needed}"):
        check_fits(message, larger, LINK, storages)


def test_gradients_come_with_the_blocks_of_their_layers() -> None:
    """What is before the first block comes last, what is behind the last one first, what is between with the next."""
    model = nn.Module()
    model.embedding = nn.Linear(2, 2, bias=False)
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()) for _ in range(2))
    model.head = nn.Linear(2, 3, bias=False)
    found = gradients_of(model, dict(model.named_parameters()), lambda parameter: len(parameter) == 2)
    assert [(one.name, one.block, one.sparse) for one in found] == [
        ("head.weight", "(end)", False),
        ("layers.1.0.weight", "layers.1", True),
        ("layers.0.0.weight", "layers.0", True),
        ("embedding.weight", "", True),
    ]
    assert {one.nbytes for one in found} == {512}


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
    stored = {state.packed is None for state in lean._collectives.residuals.buckets()} if compress else set()
    assert stored <= {chosen == "in place"}
    explained = lean.explain().splitlines()[-1]
    lean.close()
    return chosen, explained, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("compress", [True, False])
def test_ranks_train_by_one_choice(compress: bool) -> None:
    (chosen, explained, one), (other, _, two) = on_ranks(trained_within, 2, "1GiB", compress)
    assert chosen == other == "in place" and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    kept_where = "residuals in place, " if compress else ""  # dense exchanges keep none
    assert explained.startswith(f"within 1.00 GiB: {kept_where}blocks of activations: ")
    assert "predicted peak 0.00 GiB" in explained and ("otherwise: bf16" in explained) == compress


def measured_at(rank: int) -> tuple[list[float], list[float], str]:
    """When this rank was ready to measure, and when it began; rank 1 is late."""
    ready, began = [], []

    class Meter(SpeedMeter):
        def __init__(self, device: torch.device) -> None:
            time.sleep(0.5 * rank)
            super().__init__(device, 1 << 16)
            ready.append(time.monotonic())

        def measure(self) -> Speeds:
            began.append(time.monotonic())
            return super().measure()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(policy, "SpeedMeter", Meter)
        chosen, _, _ = trained_within(rank, "1GiB", True)
    return ready, began, chosen


def test_ranks_measure_at_the_same_time() -> None:
    (ready, began, _), (other_ready, other_began, _) = on_ranks(measured_at, 2)
    assert len(began) == len(other_began) == 1 and min(began + other_began) >= max(ready + other_ready)


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
    budget = WithinBudget(1, lambda: held_of(BLOCKS, 0), torch.device("cpu"))
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
