"""Compressed exchanges as comm hooks of stock DDP: nothing is lost, ranks have the same bits, states are restored."""

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from anabranch import Auto, CommHookState, DisagreementError, OkTopk, Quantised, oktopk_hook, quantised_hook
from parallel.given_gradients import GivenGradients, gradients
from parallel.twins import batch, mlp
from ranks import cases_on_ranks, on_ranks

SMALL_BUCKETS = 1e-3  # MiB: a matrix is larger, and DDP rebuilds in another order
STEPS = 9


def settings(what: str) -> OkTopk | Quantised:
    kinds: dict[str, OkTopk | Quantised] = {
        "oktopk": OkTopk(0.1, warmup_steps=0, deterministic=True, region_period=4),
        "oktopk after a warm-up": OkTopk(0.1, warmup_steps=3, region_period=4),
        "int4": Quantised("int4"),
        "int8": Quantised("int8"),
        "bf16": Quantised("bf16"),
    }
    return kinds[what]


def wrapped(what: str, cap_mb: float | None = None) -> tuple[GivenGradients, Any, CommHookState]:
    model = GivenGradients()
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
    state = CommHookState(ddp, settings(what))
    ddp.register_comm_hook(state, oktopk_hook if what.startswith("oktopk") else quantised_hook)
    return model, ddp, state


def step(model: GivenGradients, ddp: Any, number: int, rank: int, exact_vector: bool) -> torch.Tensor:
    """The average gradients of both matrices; Ok-Topk sends that of the vector whole."""
    model.zero_grad()
    ddp(*gradients(number, rank)).backward()
    assert model.first.grad is not None and model.second.grad is not None and model.bias.grad is not None
    if exact_vector:
        torch.testing.assert_close(model.bias.grad, torch.ones_like(model.bias))
    return torch.stack([model.first.grad, model.second.grad]).clone()


def residuals(state: CommHookState) -> torch.Tensor:
    kept = state.state_dict().get("residuals", {})
    zeros = torch.zeros(GivenGradients().first.numel())
    return torch.stack([kept.get(name, zeros) for name in ("first", "second")])


def run(rank: int, what: str, cap_mb: float | None) -> dict[str, torch.Tensor]:
    model, ddp, state = wrapped(what, cap_mb)
    averages = torch.stack([step(model, ddp, number, rank, what.startswith("oktopk")) for number in range(STEPS)])
    computed = torch.stack([torch.stack(gradients(number, rank)) for number in range(STEPS)])
    kept = residuals(state)
    state.close()
    return {"averages": averages, "computed": computed, "kept": kept.view_as(computed[0])}


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_lost_and_all_ranks_have_the_same_bits(ranks: int) -> None:
    kinds = ["oktopk", "oktopk after a warm-up", "int4", "int8", "bf16"]
    cases = {f"{what}, {cap_mb}": (run, what, cap_mb) for what in kinds for cap_mb in (None, SMALL_BUCKETS)}
    for name, answers in cases_on_ranks(cases, ranks).items():
        check_conserved(name.partition(",")[0], answers)


def check_conserved(what: str, answers: list[dict[str, torch.Tensor]]) -> None:
    """Under a hook of this kind."""
    for answer in answers[1:]:
        assert torch.equal(answer["averages"], answers[0]["averages"])
    averages = answers[0]["averages"].double()
    exact = torch.stack([answer["computed"].double() for answer in answers]).mean(0)
    kept = torch.stack([answer["kept"].double() for answer in answers]).mean(0)
    if what in ("int8", "bf16"):
        assert not kept.any()
        error = (averages - exact).norm() / exact.norm()
        assert 0 < error < 0.02
        return
    torch.testing.assert_close(averages.sum(0) + kept, exact.sum(0), rtol=1e-4, atol=1e-5)
    assert kept.abs().max() > 0
    if what == "oktopk after a warm-up":
        torch.testing.assert_close(averages[:3], exact[:3], rtol=1e-5, atol=1e-6)
    if what.startswith("oktopk"):
        assert (averages[-1] == 0).double().mean() > 0.7, "only the largest values are sent"


