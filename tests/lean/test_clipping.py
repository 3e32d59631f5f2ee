"""Clipping by the norm over all gradients under Lean: the weights, and the norm, of DDP and torch's clip_grad_norm_."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.lean.bucket_update import HeldUpdate
from anabranch.planning.footprint import HELD_NBYTES
from anabranch.values.errors import UpdateError
from lean.launches import Answers, each_on_ranks
from lean.test_parallel import OPTIMIZERS, made, planned, tokens
from parallel.given_gradients import COLUMNS, ROWS, GivenGradients, gradients
from ranks import cases_on_ranks, on_ranks

STEPS = 6
CLIP = 0.05  # below all norms of these trainings


def lean_of(model: nn.Module, optimizer: str, clip: dict[str, Any], **options: Any) -> Any:
    return ab.DataParallel(model, profile_steps=0, memory=ab.Lean(OPTIMIZERS[optimizer], **clip), **options)


def plan_on_lanes(model: nn.Module, lanes: int) -> ab.Plan:
    named = [name for name, p in reversed(list(model.named_parameters())) if p.requires_grad]
    return ab.Plan(tuple(ab.Bucket((name,), lane=index % lanes) for index, name in enumerate(named)))


def against_ddp(rank: int, optimizer: str, accumulate: int, dtype: str = "float32", lanes: int = 1) -> None:
    """Dense, bit by bit: of two summands the order does not matter."""
    ours, theirs = (made().to(getattr(torch, dtype)) for _ in range(2))
    lean = lean_of(ours, optimizer, {"clip_norm": CLIP}, plan=plan_on_lanes(ours, lanes), lanes=lanes)
    ddp = DistributedDataParallel(theirs)
    stepped = OPTIMIZERS[optimizer]([p for p in theirs.parameters() if p.requires_grad])
    assert lean.grad_norm is None
    for step in range(STEPS):
        for micro in range(accumulate):
            for model in (lean, ddp):
                with nullcontext() if micro == accumulate - 1 else model.no_sync():
                    model(tokens(accumulate * step + micro, rank)).backward()
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
        stepped.step()
        stepped.zero_grad()
        assert float(norm) > CLIP and torch.equal(norm, lean.clip_grad_norm_(CLIP))
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b) and a.grad is None, (step, name)
    lean.close()


def test_dense_training_is_that_of_ddp() -> None:
    scenarios = [
        ("momentum", 1, "float32", 1),
        ("adamw", 2, "float32", 1),
        ("two groups", 1, "float32", 1),
        ("fused", 1, "float32", 3),
        ("adamw", 2, "float32", 3),
        ("momentum", 1, "bfloat16", 1),
    ]
    each_on_ranks(against_ddp, 2, scenarios, timeout_s=120.0)


def step_both(lean: Any, ddp: nn.Module, stepped: torch.optim.Optimizer, *given: Any) -> None:
    """One clipped step of both models; their norms are close."""
    for model in (lean, ddp):
        model(*given).backward()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(ddp.parameters(), CLIP), lean.grad_norm)
    stepped.step()
    stepped.zero_grad()


def on_three_ranks(rank: int) -> None:
    """Where the order of sums is not the same: to rounding."""
    ours, theirs = made(), made()
    lean, ddp = lean_of(ours, "momentum", {"clip_norm": CLIP}), DistributedDataParallel(theirs)
    stepped = OPTIMIZERS["momentum"]([p for p in theirs.parameters() if p.requires_grad])
    for step in range(STEPS):
        step_both(lean, ddp, stepped, tokens(step, rank))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    lean.close()


def test_three_ranks_and_one() -> None:
    on_ranks(on_three_ranks, 3)
    on_ranks(against_ddp, 1, "adamw", 2)


def through_the_course(rank: int) -> None:
    """Buckets change while the training is profiled, measured and planned: the bits stay DDP's."""
    ours, theirs = made(), made()
    memory = ab.Lean(OPTIMIZERS["momentum"], clip_norm=CLIP)
    lean: Any = ab.DataParallel(ours, profile_steps=2, memory=memory)
    ddp = DistributedDataParallel(theirs)
    stepped = OPTIMIZERS["momentum"]([p for p in theirs.parameters() if p.requires_grad])
    for step in range(40):
        for model in (lean, ddp):
            model(tokens(step, rank)).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
        stepped.step()
        stepped.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)), step
    assert lean.trace is not None and lean.network is not None
    lean.close()


def test_clipping_does_not_depend_on_the_buckets(launched: Answers) -> None:
    assert "through_the_course" in launched  # its own assertions hold on every rank


