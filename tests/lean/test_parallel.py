"""LeanDataParallel trains the same weights as without Lean, bit by bit, whatever the model does."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from lean.launches import Answers, each_on_ranks
from ranks import cases_on_ranks, on_ranks

WIDTH = 24
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "two groups": lambda params: torch.optim.AdamW([
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "lr": 0.03},
    ]),
}  # fmt: skip


class Tied(nn.Module):
    """One weight at both ends, and a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.guess = nn.Linear(WIDTH, 30, bias=False)
        self.guess.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embed(tokens))
        for layer in self.inner:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.guess(hidden).flatten(0, 1), tokens.flatten())


def made(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(3)
    return Tied().to(device, dtype)


def planned(model: nn.Module, kind: str) -> ab.Plan:
    """Matrices by ``kind`` in two buckets, vectors dense."""
    named = [(name, p) for name, p in reversed(list(model.named_parameters())) if p.requires_grad]
    matrices, vectors = [n for n, p in named if p.dim() > 1], [n for n, p in named if p.dim() < 2]
    parts = [(matrices[:2], kind), (vectors, "dense"), (matrices[2:], kind)]
    return ab.Plan(tuple(ab.Bucket(tuple(names), collective=kind) for names, kind in parts))


def compressing(kind: str) -> ab.OkTopk | str | None:
    """The ``compress=`` under which a plan may name this kind."""
    if kind.startswith("oktopk"):
        return ab.OkTopk(density=0.1, warmup_steps=0, deterministic=True)
    return None if kind == "dense" else kind


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(30, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def side_by_side(
    rank: int,
    optimizer: str,
    kind: str,
    accumulate: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """The same training with and without Lean, compared after every step; the weights at the end."""
    factory = OPTIMIZERS[optimizer]
    options = compressing(kind)
    plain_model, lean_model = made(device, dtype), made(device, dtype)
    plan = planned(plain_model, kind)
    plain = ab.DataParallel(plain_model, plan=plan, compress=options, profile_steps=0)
    own = factory([p for p in plain_model.parameters() if p.requires_grad])
    memory = ab.Lean(factory)
    lean: Any = ab.DataParallel(lean_model, plan=plan, compress=options, profile_steps=0, memory=memory)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 4, 0.5) for each in (own, lean.optimizer)]
    for step in range(0, 8 * accumulate, accumulate):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            for model in (plain, lean):
                with nullcontext() if last else model.no_sync():
                    model(tokens(step + micro, rank).to(device)).backward()
        own.step()
        own.zero_grad()
        lean.optimizer.step()  # as in a program that was written for DDP; it does nothing
        for scheduler in schedulers:
            scheduler.step()
        for (name, a), b in zip(plain_model.named_parameters(), lean_model.parameters(), strict=True):
            assert torch.equal(a, b), (step, name)
            assert b.grad is None, name
    ours, theirs = (each.comm_state_dict().get("residuals", {}) for each in (plain, lean))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(piece.cpu(), theirs[name].cpu()) for name, piece in ours.items())
    weights = [p.detach().clone() for p in lean_model.parameters()]
    plain.close()
    lean.close()
    return weights


KINDS = ("oktopk:0.1", "dense", "int4")
ROUNDED = ("bf16", "int8")


def test_the_same_weights_with_and_without() -> None:
    scenarios = [*((one, "oktopk:0.1", 1) for one in OPTIMIZERS), ("momentum", "int4", 1), ("fused", "int4", 1)]
    in_bfloat16 = [("adamw", kind, 2, "cpu", torch.bfloat16) for kind in KINDS]
    for answers in each_on_ranks(side_by_side, 2, [*scenarios, *in_bfloat16], timeout_s=120.0):
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@pytest.mark.slow
def test_accumulation() -> None:
    each_on_ranks(side_by_side, 3, [(one, kind, 2) for one in ("momentum", "adamw") for kind in KINDS])