def resumed(rank: int, what: str) -> tuple[bool, float, float]:
    """What was kept is sent after a restart, with gradients of zero: what is lost of it, and what is still kept."""
    model, ddp, state = wrapped(what)
    for number in range(3):
        step(model, ddp, number, rank, what == "oktopk")
    saved = state.state_dict()
    state.close()
    model, ddp, state = wrapped(what)
    state.load_state_dict(saved)
    restored = bool(torch.equal(residuals(state), residuals_in(saved)))
    total = residuals(state).double()
    dist.all_reduce(total)
    arrived = torch.zeros_like(total)
    for _ in range(60):
        model.zero_grad()
        nothing = torch.zeros_like(model.first)
        ddp(nothing, nothing).backward()
        assert model.first.grad is not None and model.second.grad is not None
        arrived += torch.stack([model.first.grad.flatten(), model.second.grad.flatten()]).double()
    with pytest.raises(RuntimeError, match="load before the first"):
        state.load_state_dict(saved)
    left = residuals(state).double()
    dist.all_reduce(left)
    arrived *= dist.get_world_size()
    return restored, float((arrived + left - total).norm() / total.norm()), float(left.norm() / total.norm())


class Scaler:
    """A loss scaler whose scale doubles every three steps."""

    scale = 4.0

    def get_scale(self) -> float:
        return self.scale


