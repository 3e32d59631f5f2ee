"""What a trainer is used to from DDP, under Lean: the same results, or one sentence."""

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils

import anabranch as ab
from lean.launches import Answers, each_on_ranks
from lean.test_parallel import OPTIMIZERS, Tied, made, tokens
from ranks import cases_on_ranks, on_ranks

STEPS = 6


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def wrapped(model: nn.Module, optimizer: Any = adamw, **options: Any) -> Any:
    return ab.DataParallel(model, profile_steps=0, memory=ab.Lean(optimizer, **options))


def same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range = range(STEPS)) -> None:
    """A loop as it is written for DDP."""
    for step in steps:
        optimizer.zero_grad()
        model(tokens(step, rank)).backward()
        optimizer.step()


def with_step_hooks(rank: int) -> list[str]:
    model, called = made(), []
    optimizer = adamw(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    ours = wrapped(model, optimizer)
    train(ours, optimizer, rank, range(2))
    ours.close()
    return called


def test_hooks_of_an_optimizer_that_is_taken_over_run_once_per_step(launched: Answers) -> None:
    assert launched["with_step_hooks"] == [["before", "after"] * 2] * 2


# step(closure).


def with_closures(rank: int) -> None:
    ours, theirs = made(), made()
    lean, ddp = wrapped(ours), DistributedDataParallel(theirs)
    optimizers = [lean.optimizer, adamw([p for p in theirs.parameters() if p.requires_grad])]
    for step in range(STEPS):
        losses = []
        for model, optimizer in zip((lean, ddp), optimizers, strict=True):

            def closure(model: Any = model, optimizer: Any = optimizer, step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(tokens(step, rank))
                loss.backward()
                return loss

            with torch.no_grad():  # a step switches gradients on for its closure
                losses.append(optimizer.step(closure).item())
        assert losses[0] == losses[1]
        same_weights(ours, theirs)
    assert lean._tuner.steps_done == STEPS
    lean.close()


def test_step_runs_a_closure(launched: Answers) -> None:
    assert "with_closures" in launched  # its own assertions hold on every rank


# An optimizer that was made for DDP.


def grouped(model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    """Over all parameters, frozen ones too, in groups by their places."""
    all_of_them = list(model.parameters())
    groups = [{"params": all_of_them[:2], "lr": 0.03}, {"params": all_of_them[2:], "weight_decay": 0.2}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=fused)


def taken_over(rank: int, fused: bool, clip_norm: float | None) -> None:
    """With a scheduler that was made before; after close() it is an ordinary optimizer again."""
    ours, theirs = made(), made()
    optimizers = [grouped(model, fused) for model in (ours, theirs)]
    schedules = [lr_scheduler.OneCycleLR(each, max_lr=[0.05, 0.02], total_steps=3 * STEPS) for each in optimizers]
    before = dict(vars(optimizers[0]))
    ddp = DistributedDataParallel(theirs)
    for begin in (0, STEPS):  # it can be wrapped again
        lean = wrapped(ours, optimizers[0], clip_norm=clip_norm)
        assert lean.optimizer is optimizers[0]
        for step in range(begin, begin + STEPS):
            for model, optimizer, schedule in zip((lean, ddp), optimizers, schedules, strict=True):
                optimizer.zero_grad()
                model(tokens(step, rank)).backward()
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                optimizer.step()
                schedule.step()
            same_weights(ours, theirs)
        lean.close()
    assert vars(optimizers[0]).keys() == before.keys()
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        train(model, optimizer, 0, range(20, 22))
    same_weights(ours, theirs)
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert states[0]["param_groups"] == states[1]["param_groups"]


def test_an_optimizer_with_a_scheduler_is_taken_over() -> None:
    each_on_ranks(taken_over, 2, [(False, None), (True, 0.05)])


def not_taken_over(rank: int) -> list[str]:
    model, answers = made(), []
    parameters = [p for p in model.parameters() if p.requires_grad]
    requests: list[Callable[[], Any]] = [
        lambda: wrapped(model, torch.optim.SGD(parameters[1:], lr=0.1)),
        lambda: wrapped(model, torch.optim.SGD([*parameters, nn.Parameter(torch.ones(1))], lr=0.1)),
        lambda: wrapped(model, torch.optim.LBFGS(parameters)),
        lambda: wrapped(model, None),
    ]
    for request in requests:
        with pytest.raises(ValueError) as caught:
            request()
        answers.append(str(caught.value))
    return answers


def test_an_optimizer_that_cannot_be_taken_over_is_refused(launched: Answers) -> None:
    for missing, others, repeated, none in launched["not_taken_over"]:
        assert "an SGD without embed.weight, and 1 of 7 trained parameters are missing" in missing
        assert "an SGD with 1 parameters that the model does not train" in others
        assert "LBFGS calls the model again and again" in repeated
        assert "Lean has no optimizer: expected Lean(optimizer=...)" in none


# A GradScaler.


def scaled_unannounced(rank: int, make: type[torch.amp.GradScaler], in_a_list: bool) -> list[str]:
    """Noticed in the first step, before anything is updated; then it is followed, and training goes on."""
    model = made()
    lean, scaler, answers = wrapped(model), make("cpu"), []

    def refused() -> None:
        before = copy.deepcopy(model.state_dict())
        loss = lean(tokens(0, rank))
        scaled: Any = scaler.scale([loss])[0] if in_a_list else scaler.scale(loss)
        with pytest.raises(RuntimeError) as caught:
            scaled.backward()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        answers.append(str(caught.value))

    refused()
    lean.follow(torch.amp.GradScaler("cpu"))
    refused()
    lean.follow(scaler)
    model.zero_grad()
    scaler.scale(lean(tokens(0, rank))).backward()
    lean.close()
    return answers


def test_a_scaler_that_is_not_followed_is_an_error_in_the_first_step() -> None:
    scenarios = [(make, in_a_list) for make in (torch.amp.GradScaler, ShardedGradScaler) for in_a_list in (False, True)]
    for answers in each_on_ranks(scaled_unannounced, 2, scenarios):
        for nobody, another in answers:
            assert "scaled by a GradScaler whose scale is 65536.0" in nobody and "Call follow(scaler)" in nobody
            assert "follows none" in nobody and "follows another one" in another


class Hidden:
    """An output whose tensor nobody finds."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = made()

    def forward(self, given: torch.Tensor) -> Hidden:
        return Hidden(self.inner(given))


def no_false_alarm(rank: int) -> None:
    """Scalers of others: of another model at the same time, one that is off, a scale that the program sees to."""
    model, other = made(), nn.Linear(3, 3)
    lean, scaler = wrapped(model), torch.amp.GradScaler("cpu")
    loss = lean(tokens(0, rank))
    scaled = scaler.scale(other(torch.ones(1, 3)).sum())
    assert isinstance(scaled, torch.Tensor)
    scaled.backward()
    loss.backward()
    off = torch.amp.GradScaler("cpu", enabled=False)
    unscaled = off.scale(lean(tokens(1, rank)))
    assert isinstance(unscaled, torch.Tensor)
    unscaled.backward()
    assert lean._tuner.steps_done == 2
    lean.close()
    hiding = wrapped(Hiding())
    with pytest.raises(RuntimeError, match="follows none"):
        scaler.scale(hiding(tokens(0, rank)).loss).backward()
    hiding.module.zero_grad()
    hiding(tokens(0, rank)).loss.backward()
    assert hiding._tuner.steps_done == 1
    hiding.close()


def test_other_scalers_are_no_alarm(launched: Answers) -> None:
    assert "no_false_alarm" in launched  # its own assertions hold on every rank


# Checkpoints.


def checkpoints(rank: int, folder: str) -> None:
    """DCP: the keys of DDP; what one has saved the other continues, bit by bit."""
    ours, theirs = made(), made()
    lean, ddp = wrapped(ours), DistributedDataParallel(theirs)
    stepped = adamw([p for p in theirs.parameters() if p.requires_grad])
    pairs = [(lean, lean.optimizer), (ddp, stepped)]
    for model, optimizer in pairs:
        train(model, optimizer, rank)
    assert list(lean.state_dict()) == list(ddp.state_dict())
    saved = [checkpoint.get_state_dict(model, optimizer) for model, optimizer in pairs]
    assert list(saved[0][0]) == list(saved[1][0]) and saved[0][0].keys() == ours.state_dict().keys()
    assert saved[0][1]["state"].keys() == saved[1][1]["state"].keys()  # type: ignore[union-attr]
    assert saved[0][1]["param_groups"] == saved[1][1]["param_groups"]
    for index, (of_model, of_optimizer) in enumerate(saved):
        save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=f"{folder}/{index}")

    new_ours, new_theirs = Tied(), Tied()
    new_lean, new_ddp = wrapped(new_ours), DistributedDataParallel(new_theirs)
    new_stepped = adamw([p for p in new_theirs.parameters() if p.requires_grad])
    for model, optimizer, index in ((new_lean, new_lean.optimizer, 1), (new_ddp, new_stepped, 0)):
        of_model, of_optimizer = checkpoint.get_state_dict(model, optimizer)
        load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=f"{folder}/{index}")
        checkpoint.set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    every = [(lean, lean.optimizer), (ddp, stepped), (new_lean, new_lean.optimizer), (new_ddp, new_stepped)]
    for model, optimizer in every:
        train(model, optimizer, rank, range(STEPS, 2 * STEPS))
        same_weights(model.module, ours)
    lean.close()
    new_lean.close()


def test_checkpoints_have_the_keys_of_ddp_and_continue_each_other(tmp_path: Path) -> None:
    on_ranks(checkpoints, 2, str(tmp_path))


# Schedules, averages, adapters, compiled blocks.

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / STEPS),  # the first rate is 0
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS),  # betas, too
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
}


def scheduled(rank: int, name: str, optimizer: str) -> None:
    ours, theirs = made(), made()
    lean, ddp = wrapped(ours, OPTIMIZERS[optimizer]), DistributedDataParallel(theirs)
    optimizers = [lean.optimizer, OPTIMIZERS[optimizer]([p for p in theirs.parameters() if p.requires_grad])]
    schedules = [SCHEDULES[name](each) for each in optimizers]
    for step in range(STEPS):
        for model, each, schedule in zip((lean, ddp), optimizers, schedules, strict=True):
            train(model, each, rank, range(step, step + 1))
            schedule.step(*([1.0] if name == "plateau" else []))
        same_weights(ours, theirs)
    rates = [[group["lr"] for group in each.param_groups] for each in optimizers]
    assert rates[0] == rates[1]
    lean.close()


def test_schedules_change_rates_as_under_ddp() -> None:
    scenarios = [("cosine", "two groups"), ("warm-up", "adamw"), ("one cycle", "momentum"), ("plateau", "two groups")]
    each_on_ranks(scheduled, 2, scenarios)


def averaged(rank: int, by: str) -> None:
    """An exponential average of the weights, of the wrapper or of the model inside; it computes, and can be saved."""
    ours, theirs = made(), made()
    optimizer: Any = adamw([p for p in ours.parameters() if p.requires_grad]) if by == "optimizer" else adamw
    lean, ddp = wrapped(ours, optimizer), DistributedDataParallel(theirs)
    optimizers = [lean.optimizer, adamw([p for p in theirs.parameters() if p.requires_grad])]
    pairs: list[Any] = [(ours, theirs)] if by == "module" else [(lean, ddp)]
    means = [swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)) for model in pairs[0]]
    for step in range(STEPS):
        for model, each, mean, source in zip((lean, ddp), optimizers, means, pairs[0], strict=True):
            train(model, each, rank, range(step, step + 1))
            mean.update_parameters(source)
    same_weights(means[0], means[1])
    assert list(means[0].state_dict()) == list(means[1].state_dict())
    with torch.no_grad():
        assert torch.equal(means[0](tokens(9, rank)), means[1](tokens(9, rank)))
    if by == "optimizer":
        copied: Any = means[0].module
        assert copied.memory.optimizer is None  # not copied with all its state
    assert not torch.equal(next(means[0].parameters()), next(ours.parameters()))
    lean.close()


def test_averages_of_weights_are_those_of_ddp() -> None:
    each_on_ranks(averaged, 2, [("wrapper",), ("module",), ("optimizer",)])


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, which begins at 0."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: torch.Tensor = self.base(x)
        return base + x @ self.down.t() @ self.up.t()


def adapted() -> nn.Module:
    torch.manual_seed(5)
    model = made().requires_grad_(False)
    model.inner = nn.ModuleList(Adapted(layer) for layer in model.inner)  # type: ignore[arg-type]
    return model


def with_adapters(rank: int, taken: bool, compress: bool) -> None:
    """Only adapters are trained, and have a state; the base keeps its bits."""
    ours, theirs = adapted(), adapted()
    frozen = {name: p.detach().clone() for name, p in ours.named_parameters() if not p.requires_grad}
    options: Any = {"compress": ab.OkTopk(density=0.2, warmup_steps=0, deterministic=True)} if compress else {}
    plan = ab.Plan(tuple(
        ab.Bucket((name,), collective="oktopk:0.2" if compress else "dense")
        for name, p in reversed(list(ours.named_parameters())) if p.requires_grad
    ))  # fmt: skip
    memory = ab.Lean(adamw(ours.parameters()) if taken else adamw, clip_norm=0.5)
    lean: Any = ab.DataParallel(ours, profile_steps=0, plan=plan, memory=memory, **options)
    planned: Any = {"profile_steps": 0, "plan": plan} if compress else {}
    ddp: Any = (ab.DataParallel if compress else DistributedDataParallel)(theirs, **options, **planned)
    stepped = adamw(theirs.parameters())
    for step in range(STEPS):
        for model, optimizer in ((lean, lean.optimizer), (ddp, stepped)):
            model(tokens(step, rank)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        same_weights(ours, theirs)
    assert all(torch.equal(ours.get_parameter(name), value) for name, value in frozen.items())
    assert len(lean.optimizer.state) == len(stepped.state) == 6
    lean.close()


def test_adapters_on_a_frozen_base_train_as_under_ddp() -> None:
    each_on_ranks(with_adapters, 2, [(False, False), (True, False), (True, True)])


def with_compiled_blocks(rank: int, in_place: bool) -> None:
    """Blocks that are compiled one by one: each is a graph of its own, so gradients come as backward goes."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's own, in dynamo
    ours, theirs = made(), made()
    for each in (ours, theirs):
        blocks: Any = each.inner
        for index, block in enumerate(blocks):
            if in_place:
                block.compile(backend="aot_eager")
            else:
                blocks[index] = torch.compile(block, backend="aot_eager")
    lean, ddp = wrapped(ours, clip_norm=0.1), DistributedDataParallel(theirs)
    pairs: list[Any] = [(lean, lean.optimizer), (ddp, adamw([p for p in theirs.parameters() if p.requires_grad]))]
    for step in range(3):
        for model, optimizer in pairs:
            model(tokens(step, rank)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(norm, lean.grad_norm) and math.isfinite(norm)
        same_weights(ours, theirs)
    assert list(lean.state_dict()) == list(ddp.state_dict())
    ours_saved, theirs_saved = (checkpoint.get_model_state_dict(model) for model in (lean, ddp))
    assert list(ours_saved) == list(theirs_saved)
    lean.close()


def test_compiled_blocks_train_as_under_ddp() -> None:
    each_on_ranks(with_compiled_blocks, 2, [(True,), (False,)], timeout_s=200.0)


@pytest.fixture(scope="module")
def launched() -> Answers:
    """What each scenario of this file returns on each rank, in one launch."""
    return cases_on_ranks({one.__name__: (one,) for one in SCENARIOS}, 2, timeout_s=240.0)


SCENARIOS: tuple[Callable[[int], object], ...] = (
    with_step_hooks,
    with_closures,
    not_taken_over,
    no_false_alarm,
)
