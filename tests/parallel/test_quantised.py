"""Rounded gradients on the wire, under DataParallel: ranks stay bit-identical, nothing is lost, checkpoints resume."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import anabranch as ab
from anabranch import Network
from anabranch.values.kinds.formats import FORMATS
from parallel.given_gradients import (
    COLUMNS,
    ROWS,
    GivenGradients,
    fresh_of,
    gradients,
    matrices_by,
    one_step,
    residuals_of,
)
from parallel.models import Doubles
from parallel.twins import Feature, bits, plain_train, steps, twins
from ranks import cases_on_ranks, on_ranks

pytestmark = pytest.mark.slow

POINTS = [(0, 1e-5, 0.0), (1 << 20, 1e-3, 0.0)]


def planned_run(rank: int, kind: str, scenario: str) -> dict[str, Any]:
    """Train beside DDP; how far the averages are from DDP's, relative to their norm."""
    network = Network.measured(dist.get_world_size(), {"dense": POINTS, kind: POINTS})
    theirs, ours = twins(Feature(ours={"compress": kind, "network": network, "planner": "single"}), scenario)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, ours)]
    errors, kinds = [], set()
    for step in steps(ours):
        ours.module.load_state_dict(theirs.module.state_dict())
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
        if ours.plan is not None:
            kinds |= {bucket.collective for bucket in ours.plan.buckets}
        exact, found = (
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) for model in (theirs, ours)
        )
        errors.append(float((found - exact).norm() / exact.norm()))
    return {"errors": errors, "kinds": sorted(kinds), "explained": ours.explain(), "bits": bits(found).hex()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_averages_are_close_to_ddps_and_equal_on_all_ranks(world_size: int) -> None:
    cases = {kind: (planned_run, kind, "keeps the plan") for kind in FORMATS}
    for kind, answers in cases_on_ranks(cases, world_size).items():
        for answer in answers:
            assert kind in answer["kinds"]
            most = {"bf16": 0.006, "int8": 0.02, "int4": 0.6}[kind]  # int4 sends last step's error, too
            assert 0 < max(answer["errors"]) < most, kind
            assert answer["bits"] == answers[0]["bits"], kind
        assert f", {kind}" in answers[0]["explained"]


INT4_PLAN = ab.Plan((ab.Bucket(("second", "first"), collective="int4"), ab.Bucket(("bias",), collective="int8")))


def int4() -> tuple[GivenGradients, ab.DataParallel]:
    model = GivenGradients()
    return model, ab.DataParallel(model, plan=INT4_PLAN, compress="int4", profile_steps=0)


def conserved_run(rank: int) -> dict[str, Any]:
    """Given gradients under int4: what was computed, what was applied, and what is kept in the end."""
    model, parallel = int4()
    computed = torch.zeros(2, ROWS, COLUMNS)
    applied = torch.zeros(2, ROWS, COLUMNS)
    for step in range(20):
        computed += torch.stack(gradients(step, rank))
        applied += one_step(model, parallel, step, rank)
    if dist.get_world_size() > 1:
        assert "bucket to first: rounding errors of norm" in parallel.explain()
    return {"computed": computed, "applied": applied, "residuals": residuals_of(parallel)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_int4_loses_nothing(world_size: int) -> None:
    answers = on_ranks(conserved_run, world_size)
    computed = sum(answer["computed"].double() for answer in answers)
    kept = sum(answer["residuals"].double() for answer in answers)
    torch.testing.assert_close(world_size * answers[0]["applied"].double() + kept, computed, rtol=1e-4, atol=1e-4)
    if world_size > 1:
        assert float(kept.abs().max()) > 0


def with_options(options: ab.Quantised) -> tuple[GivenGradients, ab.DataParallel]:
    model = GivenGradients()
    return model, ab.DataParallel(model, plan=matrices_by(options.kind), compress=options, profile_steps=0)


def resumed(rank: int, options: ab.Quantised, cut: int | None) -> torch.Tensor:
    model, parallel = with_options(options)
    for step in range(8):
        if step == cut:
            kept = parallel.comm_state_dict()
            parallel.close()
            model, parallel = with_options(options)
            parallel.load_comm_state_dict(kept)
        last = one_step(model, parallel, step, rank)
    return torch.cat([last.flatten(), residuals_of(parallel).flatten()])


def test_residuals_resume_bit_by_bit() -> None:
    for options in (ab.Quantised("int4"), ab.Quantised("int8", residual=True)):
        found = cases_on_ranks({"whole": (resumed, options, None), "cut": (resumed, options, 5)}, 2)
        for whole, cut in zip(found["whole"], found["cut"], strict=True):
            assert torch.equal(whole, cut), options


OPTIONS = [ab.Quantised(kind, residual=residual) for kind in FORMATS for residual in (False, True)]


def optioned(rank: int, options: ab.Quantised) -> dict[str, Any]:
    """Given gradients: what was computed, what was applied in each step, and what is kept in the end."""
    model, parallel = with_options(options)
    computed = torch.stack([torch.stack(gradients(step, rank)) for step in range(6)])
    applied = torch.stack([one_step(model, parallel, step, rank) for step in range(6)])
    return {"computed": computed, "applied": applied, "state": parallel.comm_state_dict()}


def test_every_option() -> None:
    found = cases_on_ranks({str(options): (optioned, options) for options in OPTIONS}, 2)
    for options in OPTIONS:
        check_option(options, found[str(options)])


def check_option(options: ab.Quantised, answers: list[dict[str, Any]]) -> None:
    """Ranks have the same averages, close to the exact ones, and what is missing is in residuals, if they are kept."""
    assert bits(answers[0]["applied"]) == bits(answers[1]["applied"])
    exact = (answers[0]["computed"] + answers[1]["computed"]).double() / 2
    found = answers[0]["applied"].double()
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < {"bf16": 0.006, "int8": 0.1, "int4": 0.5}[options.kind] * (2 if options.keeps_residual else 1)
    if options.keeps_residual:
        pieces = [answer["state"]["residuals"] for answer in answers]
        kept = torch.stack([torch.stack([piece["first"], piece["second"]]) for piece in pieces]).double().sum(0)
        torch.testing.assert_close(
            2 * found.sum(0) + kept.view(2, ROWS, COLUMNS), 2 * exact.sum(0), rtol=1e-4, atol=1e-4
        )
    else:
        assert all(answer["state"] == {} for answer in answers)


def poisoned(rank: int, kind: str) -> list[bool]:
    """Whether averages were finite in each step; one rank's gradient is not in the fourth."""
    model, parallel = fresh_of(kind)
    seen = []
    for step in range(6):
        bad = float("nan") if step == 3 and rank == 1 else 1.0
        seen.append(bool(one_step(model, parallel, step, rank, scale=bad).isfinite().all()))
    return seen


def test_what_is_not_finite_reaches_all_ranks_in_that_step_only() -> None:
    for kind, seen in cases_on_ranks({kind: (poisoned, kind) for kind in FORMATS}, 2).items():
        assert seen == [[True, True, True, False, True, True]] * 2, kind


def skipped(rank: int) -> dict[str, Any]:
    """A scaler skips a step in which another bucket is not finite: what int4 sent in it is put back."""
    model, parallel = int4()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6)
    parallel.follow(scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    computed = torch.zeros(2, ROWS, COLUMNS)
    for step in range(6):
        optimizer.zero_grad()
        one, other = gradients(step, rank)
        loss = parallel(one, other)
        if step == 3 and rank == 1:
            loss = loss + model.bias.sum() * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        computed += torch.stack([one, other]) if step != 3 else 0.0
    weights = torch.stack([model.first.detach(), model.second.detach()])
    return {"computed": computed, "applied": -weights, "residuals": residuals_of(parallel) / scaler.get_scale()}


def test_a_skipped_step_changes_the_sum_of_residuals_by_its_gradients_at_most() -> None:
    answers = on_ranks(skipped, 2)
    computed = sum(answer["computed"].double() for answer in answers)
    kept = sum(answer["residuals"].double() for answer in answers)
    in_the_skipped_step = sum(torch.stack(gradients(3, rank)).double() for rank in range(2))
    total = 2 * answers[0]["applied"].double() + kept
    torch.testing.assert_close(total, computed + in_the_skipped_step, rtol=1e-4, atol=1e-4)


def low_precision(rank: int, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Given gradients of 16 bits: these, what was applied in each step, and what is kept in the end."""
    model = GivenGradients().to(dtype)
    parallel = ab.DataParallel(model, plan=matrices_by(kind), compress=kind, profile_steps=0)
    given, applied = [], []
    for step in range(6):
        given.append(torch.stack(gradients(step, rank)).to(dtype))
        model.zero_grad()
        parallel(*given[-1]).backward()
        assert model.first.grad is not None and model.second.grad is not None
        applied.append(torch.stack([model.first.grad, model.second.grad]).clone())
    kept = parallel.comm_state_dict().get("residuals", {})
    return {"given": torch.stack(given).double(), "applied": torch.stack(applied), "kept": kept}


def test_gradients_of_16_bits() -> None:
    matrix = [(kind, dtype) for kind in FORMATS for dtype in (torch.bfloat16, torch.float16)]
    found = cases_on_ranks({str(case): (low_precision, *case) for case in matrix}, 2)
    for kind, dtype in matrix:
        check_16_bits(kind, dtype, found[str((kind, dtype))])


def check_16_bits(kind: str, dtype: torch.dtype, answers: list[dict[str, Any]]) -> None:
    """Averages have the gradients' dtype, residuals are float32, and nothing else is lost."""
    found, total = answers[0]["applied"].double(), answers[0]["given"] + answers[1]["given"]
    assert answers[0]["applied"].dtype == dtype and bits(answers[1]["applied"]) == bits(answers[0]["applied"])
    error = float((found - total / 2).norm() / total.norm() * 2)
    assert 0 < error < {"bf16": 0.003, "int8": 0.03, "int4": 0.3}[kind]
    pieces = [[answer["kept"][name] for name in ("first", "second")] for answer in answers if answer["kept"]]
    assert len(pieces) == (2 if kind == "int4" else 0)
    if pieces:
        assert all(piece.dtype == torch.float32 for own in pieces for piece in own)
        kept = torch.stack([torch.stack(own) for own in pieces]).double().sum(dim=0).view(2, ROWS, COLUMNS)
        lost = (total.sum(dim=0) - 2 * found.sum(dim=0) - kept).abs()
        in_dtype = torch.finfo(dtype).eps * found.abs().sum(dim=0)  # of two ranks, each half of this for each average
        assert bool((lost <= in_dtype + 1e-4).all()), "only averages are rounded to 16 bits, and no residual"


def searched(rank: int, kind: str) -> dict[str, set[str]]:
    """The kinds by which a model of two dtypes was sent in a search."""
    network = Network.measured(2, {"dense": POINTS, kind: POINTS})
    _, ours = twins(Feature(Doubles, ours={"compress": kind, "network": network, "planner": "optimal"}))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    seen: dict[str, set[str]] = {"a": set(), "b": set()}
    for step in steps(ours):
        plain_train(ours, optimizer, step)
        for bucket in ours.plan.buckets if ours.plan is not None else ():
            for name in bucket.names:
                seen[name[0]].add(bucket.collective)
    return seen


def test_float64_travels_dense() -> None:
    for kind, answers in cases_on_ranks({kind: (searched, kind) for kind in ("int8", "int4")}, 2).items():
        for seen in answers:  # bf16: in test_compress.py
            assert kind in seen["a"] and seen["b"] == {"dense"}
