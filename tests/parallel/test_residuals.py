"""Residuals of DataParallel: sent whatever layout runs, and scaled with the loss."""

from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from parallel.given_gradients import (
    COLUMNS,
    ROWS,
    computed,
    fresh,
    fresh_of,
    gradients,
    one_step,
    residuals_of,
    state_after_six_steps,
    two_buckets,
)
from ranks import cases_on_ranks, on_ranks

WITH_RESIDUALS = ("oktopk:0.1", "int4")

# ------------------------------------------------------------------------------------------------- nothing is stranded


def sent_by_ddp(rank: int, states: list[dict[str, Any]], accumulate: bool) -> dict[str, Any]:
    """DDP's own buckets run for ever, and something was loaded; the first step meets a NaN on rank 1."""
    model, parallel = fresh()
    parallel.load_comm_state_dict(states[rank])
    assert torch.equal(residuals_of(parallel)[0].flatten(), states[rank]["residuals"]["first"])
    if rank == 1:
        model.zero_grad()
        parallel(gradients(0, 0)[0] * float("nan"), gradients(0, 0)[1]).backward()
    else:
        one_step(model, parallel, 0, 0)
    still = residuals_of(parallel)
    if accumulate:
        model.zero_grad()
        with parallel.no_sync():
            parallel(*gradients(6, rank)).backward()
        half = residuals_of(parallel)
        parallel(*gradients(7, rank)).backward()
        assert torch.equal(half, still), "not sent before it is averaged"
        assert model.first.grad is not None and model.second.grad is not None
        applied = torch.stack([model.first.grad, model.second.grad])
    else:
        applied = one_step(model, parallel, 6, rank) + one_step(model, parallel, 7, rank)
    answer = {"still": still, "applied": applied, "left": residuals_of(parallel), "explained": parallel.explain()}
    parallel.close()
    return answer


@pytest.fixture(scope="module")
def states() -> list[dict[str, Any]]:
    """The states of two ranks after six steps of a sparse plan."""
    return on_ranks(state_after_six_steps, 2)


def test_what_was_loaded_is_sent_although_no_plan_runs(states: list[dict[str, Any]]) -> None:
    cases = {"at once": (sent_by_ddp, states, False), "accumulated": (sent_by_ddp, states, True)}
    for answers in cases_on_ranks(cases, 2).values():
        check_sent(answers, states)


def check_sent(answers: list[dict[str, Any]], states: list[dict[str, Any]]) -> None:
    """All that was in the states is in what was applied."""
    waited = [torch.stack([s["residuals"][n].view(ROWS, COLUMNS) for n in ("first", "second")]) for s in states]
    assert all(torch.equal(one["still"], mine) for one, mine in zip(answers, waited, strict=True)), (
        "the NaN sent nothing"
    )
    torch.testing.assert_close(
        2 * answers[0]["applied"].double(),
        torch.stack(waited).double().sum(0) + computed(2, 6, 8),
        rtol=1e-4,
        atol=1e-4,
    )
    assert not any(one["left"].any() for one in answers)
    assert "running DDP's own buckets: profile_steps is 0" in answers[0]["explained"]


def frozen_when_loaded(rank: int, states: list[dict[str, Any]]) -> list[torch.Tensor]:
    """A parameter is frozen after wrapping, and its residual is loaded: it is sent when it is trained again."""
    model, parallel = fresh()
    model.first.requires_grad_(False)
    parallel.load_comm_state_dict(*states)
    parallel(*gradients(6, 0)).backward()
    kept = parallel.comm_state_dict()["residuals"]["first"]
    assert not model.first.requires_grad and model.first.grad is None
    model.first.requires_grad_(True)
    model.zero_grad()
    parallel(*gradients(7, 0)).backward()
    assert model.first.grad is not None
    answer = [kept.view(ROWS, COLUMNS), model.first.grad.clone(), residuals_of(parallel)[0]]
    parallel.close()
    return answer


def test_the_residual_of_a_frozen_parameter_is_sent_when_it_is_trained_again(states: list[dict[str, Any]]) -> None:
    kept, applied, left = on_ranks(frozen_when_loaded, 1, states)[0]
    waited = sum(state["residuals"]["first"] for state in states).view(ROWS, COLUMNS)
    assert torch.equal(kept, waited) and not left.any()
    torch.testing.assert_close(applied, waited + gradients(7, 0)[0])


