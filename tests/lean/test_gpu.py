"""On a GPU: Lean trains the same weights as without it, also over host memory, and nothing waits for the host.

One rank here, where plain DataParallel sends nothing; on four ranks everything is compared (``test_gpu_ranks.py``).
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from gpu import ON_GPU, no_waiting
from lean.test_bucket_update import poisoned, skipping
from lean.test_parallel import OPTIMIZERS, compressing, made, planned, side_by_side, tokens

pytestmark = ON_GPU


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """An NCCL world of one rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "fused"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_dense_buckets_train_the_same(alone: None, optimizer: str, accumulate: int) -> None:
    side_by_side(0, optimizer, "dense", accumulate, "cuda")


@pytest.mark.parametrize("residuals", ["in place", "int8"])
@pytest.mark.parametrize("kind", ["oktopk:0.1", "int4"])
def test_the_host_waits_for_nothing(alone: None, residuals: Any, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    given = torch.randn(64, 512, device="cuda")
    sparse = ab.OkTopk(density=0.1, warmup_steps=0, region_period=1000)
    lean: Any = ab.DataParallel(
        model,
        plan=planned(model, kind),
        compress=kind if kind == "int4" else sparse,
        profile_steps=0,
        memory=ab.Lean(OPTIMIZERS["fused"], residuals=residuals),  # others must be told whether all was finite
    )
    for _ in range(3):
        lean(given).square().mean().backward()
    unasked = mock.patch.object(torch.cuda.Event, "synchronize", side_effect=AssertionError("the host waits"))
    with no_waiting(), unasked:
        for _ in range(3):
            lean(given).square().mean().backward()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    lean.close()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("training", [skipping, poisoned])
def test_steps_skipped_on_the_device_or_by_the_host(alone: None, training: Any, fused: bool) -> None:
    training(0, "cuda", fused)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "fused"])
def test_clipping_is_that_of_torch(alone: None, optimizer: str) -> None:
    ours, theirs = made("cuda"), made("cuda")
    memory = ab.Lean(OPTIMIZERS[optimizer], clip_norm=0.05)
    lean: Any = ab.DataParallel(ours, plan=planned(ours, "dense"), profile_steps=0, memory=memory)
    stepped = OPTIMIZERS[optimizer]([p for p in theirs.parameters() if p.requires_grad])
    for step in range(8):
        lean(tokens(step, 0).cuda()).backward()
        theirs(tokens(step, 0).cuda()).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        stepped.step()
        stepped.zero_grad()
        torch.testing.assert_close(norm, lean.grad_norm)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    lean.close()


@pytest.mark.parametrize("optimizer", ["momentum", "fused"])
@pytest.mark.parametrize("residuals", ["in place", "int8"])
def test_updates_that_were_held_are_the_same(alone: None, optimizer: str, residuals: Any) -> None:
    """Sparse averages wait as their values, behind slots that are used again; one step is left out as a whole."""
    weights = []
    for clip_norm in (None, 1e9):
        model = made("cuda")
        memory = ab.Lean(OPTIMIZERS[optimizer], residuals=residuals, clip_norm=clip_norm)
        options = ab.OkTopk(density=0.1, warmup_steps=0, deterministic=True)
        lean: Any = ab.DataParallel(
            model, plan=planned(model, "oktopk:0.1"), compress=options, profile_steps=0, memory=memory
        )
        for step in range(12):
            lean(tokens(step, 0).cuda()).backward()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        before = lean.skipped
        model.embed.weight.register_hook(lambda gradient: gradient * float("nan"))
        lean(tokens(12, 0).cuda()).backward()
        same = [torch.equal(a, b) for a, b in zip(weights[-1], model.parameters(), strict=True)]
        assert all(same) == (clip_norm is not None) and lean.skipped > before
        lean.close()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_the_host_waits_for_nothing_where_dense_updates_are_held(alone: None) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    given = torch.randn(64, 512, device="cuda")
    memory = ab.Lean(OPTIMIZERS["fused"], clip_norm=0.1)
    lean: Any = ab.DataParallel(model, plan=planned(model, "dense"), profile_steps=0, memory=memory)
    for _ in range(3):
        lean(given).square().mean().backward()
    with no_waiting():
        for _ in range(3):
            lean(given).square().mean().backward()
    lean.close()


def sparse_lean(model: nn.Module, residuals: Any) -> Any:
    memory = ab.Lean(OPTIMIZERS["momentum"], residuals=residuals)
    plan, options = planned(model, "oktopk:0.1"), compressing("oktopk:0.1")
    return ab.DataParallel(model, plan=plan, compress=options, profile_steps=0, memory=memory)


@pytest.mark.parametrize("residuals", ["bf16", "int8"])
def test_rounded_residuals_train_nearly_the_same_and_resume(alone: None, residuals: str) -> None:
    start = torch.cat([p.detach().flatten() for p in made("cuda").parameters()])
    ends: list[torch.Tensor] = []
    for how in ("in place", residuals, residuals):  # the last one is saved and loaded after half of the steps
        model = made("cuda")
        lean = sparse_lean(model, how)
        for step in range(12):
            if step == 6 and len(ends) == 2:
                kept = (lean.optimizer.state_dict(), lean.comm_state_dict())
                lean.close()
                lean = sparse_lean(model, how)
                lean.optimizer.load_state_dict(kept[0])
                lean.load_comm_state_dict(kept[1])
            lean(tokens(step, 0).cuda()).backward()
        packed = [state.packed is not None for state in lean._collectives.residuals.buckets()]
        assert packed and all(packed) == (how != "in place")
        lean.close()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    exact, rounded, resumed = ends
    assert 0.0 < float((exact - rounded).norm()) < 0.1 * float((exact - start).norm())
    assert torch.equal(rounded, resumed)


def test_slots_are_there_only_in_backward(alone: None) -> None:
    """Without gradients and slots between steps, what is left is weights, state and residuals."""
    gc.collect()
    before_nbytes = torch.cuda.memory_allocated()  # by other tests of this process
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
    lean: Any = ab.DataParallel(model, profile_steps=0, memory=ab.Lean(OPTIMIZERS["momentum"]))
    given = torch.randn(4, 1024, device="cuda")
    for _ in range(3):
        lean(given).square().mean().backward()
    torch.cuda.synchronize()
    weights_nbytes = sum(p.nbytes for p in model.parameters())
    between_nbytes = torch.cuda.memory_allocated() - before_nbytes
    lean.close()
    assert between_nbytes < 2 * weights_nbytes + (66 << 20), "weights, momentum, and what cuBLAS keeps"
