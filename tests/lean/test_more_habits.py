"""More habits from DDP under Lean, also where it chooses within a budget: the same results, or one sentence."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils

import anabranch as ab
from anabranch.lean.activations.solver import BudgetError
from lean.launches import Answers, each_on_ranks
from lean.test_habits import STEPS, adamw, adapted, same_weights, train, wrapped
from lean.test_parallel import WIDTH, made, planned, tokens
from ranks import cases_on_ranks

Pair = list[tuple[Any, Any]]  # ours and stock DDP, each with its optimizer


def against_ddp(make: Callable[[], nn.Module] = made, find_unused: bool = False, **options: Any) -> Pair:
    ours, theirs = make(), make()
    lean: Any = ab.DataParallel(ours, profile_steps=0, memory=ab.Lean(adamw, **options))
    ddp = DistributedDataParallel(theirs, find_unused_parameters=find_unused)
    return [(lean, lean.optimizer), (ddp, adamw([p for p in theirs.parameters() if p.requires_grad]))]


def alike(pair: Pair) -> None:
    same_weights(pair[0][0].module, pair[1][0].module)


def with_blocks() -> nn.Module:
    """One weight at both ends, and between them blocks that are worth recomputing."""
    model = made()
    model.inner = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
    )
    return model


def many(step: int, rank: int) -> torch.Tensor:
    """So many tokens that activations are most of the memory."""
    return tokens(step, rank).repeat(16, 5)


def tightest(make: Callable[[], nn.Module], rank: int, clip_norm: float | None = None) -> int:
    """The least budget that Lean names for this model, so that it has to give something up."""
    lean: Any = ab.DataParallel(make(), profile_steps=0, memory=ab.Lean(adamw, within=1000, clip_norm=clip_norm))
    for step in range(2):
        lean(many(step, rank)).backward()
    with pytest.raises(BudgetError) as caught:
        lean(many(2, rank))
    with pytest.raises(BudgetError):  # it does not go away
        lean(many(2, rank))
    lean.close()
    (least,) = re.findall(r"at least (\d+) bytes", str(caught.value))
    return int(least)


# Accumulation by an attribute of DDP, as in nanoGPT.


def with_the_attribute(rank: int) -> int:
    pair = against_ddp()
    for step in range(STEPS):
        for model, optimizer in pair:
            for micro in range(3):
                model.require_backward_grad_sync = micro == 2
                (model(tokens(3 * step + micro, rank)) / 3).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        alike(pair)
    done = int(pair[0][0]._tuner.steps_done)
    pair[0][0].close()
    return done


def test_accumulation_by_ddps_attribute_is_that_of_ddp(launched: Answers) -> None:
    assert launched["with_the_attribute"] == [STEPS, STEPS]


# Another optimizer than that of Lean.


class Halves(nn.Module):
    """The second half is used only where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, given: torch.Tensor, both: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.first(given)
        return self.second(hidden) if both else hidden


def with_an_optimizer_of_ones_own(rank: int) -> str:
    model, other = made(), nn.Linear(3, 3)
    lean = wrapped(model)
    lean(tokens(0, rank)).backward()
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    others.step()  # no gradients either, and none of Lean's affair
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    other(torch.ones(1, 3)).sum().backward()
    both.step()  # has something to do
    both.zero_grad()
    both.step()  # and in other steps not: some of its parameters are not Lean's
    adamw(lean.parameters()).step(lambda: 0.0)  # a closure may bring gradients
    with pytest.raises(RuntimeError) as caught:
        adamw(lean.parameters()).step()
    lean.close()
    adamw(model.parameters()).step()  # it is no longer under Lean
    plan = ab.Plan(tuple(ab.Bucket((f"{half}.weight", f"{half}.bias")) for half in ("second", "first")))
    halves: Any = ab.DataParallel(
        Halves(), profile_steps=0, plan=plan, memory=ab.Lean(adamw), find_unused_parameters=True
    )
    halves(torch.ones(1, 4), both=False).sum().backward()  # a bucket without any gradient
    halves.close()
    return str(caught.value)