class Either(nn.Module):
    """Two branches, of which each forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        return torch.stack([self.branches[index](x) for index in used]).sum()


def unused(rank: int) -> None:
    """A branch that one rank uses, and one that none does, which has no momentum then."""
    ours, theirs = Either(), Either()
    lean = lean_of(ours, "momentum", {"clip_norm": CLIP}, find_unused_parameters=True)
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    stepped = OPTIMIZERS["momentum"](theirs.parameters())
    for step in range(STEPS):
        given = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        step_both(lean, ddp, stepped, given, *([0, 1] if step < 2 else [rank] if step < 4 else [1]))
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    lean.close()


def test_unused_parameters_are_left_alone(launched: Answers) -> None:
    assert "unused" in launched  # its own assertions hold on every rank


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ArithmeticError("no step today")


def failing(rank: int) -> list[str]:
    model = made()
    memory = ab.Lean(lambda parameters: Failing(parameters, lr=0.1), clip_norm=CLIP)
    lean: Any = ab.DataParallel(model, profile_steps=0, memory=memory)
    said = []
    calls: list[Callable[[], Any]] = [lambda: lean(tokens(0, rank)).backward(), lambda: lean(tokens(1, rank))]
    for call in calls:
        with pytest.raises((RuntimeError, UpdateError)) as caught:
            call()
        said.append(str(caught.value))
    lean.close()
    return said


def test_a_step_that_fails_is_named() -> None:
    for failed, afterwards in on_ranks(failing, 2):
        assert "the optimizer's step failed on this rank" in failed and "no step today" in failed
        assert "a backward pass was broken off by an exception" in afterwards


def against_oktopk(rank: int, optimizer: str, accumulate: int, compress: str) -> None:
    """Beside DataParallel with the same compression, whose gradients torch clips: weights and residuals, bit by bit."""
    options: Any = ab.OkTopk(density=0.1, warmup_steps=0, deterministic=True)
    kind, options = ("oktopk:0.1", options) if compress == "oktopk" else (compress, compress)
    plain_model, lean_model = made(), made()
    plan = planned(plain_model, kind)
    plain = ab.DataParallel(plain_model, plan=plan, compress=options, profile_steps=0)
    stepped = OPTIMIZERS[optimizer]([p for p in plain_model.parameters() if p.requires_grad])
    lean = lean_of(lean_model, optimizer, {"clip_norm": CLIP}, plan=plan, compress=options)
    for step in range(STEPS):
        for micro in range(accumulate):
            for model in (plain, lean):
                with nullcontext() if micro == accumulate - 1 else model.no_sync():
                    model(tokens(accumulate * step + micro, rank)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        stepped.step()
        stepped.zero_grad()
        assert float(norm) > CLIP and torch.equal(norm, lean.grad_norm)
        for (name, a), b in zip(plain_model.named_parameters(), lean_model.named_parameters(), strict=True):
            assert torch.equal(a, b[1]), (step, name)
    ours, theirs = (each.comm_state_dict()["residuals"] for each in (plain, lean))
    assert ours.keys() == theirs.keys() and all(torch.equal(piece, theirs[name]) for name, piece in ours.items())
    plain.close()
    lean.close()


def test_compressed_training_is_that_of_data_parallel() -> None:
    scenarios = [
        ("momentum", 1, "oktopk"),
        ("adamw", 2, "oktopk"),
        ("fused", 1, "oktopk"),
        ("momentum", 1, "int4"),  # has residuals, and averages without zeros
    ]
    each_on_ranks(against_oktopk, 2, scenarios)


def scaled(rank: int) -> list[dict[str, Any]]:
    """DDP with a GradScaler and clipping, and Lean that follows one; rank 1 has an infinite gradient in step 3."""
    ours, theirs = made(), made()
    lean, ddp = lean_of(ours, "adamw", {"clip_norm": CLIP}), DistributedDataParallel(theirs)
    stepped = OPTIMIZERS["adamw"]([p for p in theirs.parameters() if p.requires_grad])
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4) for _ in range(2)]
    lean.follow(scalers[0])
    at, states = 0, []
    for model in (ours, theirs):
        model.embed.weight.register_hook(lambda g: g * math.inf if rank == 1 and at == 3 else g)
    for at in range(9):
        for scaler, model in zip(scalers, (lean, ddp), strict=True):
            scaler.scale(model(tokens(at, rank))).backward()
        scalers[1].unscale_(stepped)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
        scalers[1].step(stepped)
        scalers[1].update()
        stepped.zero_grad()
        assert torch.equal(norm, lean.grad_norm) or (at == 3 and not math.isfinite(norm))
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), (at, name)
    for scaler, model in zip(scalers, (lean, ddp), strict=True):  # Lean sets the scale before the next forward
        model(tokens(9, rank))
        states.append(scaler.state_dict())
    assert lean.skipped == len(lean.layout.buckets)
    lean.close()
    return states


def test_a_scaler_skips_the_same_steps_as_under_ddp(launched: Answers) -> None:
    for ours, theirs in launched["scaled"]:
        assert ours == theirs and ours["scale"] == 2.0**8


def left_out(rank: int, residuals: str) -> dict[str, Any]:
    """As in parallel/test_skipped_steps.py: in the third of four steps one bucket's gradient is infinite on rank 1."""
    model = GivenGradients()
    sparse = [ab.Bucket((name,), collective="oktopk:0.1") for name in ("second", "first")]
    memory = ab.Lean(lambda p: torch.optim.SGD(p, lr=1.0), residuals=residuals, clip_norm=1e9)  # type: ignore[arg-type]
    lean: Any = ab.DataParallel(
        model, plan=ab.Plan((*sparse, ab.Bucket(("bias",)))), compress=ab.OkTopk(density=0.1, warmup_steps=0),
        profile_steps=0, memory=memory,
    )  # fmt: skip
    computed, start = torch.zeros(ROWS, COLUMNS), model.second.detach().clone()
    for step in range(4):
        first, second = gradients(step, rank)
        if step == 2 and rank == 1:
            first = first.clone()
            first[0, 0] = math.inf
        before = [parameter.detach().clone() for parameter in model.parameters()]
        lean(first, second).backward()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == (step == 2) and math.isfinite(lean.grad_norm) == (step != 2)
        computed += second
    waiting = lean.comm_state_dict()["residuals"]["second"].view(ROWS, COLUMNS)
    answer = {
        "computed": computed,
        "applied": start - model.second.detach(),
        "waiting": waiting,
        "skipped": lean.skipped,
    }
    lean.close()
    return answer