def against_ddp(rank: int, made_by: str) -> None:
    """Dense, with buckets as DDP makes them: its weights, bit by bit."""
    ours, theirs = made(), made()
    lean: Any = ab.DataParallel(ours, profile_steps=0, memory=ab.Lean(OPTIMIZERS[made_by]))
    ddp = DistributedDataParallel(theirs)
    optimizer = OPTIMIZERS[made_by]([p for p in theirs.parameters() if p.requires_grad])
    for step in range(5):
        lean(tokens(step, rank)).backward()
        ddp(tokens(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b) and a.grad is None
    assert lean.comm_state_dict() == {}, "nothing is kept between steps"
    lean.close()


def test_dense_trains_as_ddp() -> None:
    each_on_ranks(against_ddp, 2, [(optimizer,) for optimizer in OPTIMIZERS])


def through_the_course(rank: int) -> str:
    """Profiled, measured, planned, tried, chosen: with the weights of all ranks the same all along."""
    model = made()
    lean: Any = ab.DataParallel(
        model, compress=ab.OkTopk(density=0.2, warmup_steps=2), profile_steps=2, memory=ab.Lean(OPTIMIZERS["momentum"])
    )
    first = last = 0.0
    for step in range(60):
        loss = lean(tokens(step, rank))
        loss.backward()
        first, last = first or loss.item(), loss.item()
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(mine, theirs), step
    assert last < first
    answers = str(lean.explain())
    lean.close()
    return answers


def test_all_stages_of_tuning(launched: Answers) -> None:
    answers = launched["through_the_course"]
    assert "running" in answers[0] and "speed-up" in answers[0]


def not_finite(rank: int, residuals: str, kind: str) -> dict[str, Any]:
    """Rank 1's gradient of one matrix is inf in step 3: its bucket is left as it is, everywhere; the others go on."""
    model = made()
    plan = planned(model, kind)
    options = ab.OkTopk(density=0.1, warmup_steps=0) if kind != "dense" else None
    memory = ab.Lean(OPTIMIZERS["adamw"], residuals=residuals)  # type: ignore[arg-type]
    lean: Any = ab.DataParallel(model, plan=plan, compress=options, profile_steps=0, memory=memory)
    bad = plan.buckets[0].names[0]
    at = 0
    model.get_parameter(bad).register_hook(lambda g: g * float("inf") if rank == 1 and at == 3 else g)
    for at in range(5):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        lean(tokens(at, rank)).backward()
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        skipped = set(plan.buckets[0].names)
        assert (moved & skipped == set()) if at == 3 else (skipped <= moved), at
        assert moved >= set(plan.buckets[1].names)
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    waiting = lean.comm_state_dict().get("residuals", {})
    assert all(bool(torch.isfinite(piece).all()) for piece in waiting.values())
    found = {"skipped": lean.skipped}
    lean.close()
    return found


def test_a_bucket_that_is_not_finite_is_updated_nowhere() -> None:
    scenarios = [("in place", "dense"), *((how, "oktopk:0.1") for how in ("in place", *ROUNDED))]
    assert each_on_ranks(not_finite, 2, scenarios) == [[{"skipped": 1}] * 2] * 4


def wrapped(model: nn.Module, optimizer: str, residuals: Any) -> Any:
    memory = ab.Lean(OPTIMIZERS[optimizer], residuals=residuals)
    options = ab.OkTopk(density=0.1, warmup_steps=0, deterministic=True)
    return ab.DataParallel(model, plan=planned(model, "oktopk:0.1"), compress=options, profile_steps=0, memory=memory)


def resumed(rank: int, optimizer: str, residuals: str) -> None:
    """Weights, optimizer and residuals, saved and loaded in the middle: the same bits as without."""
    whole, first, second = made(), made(), made()
    through, stopped = (wrapped(model, optimizer, residuals) for model in (whole, first))
    for step in range(8):
        through(tokens(step, rank)).backward()
        if step < 4:
            stopped(tokens(step, rank)).backward()
    kept = (first.state_dict(), stopped.optimizer.state_dict(), stopped.comm_state_dict())
    stopped.close()
    going_on = wrapped(second, optimizer, residuals)
    second.load_state_dict(kept[0])
    going_on.optimizer.load_state_dict(kept[1])
    going_on.load_comm_state_dict(kept[2])
    for step in range(4, 8):
        going_on(tokens(step, rank)).backward()
    for (name, a), b in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    through.close()
    going_on.close()


@pytest.mark.slow
def test_resuming_is_exact() -> None:
    each_on_ranks(resumed, 2, [(one, how) for one in ("momentum", "adamw") for how in ("in place", *ROUNDED)])


def scaled(rank: int, residuals: str) -> None:
    """By powers of two: the same bits as without, before and after the scale changes; and it follows what happens."""
    plain_model, scaled_model = made(), made()
    plain, lean = (wrapped(model, "adamw", residuals) for model in (plain_model, scaled_model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    lean.follow(scaler)
    scales, at = [], 0
    bad = planned(made(), "dense").buckets[0].names[0]
    scaled_model.get_parameter(bad).register_hook(lambda g: g * float("inf") if rank == 1 and at == 6 else g)
    for at in range(9):
        scaler.scale(lean(tokens(at, rank))).backward()
        scales.append(scaler.get_scale())
        if at < 6:
            plain(tokens(at, rank)).backward()
            for (name, a), b in zip(plain_model.named_parameters(), scaled_model.parameters(), strict=True):
                assert torch.equal(a, b), (at, name)
    assert scales == [2.0**8] * 3 + [2.0**9] * 3 + [2.0**10] + [2.0**9] * 2
    plain.close()
    lean.close()


def test_a_loss_scale_is_followed() -> None:
    each_on_ranks(scaled, 2, [(how,) for how in ("in place", *ROUNDED)])


def with_activations(rank: int, options: dict[str, Any]) -> None:
    """Kept, or not: the same bits."""
    models = [made(), made()]
    wrapped: list[Any] = [
        ab.DataParallel(model, profile_steps=0, memory=ab.Lean(OPTIMIZERS["adamw"], **each))
        for model, each in zip(models, ({}, options), strict=True)
    ]
    for step in range(5):
        for each in wrapped:
            each(tokens(step, rank)).backward()
        for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a, b), (step, name)
    for each in wrapped:
        each.close()


def test_activation_modes_change_no_weight() -> None:
    each_on_ranks(with_activations, 2, [({"activations": "recompute"},), ({"within": 1 << 30},)])


def unfrozen(rank: int) -> str:
    model = made()
    lean: Any = ab.DataParallel(model, profile_steps=0, memory=ab.Lean(OPTIMIZERS["adamw"]))
    lean(tokens(0, rank)).backward()
    model.frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match="wrap the module again") as caught:
        lean(tokens(1, rank))
    lean.close()
    return str(caught.value)


def test_what_is_unfrozen_later_is_not_silently_left_out(launched: Answers) -> None:
    assert all("frozen.weight is " in answers and "unfrozen" in answers for answers in launched["unfrozen"])


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def scaled_windows(rank: int) -> list[float]:
    """Windows of four micro-batches, while the scale grows after every second."""
    model = nn.Linear(4, 4, bias=False)
    lean: Any = ab.DataParallel(model, profile_steps=0, memory=ab.Lean(lambda params: torch.optim.SGD(params, lr=1.0)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    lean.follow(scaler)
    moved = []
    for _ in range(6):
        before = model.weight.detach().clone()
        for micro in range(4):
            with nullcontext() if micro == 3 else lean.no_sync():
                scaler.scale(lean(torch.ones(1, 4)).sum()).backward()
        moved.append(float((before - model.weight.detach())[0, 0]))
    assert scaler.get_scale() > 1024.0
    lean.close()
    return moved


def test_gradients_accumulated_for_one_step_have_one_scale(launched: Answers) -> None:
    for moved in launched["scaled_windows"]:
        assert moved == pytest.approx([4.0] * 6, rel=1e-5)


def test_a_scale_that_cannot_grow_stays() -> None:
    on_ranks(at_the_limit, 1)


def at_the_limit(rank: int) -> None:
    lean: Any = ab.DataParallel(nn.Linear(4, 4), profile_steps=0, memory=ab.Lean(sgd))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
    lean.follow(scaler)
    for _ in range(3):
        scaler.scale(lean(torch.ones(1, 4)).sum() * 2.0**-100).backward()
    assert scaler.get_scale() == 2.0**127
    lean.close()


@pytest.fixture(scope="module")
def launched() -> Answers:
    """What each scenario of this file returns on each rank, in one launch."""
    return cases_on_ranks({one.__name__: (one,) for one in SCENARIOS}, 2, timeout_s=240.0)


SCENARIOS: tuple[Callable[[int], object], ...] = (
    through_the_course,
    unfrozen,
    scaled_windows,
)