def test_an_optimizer_that_would_do_nothing_is_refused(launched: Answers) -> None:
    for words in launched["with_an_optimizer_of_ones_own"]:
        assert "AdamW.step() finds no gradients" in words and "Use model.optimizer" in words


# Schedulers per group, schedulers of schedulers.

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "per group": lambda one: lr_scheduler.LambdaLR(one, [lambda step: 0.9**step, lambda step: 0.5**step]),
    "one after another": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one, 0.1, total_iters=2), lr_scheduler.ExponentialLR(one, 0.7)], milestones=[2]
    ),
    "chained": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(one, 0.5, 2), lr_scheduler.ExponentialLR(one, 0.8)]
    ),
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, 0.001, [0.1, 0.02], step_size_up=2),  # momentum, too
}


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices, "lr": 0.03}, {"params": vectors}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def scheduled(rank: int, name: str) -> None:
    ours, theirs = made(), made()
    optimizers = [two_groups(ours), two_groups(theirs)]
    schedules = [SCHEDULES[name](one) for one in optimizers]
    pair: Pair = list(zip((wrapped(ours, optimizers[0]), DistributedDataParallel(theirs)), optimizers, strict=True))
    for step in range(STEPS):
        for (model, optimizer), schedule in zip(pair, schedules, strict=True):
            train(model, optimizer, rank, range(step, step + 1))
            schedule.step()
        alike(pair)
    rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
    assert rates[0] == rates[1] and rates[0][0] != rates[0][1]
    pair[0][0].close()


def test_schedules_of_groups_are_followed() -> None:
    each_on_ranks(scheduled, 2, [(name,) for name in SCHEDULES])


def frozen_before_the_choice(rank: int) -> tuple[str, bool]:
    """With a plan, within a budget: one parameter is frozen before Lean has chosen."""
    model = made()
    memory = ab.Lean(adamw, within=1 << 30)
    lean: Any = ab.DataParallel(model, profile_steps=0, plan=planned(model, "dense"), memory=memory)
    for step in range(4):
        if step == 2:
            next(model.parameters()).requires_grad_(False)
        lean(tokens(step, rank)).backward()
    told, chosen = lean.explain(), bool(lean._activations.agreed)
    lean.close()
    return told, chosen


def test_a_parameter_may_be_frozen_before_lean_has_chosen_within_its_budget(launched: Answers) -> None:
    for told, chosen in launched["frozen_before_the_choice"]:
        assert chosen and "within 1.00 GiB" in told


def averaged(rank: int) -> None:
    """Stochastic weight averaging with its own scheduler."""
    pair = against_ddp()
    means = [swa_utils.AveragedModel(model, use_buffers=True) for model, _ in pair]
    schedules = [swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2) for _, optimizer in pair]
    for step in range(STEPS):
        for (model, optimizer), mean, schedule in zip(pair, means, schedules, strict=True):
            train(model, optimizer, rank, range(step, step + 1))
            mean.update_parameters(model)
            schedule.step()
    same_weights(means[0], means[1])
    pair[0][0].close()


def test_stochastic_weight_averaging_is_that_of_ddp(launched: Answers) -> None:
    assert "averaged" in launched  # its own assertions hold on every rank


# Closures, and optimizers that call them again and again.