def test_a_step_that_is_left_out_is_left_out_whole_and_loses_nothing() -> None:
    for answers, within in zip(each_on_ranks(left_out, 2, [("in place",), ("bf16",)]), (1e-4, 0.3), strict=True):
        computed = sum(one["computed"].double() for one in answers)
        accounted = 2 * answers[0]["applied"].double() + sum(one["waiting"].double() for one in answers)
        assert float((computed - accounted).abs().max()) < within
        assert [one["skipped"] for one in answers] == [3, 3]


def overflowing(rank: int) -> None:
    """Gradients that are finite and whose norm is not: torch scales them by 0, and momentum goes on."""
    ours, theirs = (nn.Linear(4, 4, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    lean, ddp = lean_of(ours, "momentum", {"clip_norm": 1.0}), DistributedDataParallel(theirs)
    stepped = OPTIMIZERS["momentum"](theirs.parameters())
    for factor in (1.0, 1e30, 1.0):
        for model in (lean, ddp):
            (model(torch.ones(2, 4)).sum() * factor).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        stepped.step()
        stepped.zero_grad()
        assert torch.equal(norm, lean.grad_norm) and math.isinf(norm) == (factor > 1)
        assert torch.equal(ours.weight, theirs.weight)
    assert lean.skipped == 0
    lean.close()


def test_a_norm_that_overflows_clips_as_torch_does(launched: Answers) -> None:
    assert "overflowing" in launched  # its own assertions hold on every rank


def only_measured(rank: int) -> None:
    """An infinite limit: the norm is known, and updates do not wait for it."""
    ours, theirs = made(), made()
    lean, plain = (lean_of(model, "adamw", clip) for model, clip in ((ours, {"clip_norm": math.inf}), (theirs, {})))
    assert not lean.layout.updates.holds_updates and plain.grad_norm is None
    for step in range(3):
        for model in (lean, plain):
            model(tokens(step, rank)).backward()
        assert float(lean.grad_norm) > 0
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    lean.close()
    plain.close()


def test_the_norm_can_be_known_without_clipping(launched: Answers) -> None:
    assert "only_measured" in launched  # its own assertions hold on every rank


# torch's own function, by which programs and frameworks clip.


def by_torch(rank: int) -> list[str]:
    answers = []

    def refused(parameters: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(RuntimeError) as caught:
            nn.utils.clip_grad_norm_(parameters, *args, **kwargs)
        answers.append(str(caught.value))

    model, other = made(), nn.Linear(3, 3)
    lean = lean_of(model, "adamw", {"clip_norm": 0.5})
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)) == 0.0  # as torch, before the first step
    lean(tokens(0, rank)).backward()
    other(torch.ones(1, 3)).sum().backward()
    for max_norm in (0.5, math.inf):
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        assert torch.equal(norm, lean.grad_norm) and torch.equal(norm, lean.clip_grad_norm_(max_norm))
    assert float(nn.utils.clip_grad_norm_(other.parameters(), 0.5)) > 0.5  # somebody else's: as ever
    refused(lean.parameters(), 1.0)
    refused(lean.parameters(), 0.5, norm_type=math.inf)
    refused(model.inner.parameters(), 0.5)
    refused([*model.parameters(), *other.parameters()], 0.5)
    total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
    assert torch.equal(total, lean.grad_norm)  # under torch's public names, too
    second = lean_of(made(), "adamw", {"clip_norm": 0.5})
    second(tokens(0, rank)).backward()
    refused([*lean.parameters(), *second.parameters()], 0.5)
    second.module.inner[0].bias.data.fill_(math.nan)
    second(tokens(0, rank)).backward()
    refused(second.parameters(), 0.5, error_if_nonfinite=True)
    second.close()
    with lean.no_sync():
        lean(tokens(1, rank)).backward()
    model.inner[0].bias.grad = None  # as if it were not used
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) > 1e-3  # gradients of this rank are there
    lean.close()
    assert float(nn.utils.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0)) == 0.0
    unclipped = lean_of(made(), "adamw", {})
    refused(unclipped.parameters(), 1.0)
    unclipped.close()
    nn.utils.clip_grad_norm_(unclipped.parameters(), 1.0)  # closed: there is nobody who would clip
    return answers