def left_through_nan(rank: int, kind: str) -> dict[str, Any]:
    """Rank 1 meets a NaN in the very step in which the plan with residuals has left."""
    model, parallel = fresh_of(kind)
    for step in range(8):
        one_step(model, parallel, step, rank)
    assert parallel._tuner is not None
    parallel._tuner.runner.use_plan(None)
    before = residuals_of(parallel)
    poisons = 0
    for step in range(8, 12):
        one, other = gradients(step, rank)
        if step == 8 and rank == 1:
            one[0, 0] = float("nan")
        model.zero_grad()
        parallel(one, other).backward()
        assert model.first.grad is not None
        poisons += int(not torch.isfinite(model.first.grad).all())
        assert bool(residuals_of(parallel).any()) == (step == 8)
    left = parallel.plan is None
    parallel.close()
    return {"poisons": poisons, "before": bool(before.any()), "left": left}


def test_what_a_plan_leaves_behind_goes_with_the_next_finite_step(found: dict[str, list[Any]]) -> None:
    for answers in found["left, oktopk:0.1"] + found["left, int4"]:
        assert answers == {"poisons": 1, "before": True, "left": True}


def huge_then_normal(rank: int) -> dict[str, Any]:
    """Gradients of 3e38, more than can be sent at once: on rank 0, then on rank 1; skipped where not finite."""
    model, parallel = fresh(two_buckets(0.1))
    applied, skipped = torch.zeros(2, ROWS, COLUMNS), 0
    for step in range(8):
        one, other = gradients(step, rank)
        if step == 2 + rank:
            one.fill_(3e38)
        model.zero_grad()
        parallel(one, other).backward()
        assert model.first.grad is not None and model.second.grad is not None
        both = torch.stack([model.first.grad, model.second.grad])
        if torch.isfinite(both).all():
            applied += both
        else:
            skipped += 1
    answer = {"applied": applied, "skipped": skipped, "residuals": residuals_of(parallel)}
    parallel.close()
    return answer


def test_finite_gradients_without_a_finite_sum_cost_their_steps_and_no_others(found: dict[str, list[Any]]) -> None:
    answers = found["huge"]
    assert [one["skipped"] for one in answers] == [2, 2]
    accounted = 2 * answers[0]["applied"].double() + sum(one["residuals"].double() for one in answers)
    expected = computed(2, 0, 2) + computed(2, 4, 8)
    torch.testing.assert_close(accounted, expected, rtol=1e-4, atol=1e-4)


def fewer_residuals(rank: int, kind: str) -> dict[str, Any]:
    """The next plan sends one of the two matrices dense: the other's residual stays, its own goes."""
    model, parallel = fresh_of(kind)
    sums = torch.zeros(2, ROWS, COLUMNS)
    for step in range(6):
        sums += one_step(model, parallel, step, rank)
    assert parallel._tuner is not None
    before = residuals_of(parallel)
    second = ab.Bucket(("second",), collective=kind)
    parallel._tuner.runner.use_plan(ab.Plan((second, ab.Bucket(("first",)), ab.Bucket(("bias",)))))
    for step in range(6, 8):
        sums += one_step(model, parallel, step, rank)
    answer = {"before": before, "applied": sums, "residuals": residuals_of(parallel)}
    parallel.close()
    return answer


def test_a_plan_with_fewer_residuals_strands_nothing(found: dict[str, list[Any]]) -> None:
    for kind in WITH_RESIDUALS:
        answers = found[f"fewer, {kind}"]
        assert all(one["before"].flatten(1).any(dim=1).all() for one in answers), "both matrices had a residual"
        accounted = 2 * answers[0]["applied"].double() + sum(one["residuals"].double() for one in answers)
        torch.testing.assert_close(accounted, computed(2, 0, 8), rtol=1e-4, atol=1e-4)
        assert not any(one["residuals"][0].any() for one in answers) and answers[0]["residuals"][1].any()