def scaled(rank: int, static_graph: bool) -> dict[str, torch.Tensor]:
    model = GivenGradients()
    ddp = DistributedDataParallel(model, static_graph=static_graph)
    state, scaler = CommHookState(ddp, settings("oktopk")), Scaler()
    ddp.register_comm_hook(state, oktopk_hook)
    state.follow(scaler)
    applied = torch.zeros(2, model.first.numel())
    for number in range(STEPS):
        scaler.scale = 4.0 * 2 ** (number // 3)
        model.zero_grad()
        (scaler.scale * ddp(*gradients(number, rank))).backward()
        assert model.first.grad is not None and model.second.grad is not None
        applied += torch.stack([model.first.grad.flatten(), model.second.grad.flatten()]) / scaler.scale
    computed = torch.stack([torch.stack(gradients(number, rank)) for number in range(STEPS)]).sum(0).view_as(applied)
    return {"applied": applied, "computed": computed, "kept": residuals(state) / scaler.scale}


def test_residuals_follow_a_scaler(found: dict[str, list[Any]]) -> None:
    for answers in (found["scaled"], found["scaled, static"]):
        computed, kept = (torch.stack([answer[what] for answer in answers]).mean(0) for what in ("computed", "kept"))
        torch.testing.assert_close(answers[0]["applied"] + kept, computed, rtol=1e-4, atol=1e-5)
        assert kept.abs().max() > 0


def residuals_in(saved: dict[str, Any]) -> torch.Tensor:
    return torch.stack([saved["residuals"][name] for name in ("first", "second")])


def test_residuals_survive_a_restart(found: dict[str, list[Any]]) -> None:
    for restored, lost, left in found["resumed, oktopk"] + found["resumed, int4"]:
        assert restored and lost < 1e-5 and left < 0.1


def trained(rank: int, accumulate: bool) -> list[float]:
    """Losses of a small network under int8, with BatchNorm's buffers, beside those of stock DDP."""
    losses = []
    for hooked in (False, True):
        torch.manual_seed(1)
        ddp = DistributedDataParallel(nn.Sequential(mlp(), nn.BatchNorm1d(6)))
        state = CommHookState(ddp, "int8")
        if hooked:
            ddp.register_comm_hook(state, quantised_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for number in range(20):
            optimizer.zero_grad()
            if accumulate:
                with ddp.no_sync():
                    ddp(batch(3 * number)).square().mean().backward()
            loss = ddp(batch(number)).sub(1).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
        state.close()
    return losses


def test_training_by_int8_follows_ddp(found: dict[str, list[Any]]) -> None:
    for plain, hooked in found["trained"] + found["trained, no_sync"]:
        assert hooked == pytest.approx(plain, rel=0.02) and hooked != plain


def mistakes(rank: int) -> list[str]:
    model, found = mlp(), []
    for compress in ("auto", Auto(), OkTopk("auto"), ["int8", "int4"]):
        with pytest.raises(ValueError) as caught:
            CommHookState(model, compress)  # type: ignore[arg-type]
        found.append(str(caught.value))
    unused = DistributedDataParallel(mlp(), find_unused_parameters=True)
    with pytest.raises(ValueError, match="set find_unused_parameters=False"):
        CommHookState(unused, OkTopk(0.1))
    CommHookState(unused, "int8")
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(CommHookState(ddp, "int8"), oktopk_hook)
    with pytest.raises(ValueError) as caught:
        ddp(batch(0)).sum().backward()
    return [*found, str(caught.value)]


def test_mistakes_are_named(found: dict[str, list[Any]]) -> None:
    for *kinds, wrong_hook in found["mistakes"]:
        assert all("a comm hook sends every bucket by one kind" in said for said in kinds)
        assert wrong_hook.startswith(
            "the state of this comm hook is a CommHookState of 'int8': expected CommHookState("
        )


def other_settings(rank: int) -> str:
    ddp = DistributedDataParallel(mlp())
    ddp.register_comm_hook(CommHookState(ddp, "int8" if rank else "bf16"), quantised_hook)
    with pytest.raises(DisagreementError) as caught:
        ddp(batch(0)).sum().backward()
    return str(caught.value)


def test_ranks_compare_their_settings(found: dict[str, list[Any]]) -> None:
    for said in found["other settings"]:
        assert "the state of the comm hook is not the same on all ranks" in said and "compress int8" in said


def registered_by_lightning(rank: int) -> tuple[str, int]:
    """By the function that DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...) calls, on GPUs only."""
    warnings.simplefilter("ignore")  # Lightning's own, about the future of torch
    lightning: Any = import_module("lightning.pytorch.overrides.distributed")
    model = mlp()
    state = CommHookState(model, OkTopk(0.1, warmup_steps=0))  # before it is wrapped
    ddp = DistributedDataParallel(model)
    lightning._register_ddp_comm_hook(model=ddp, ddp_comm_state=state, ddp_comm_hook=oktopk_hook)
    for number in range(3):
        ddp(batch(number)).sum().backward()
    saved = state.state_dict()
    state.close()
    return sorted(saved["residuals"])[0], saved["steps_trained"]


@pytest.mark.slow
def test_lightning_registers_hook_and_state() -> None:
    pytest.importorskip("lightning")
    assert on_ranks(registered_by_lightning, 2, timeout_s=120.0) == [("0.weight", 3)] * 2


class Recomputed(nn.Module):
    """Layers that are computed again in backward, each in a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def steps_counted(rank: int) -> int:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        Recomputed(), bucket_cap_mb=1e-5, static_graph=True
    )  # a bucket for each layer or less
    state = CommHookState(ddp, Quantised("int4"))
    ddp.register_comm_hook(state, quantised_hook)
    for _ in range(STEPS):
        ddp(torch.randn(2, 8, requires_grad=True)).square().mean().backward()
    counted = state.state_dict()["steps_trained"]
    state.close()
    return int(counted)


def test_a_step_is_one_backward_also_with_reentrant_checkpoints(found: dict[str, list[Any]]) -> None:
    assert found["steps counted"] == [STEPS, STEPS]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What two ranks saw in each case, all in one launch."""
    return cases_on_ranks(
        {
            "scaled": (scaled, False),
            "scaled, static": (scaled, True),
            "resumed, oktopk": (resumed, "oktopk"),
            "resumed, int4": (resumed, "int4"),
            "trained": (trained, False),
            "trained, no_sync": (trained, True),
            "steps counted": (steps_counted,),
            "other settings": (other_settings,),
            "mistakes": (mistakes,),
        },
        2,
    )