def again_and_again(rank: int) -> int:
    """A closure is one step of training each time it is called, whoever calls it."""
    pair = against_ddp()
    calls = {id(model): 0 for model, _ in pair}

    def closure(model: Any, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        calls[id(model)] += 1
        loss: torch.Tensor = model(tokens(calls[id(model)], rank))
        loss.backward()
        return loss

    for _ in range(3):
        losses = [optimizer.step(lambda m=model, o=optimizer: closure(m, o)).item() for model, optimizer in pair]
        assert losses[0] == losses[1]
        alike(pair)
    closure(*pair[0])  # called by hand: a step, too
    done = int(pair[0][0]._tuner.steps_done)
    pair[0][0].close()
    return done


def test_every_call_of_a_closure_is_a_step(launched: Answers) -> None:
    assert launched["again_and_again"] == [4, 4]


# Within a budget.


def within_a_budget(rank: int, what: str) -> str:
    """The tightest budget: what was chosen changes no bit, whatever the program does meanwhile."""
    make = adapted if what == "adapters" else with_blocks
    clip_norm = 0.1 if what == "clipped" else None
    pair = against_ddp(make, what == "frozen", within=tightest(make, rank, clip_norm), clip_norm=clip_norm)
    for step in range(STEPS):
        if what == "frozen" and step in (1, 4):
            for model, _ in pair:
                model.module.inner[1].requires_grad_(step == 4)
        for model, optimizer in pair:
            if what == "accumulated":
                with model.no_sync():
                    model(many(100 + step, rank)).backward()
            model(many(step, rank)).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        alike(pair)
    chosen = str(pair[0][0].explain().splitlines()[-1])
    pair[0][0].close()
    return chosen


@pytest.mark.slow
def test_habits_hold_within_a_budget() -> None:
    warnings.filterwarnings("ignore", message="find_unused_parameters")
    scenarios = [("tied",), ("clipped",), ("accumulated",), ("frozen",), ("adapters",)]
    for one, other in each_on_ranks(within_a_budget, 2, scenarios, timeout_s=120.0):
        assert one == other and one.startswith("within ") and re.search(r"\d (recompute|join)", one), one


def test_adapters_train_as_under_ddp_whatever_happens_to_activations() -> None:
    each_on_ranks(adapters, 2, [({"activations": "recompute"},), ({"within": 1 << 30},)])


def adapters(rank: int, options: dict[str, Any]) -> None:
    pair = against_ddp(adapted, **options)
    for step in range(STEPS):
        for model, optimizer in pair:
            train(model, optimizer, rank, range(step, step + 1))
        alike(pair)
    pair[0][0].close()


class Poison(torch.autograd.Function):
    """Makes gradients nan where it is told to."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, poisoned: bool) -> torch.Tensor:
        ctx.poisoned = poisoned
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient * float("nan") if ctx.poisoned else gradient), None


def poisoned(rank: int) -> list[int]:
    """Also in the steps that are measured: no rank is updated then, and training goes on."""
    model = made()
    lean: Any = ab.DataParallel(model, profile_steps=0, memory=ab.Lean(adamw, within="1GiB"))
    changed = []
    for step in range(STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        loss: Any = Poison.apply(lean(tokens(step, rank)), step in (0, 1, 4) and rank == 1)  # type: ignore[no-untyped-call]
        loss.backward()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        changed += [step] if any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) else []
    assert lean.skipped == 3 and "predicted peak" in lean.explain()
    lean.close()
    return changed


def test_a_gradient_that_is_not_finite_is_skipped_within_a_budget(launched: Answers) -> None:
    assert launched["poisoned"] == [[2, 3, 5]] * 2


def refused_then_trained(rank: int) -> None:
    model = made()
    tightest(lambda: model, rank)
    lean = wrapped(model)
    train(lean, lean.optimizer, rank, range(1))
    lean.close()


def test_after_a_budget_that_nothing_fits_the_module_can_be_wrapped_again(launched: Answers) -> None:
    assert "refused_then_trained" in launched  # its own assertions hold on every rank


@pytest.mark.parametrize("text", ["16", "16G", "16GiB/s", "-1GiB", "nanGiB", "infGiB", "0GiB", "GiB", ""])
def test_a_budget_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Lean within is {text!r}: expected a size in GiB, MiB, GB or MB")):
        ab.Lean(adamw, within=text)


# Half precision, and freezing.


def in_half(rank: int, pure: bool, **options: Any) -> None:
    pair = against_ddp(lambda: made().bfloat16() if pure else made(), **options)
    for step in range(STEPS):
        for model, optimizer in pair:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=not pure):
                loss = model(tokens(step, rank))
            loss.backward()
            optimizer.step()
        alike(pair)
    pair[0][0].close()


def in_half_within(rank: int, pure: bool) -> None:
    in_half(rank, pure, within="1GiB")


@pytest.mark.parametrize("run", [in_half, in_half_within])
def test_bfloat16_trains_as_under_ddp(run: Callable[..., None]) -> None:
    each_on_ranks(run, 2, [(True,), (False,)])


def frozen_before_wrapping(rank: int) -> str:
    model = made()
    model.inner[0].requires_grad_(rank != 1)
    with pytest.raises(ab.DisagreementError) as caught:
        wrapped(model)
    return str(caught.value)


def test_what_is_frozen_on_one_rank_before_wrapping_is_an_error_on_all(launched: Answers) -> None:
    one, other = launched["frozen_before_wrapping"]
    assert one == other and "inner.0.weight" in one and "grad=False" in one


# Compiled blocks and compiled models, whatever happens to activations.

HOW = [
    "block.compile()",
    "torch.compile(block)",
    "model.compile()",
    "block.compile(), model.compile()",
    "torch.compile(lean)",
    "block.compile(), torch.compile(lean)",
]
RUNS: list[int] = []  # of compiled graphs, on this rank


def counting(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that notes every run of its graphs."""
    made: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def run(*args: Any) -> Any:
        RUNS.append(1)
        return made(*args)

    return run


class OfOnesOwn(nn.Module):
    """A block with a forward of its own: torch does not compile that of a Sequential in place."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        computed: torch.Tensor = self.layers(given)
        return computed


def compiled_inside(how: str) -> nn.Module:
    """The model, compiled before it is wrapped."""
    model: Any = with_blocks()
    blocks: Any = nn.ModuleList(OfOnesOwn(layers) for layers in model.inner)
    model.inner = blocks
    for index, block in enumerate(blocks):
        if "block.compile()" in how:
            block.compile(backend=counting)
        elif how == "torch.compile(block)":
            blocks[index] = torch.compile(block, backend=counting)
    if "model.compile()" in how:
        model.compile(backend=counting)
    assert isinstance(model, nn.Module)
    return model


def compiled(rank: int, how: str, memory: str) -> tuple[str, int]:
    """The actions that were chosen, and how often graphs ran in the last step."""
    torch._dynamo.reset()  # as in a process of its own
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's own, in dynamo
    options: Any = {"within": 1 << 30} if memory == "auto" else {"activations": memory}
    if memory == "within":
        options = {"within": tightest(with_blocks, rank)}
    pair = against_ddp(lambda: compiled_inside(how), **options)
    lean = pair[0][0]
    called = [torch.compile(lean, backend=counting) if "torch.compile(lean)" in how else lean, pair[1][0]]
    for step in range(4):
        for model, (_, optimizer) in zip(reversed(called), reversed(pair), strict=True):
            RUNS.clear()
            model(many(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        alike(pair)
    actions, runs = str(lean._activations._patched.actions), len(RUNS)
    if memory == "recompute":
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda given: saved.extend(given.shape[-1:]), lambda _: torch.empty(0)
        ):
            called[0](many(9, rank))
        assert 4 * WIDTH not in saved, "what is inside a block is not saved"
    lean.close()
    assert lean.module(many(9, rank)).requires_grad  # runs as it did before it was wrapped
    return actions, runs


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_what_is_compiled_trains_as_under_ddp_whatever_happens_to_activations(how: str) -> None:
    scenarios = [(how, memory) for memory in ("recompute", "auto", "within")]
    for (_, memory), answers in zip(scenarios, each_on_ranks(compiled, 2, scenarios, timeout_s=240.0), strict=True):
        (one, runs), (other, _) = answers
        assert one == other and ("recompute" in one or memory == "auto"), one
        assert runs > 0 or "recompute" in one, "a model whose blocks are all kept stays compiled"
        if "block" in how and "," not in how:
            assert runs == 3 + one.count("recompute"), "every block stays compiled, also where it is computed again"


@pytest.fixture(scope="module")
def launched() -> Answers:
    """What each scenario of this file returns on each rank, in one launch."""
    return cases_on_ranks({one.__name__: (one,) for one in SCENARIOS}, 2, timeout_s=240.0)


SCENARIOS: tuple[Callable[[int], object], ...] = (
    with_the_attribute,
    with_an_optimizer_of_ones_own,
    frozen_before_the_choice,
    averaged,
    again_and_again,
    poisoned,
    refused_then_trained,
    frozen_before_wrapping,
)