def test_clipping_after_backward_leads_to_lean_or_is_refused(launched: Answers) -> None:
    for limit, norm_type, some, mixed, two, not_finite, without in launched["by_torch"]:
        assert "of max_norm 1.0 and norm_type 2.0 under Lean, with clip_norm 0.5" in limit
        assert "so give Lean(clip_norm=1.0), which clips there" in limit
        assert "of max_norm 0.5 and norm_type inf under Lean, with clip_norm 0.5 and norm_type 2" in norm_type
        assert "given 6 of 7 parameters of a model under Lean, and 0 others" in some
        assert "given 7 of 7 parameters of a model under Lean, and 2 others" in mixed
        assert "given 7 of 7 parameters of a model under Lean, and 7 others" in two
        assert "the norm of the gradients is nan" in not_finite
        assert "with clip_norm None" in without


def test_values_that_are_not_zero_are_the_whole() -> None:
    whole = torch.zeros(1000)
    whole[::37] = torch.randn(28)
    whole[5] = math.nan
    bucket: Any = None
    kept = HeldUpdate(bucket, whole, torch.tensor(True), None).compacted()
    assert kept.held.is_sparse and kept.held.values().nbytes + kept.held.indices().nbytes == HELD_NBYTES * 29
    assert torch.equal(kept.average().nan_to_num(7.0), whole.nan_to_num(7.0))
    full = torch.ones(1000)
    copied = HeldUpdate(bucket, full, torch.tensor(True), None).compacted().held
    assert not copied.is_sparse and torch.equal(copied, full) and copied.data_ptr() != full.data_ptr()


def freed(rank: int) -> list[int]:
    """How much memory of averages there is in backward, at most, and after the step."""
    model = made()
    lean = lean_of(model, "adamw", {"clip_norm": CLIP})
    engine, most = lean.layout, 0
    apply = engine.updates.finish_step
    tensors: list[torch.Tensor] = []

    def finish_step() -> Any:
        nonlocal most
        tensors.extend(slot.tensor for slot in engine._slots._slots)
        most = max(most, sum(tensor.untyped_storage().nbytes() for tensor in tensors))
        return apply()

    engine.updates.finish_step = finish_step
    for step in range(3):
        lean(tokens(step, rank)).backward()
    left = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    lean.close()
    return [most, left, sum(p.nbytes for p in model.parameters() if p.requires_grad)]


def test_averages_are_freed_when_they_are_applied(launched: Answers) -> None:
    for most, left, expected in launched["freed"]:
        assert most == expected and left == 0


@pytest.fixture(scope="module")
def launched() -> Answers:
    """What each scenario of this file returns on each rank, in one launch."""
    return cases_on_ranks({one.__name__: (one,) for one in SCENARIOS}, 2, timeout_s=240.0)


SCENARIOS: tuple[Callable[[int], object], ...] = (
    through_the_course,
    unused,
    scaled,
    overflowing,
    only_measured,
    by_torch,
    freed,
)