class Images(nn.Module):
    """A convolution's weight in the memory order of channels last, whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 5, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, answers: torch.Tensor) -> torch.Tensor:
        return (self.weight * answers).sum()


def channels_last(rank: int) -> dict[str, torch.Tensor]:
    """Some steps of a sparse plan, then one of DDP's own buckets."""
    model = Images()
    plan = ab.Plan((ab.Bucket(("weight",), collective="oktopk:0.1"),))
    parallel = ab.DataParallel(model, plan=plan, compress=ab.OkTopk(density=0.1), profile_steps=0)
    computed, applied = torch.zeros(6, 5, 3, 3), torch.zeros(6, 5, 3, 3)
    for step in range(5):
        if step == 4:
            assert parallel._tuner is not None
            parallel._tuner.runner.use_plan(None)
        answers = torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        parallel(answers).backward()
        assert model.weight.grad is not None
        computed, applied = computed + answers, applied + model.weight.grad
    parallel.close()
    return {"computed": computed, "applied": applied}


def test_a_residual_keeps_its_place_whatever_the_order_in_memory(found: dict[str, list[Any]]) -> None:
    answers = found["channels last"]
    torch.testing.assert_close(2 * answers[0]["applied"], answers[0]["computed"] + answers[1]["computed"])


# ------------------------------------------------------------------------------------------------------- loss scales


class FakeScaler:
    """Whose scale the test sets."""

    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def followed(rank: int, scales: list[float], cut: int | None) -> torch.Tensor:
    """The sums of what was applied, unscaled, when every step's loss was scaled by another number."""
    scaler = FakeScaler()
    model, parallel = fresh(two_buckets(0.1))
    parallel.follow(scaler)
    applied = torch.zeros(2, ROWS, COLUMNS)
    for step, scale in enumerate(scales):
        if step == cut:
            kept = parallel.comm_state_dict()
            parallel.close()
            model, parallel = fresh(two_buckets(0.1))
            parallel.follow(scaler)
            parallel.load_comm_state_dict(kept)
        scaler.scale = scale
        applied += one_step(model, parallel, step, rank, scale) / scale
    parallel.close()
    return applied


SCALES = [2.0**power for power in (16, 16, 17, 3, 3, 4, 20, 20, 1, 0)]


def test_residuals_follow_the_scale_of_the_loss(found: dict[str, list[Any]]) -> None:
    steady, changing, cut = (found[f"{what} scale"][0] for what in ("steady", "changing", "cut"))
    assert torch.equal(steady, changing) and torch.equal(steady, cut) and steady.any(), "powers of two change no bit"


def scaled_by_torch(rank: int) -> dict[str, Any]:
    """torch's own scaler, whose scale doubles every two steps and halves when a gradient overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    model, parallel = fresh(two_buckets(0.1))
    parallel.follow(scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scales = []
    for step in range(8):
        optimizer.zero_grad()
        one, other = gradients(step, rank)
        if step == 5 and rank == 1:
            one[0, 0] = float("inf")
        scaler.scale(parallel(one, other)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    state = parallel.comm_state_dict()
    left = residuals_of(parallel) / state["scale"]
    parallel.close()
    with torch.no_grad():
        moved = -torch.stack([model.first, model.second])
    return {"moved": moved, "left": left, "scales": scales}


def test_torchs_own_scaler_is_followed(found: dict[str, list[Any]]) -> None:
    answers = found["scaled by torch"]
    assert len(set(answers[0]["scales"])) > 2, "it changed"
    accounted = 2 * answers[0]["moved"].double() + sum(one["left"].double() for one in answers)
    expected = computed(2, 0, 5) + computed(2, 6, 8)
    torch.testing.assert_close(accounted, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What two ranks saw in each case, all in one launch."""
    return cases_on_ranks(
        {
            **{f"left, {kind}": (left_through_nan, kind) for kind in WITH_RESIDUALS},
            **{f"fewer, {kind}": (fewer_residuals, kind) for kind in WITH_RESIDUALS},
            "huge": (huge_then_normal,),
            "channels last": (channels_last,),
            "steady scale": (followed, [1.0] * len(SCALES), None),
            "changing scale": (followed, SCALES, None),
            "cut scale": (followed, SCALES, 6),
            "scaled by torch": (scaled_by_torch,),
        },
        2,
    )
