"""Accelerate with anabranch, on real ranks and with the real package: trains, resumes and unwraps as with DDP."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from frameworks.tiny import as_under_torchrun, files_of_ranks, gpt2, options_of, rows
from ranks import on_ranks

pytestmark = [
    pytest.mark.slow,  # ranks import the framework for seconds
    pytest.mark.skipif(
        not (find_spec("accelerate") and find_spec("transformers")),
        reason="accelerate or transformers is not installed",
    ),
]

STEPS, ACCUMULATED, MAX_NORM = 100, 2, 0.5


def accelerator(rank: int, options: dict[str, Any] | None, **settings: Any) -> Any:
    """An Accelerator on CPUs; with ``options``, one that uses anabranch."""
    as_under_torchrun(rank)
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from anabranch.frameworks.accelerate import use_anabranch

    AcceleratorState._reset_state()  # of the Accelerator before, in this process
    GradientState._reset_state()
    made = Accelerator(cpu=True, **settings)
    assert made.num_processes == dist.get_world_size()
    if options is not None:
        use_anabranch(made, **options)
    return made


def batches_of_4() -> torch.utils.data.DataLoader[Any]:
    examples: Any = rows()  # a list is dataset enough
    return torch.utils.data.DataLoader(examples, batch_size=4)


def train(
    rank: int,
    options: dict[str, Any] | None,
    steps: int = STEPS,
    resumed: str = "",
    saved: str = "",
    skipped: int = 0,
    **settings: Any,
) -> tuple[list[float], torch.Tensor]:
    """A loop as in Accelerate's manual; its losses and the trained parameters in one tensor."""
    helper = accelerator(rank, options, gradient_accumulation_steps=ACCUMULATED, **settings)
    torch.manual_seed(10 + rank)  # of dropout
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * STEPS)
    loader = batches_of_4()
    model, optimizer, scheduler, loader = helper.prepare(model, optimizer, scheduler, loader)
    assert isinstance(model, DistributedDataParallel)
    assert isinstance(model, ab.DataParallel) == (options is not None)
    batches = [batch for _ in range(ACCUMULATED * STEPS // len(loader) + 1) for batch in loader]
    if resumed:
        helper.load_state(resumed)  # also the random state, which iterating over a loader changes
    losses: list[float] = []
    for batch in batches[ACCUMULATED * skipped : ACCUMULATED * (skipped + steps)]:
        with helper.accumulate(model):
            loss = model(**batch).loss
            helper.backward(loss)
            if helper.sync_gradients:
                helper.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(helper.reduce(loss.detach(), "mean").item())
    if saved:
        helper.save_state(saved)
    trained = torch.cat([p.detach().flatten() for p in helper.unwrap_model(model).parameters()])
    helper.free_memory()
    return losses, trained


# Losses.


def with_and_without(rank: int) -> list[Any]:
    kinds: tuple[dict[str, Any] | None, ...] = (None, {})
    return [[train(rank, kind), train(rank, kind, steps=6, mixed_precision="bf16")] for kind in kinds]


def test_losses_are_those_of_ddp_with_accumulation_and_clipping() -> None:
    """Of two summands the order does not matter: with two ranks every layout gives the same bits."""
    for ddp, ours in on_ranks(with_and_without, 2, timeout_s=120):
        assert len(ours[0][0]) == ACCUMULATED * STEPS and ours[0][0][-1] < ours[0][0][0]
        for (their_losses, their_weights), (losses, weights) in zip(ddp, ours, strict=True):
            assert losses == their_losses
            assert torch.equal(weights, their_weights)
        assert ours[0][0][:12] != ours[1][0]  # autocast was on


# Checkpoints.


def whole_and_first_half(rank: int, folder: str) -> list[Any]:
    answers = []
    for kind in ("dense", "oktopk"):
        answers.append(train(rank, options_of(kind), steps=20))
        train(rank, options_of(kind), steps=10, saved=f"{folder}/{kind}")
    return answers


def second_half(rank: int, folder: str) -> list[Any]:
    return [
        train(rank, options_of(kind), steps=10, skipped=10, resumed=f"{folder}/{kind}") for kind in ("dense", "oktopk")
    ]


def forgetful(rank: int, folder: str) -> tuple[list[float], torch.Tensor]:
    """The second half with the model's checkpoint, but without residuals."""
    for path in Path(folder, "oktopk").glob("anabranch_rank*.pt") if rank == 0 else []:
        path.unlink()
    dist.barrier()
    return train(rank, options_of("oktopk"), steps=10, skipped=10, resumed=f"{folder}/oktopk")


def test_a_stopped_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    """New processes load what save_state() wrote: weights, optimizer, random states, and residuals of every rank."""
    wholes = on_ranks(whole_and_first_half, 2, str(tmp_path))
    assert files_of_ranks(tmp_path / "oktopk") == ["anabranch_rank0.pt", "anabranch_rank1.pt"]
    kept = [torch.load(tmp_path / "oktopk" / f"anabranch_rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert all(state["world_size"] == 2 and state["residuals"] for state in kept)
    for whole, resumed in zip(wholes, on_ranks(second_half, 2, str(tmp_path)), strict=True):
        for (losses, weights), (last_losses, last_weights) in zip(whole, resumed, strict=True):
            assert last_losses == losses[-2 * 10 :]
            assert torch.equal(last_weights, weights)
    assert not torch.equal(on_ranks(forgetful, 2, str(tmp_path))[0][1], wholes[0][1][1])


# What prepare() makes, and what becomes of it.


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def wrapped_before(rank: int, folder: str) -> None:
    helper = accelerator(rank, {})
    mine = ab.DataParallel(linear())
    inner = mine.module
    model, _ = helper.prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    assert model is mine and helper.prepare(model) is mine
    assert helper.unwrap_model(model) is inner
    helper.save_state(f"{folder}/before")
    helper.wait_for_everyone()  # rank 0 writes the model
    assert (Path(folder) / "before" / "model.safetensors").is_file()
    assert not (Path(folder) / "before" / "model_1.safetensors").is_file()

    made = helper.prepare(linear())
    assert isinstance(made, ab.DataParallel) and helper.prepare(made) is made
    helper.save_state(f"{folder}/two")  # two models: each rank's state by the number of the model
    helper.wait_for_everyone()
    helper.load_state(f"{folder}/two")
    names = [f"anabranch{model}_rank{rank}.pt" for model in ("", "_1") for rank in range(2)]
    assert files_of_ranks(Path(folder) / "two") == sorted(names)
    helper.save_model(made, f"{folder}/model")
    assert helper.prepare_model(linear(), evaluation_mode=True).__class__ is nn.Linear

    again = linear()
    first = helper.prepare(again)
    helper.free_memory()
    second = helper.prepare(again)
    assert second is not first and "closed" in first.explain()
    assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel


def test_a_model_is_wrapped_once_and_unwraps(tmp_path: Path) -> None:
    on_ranks(wrapped_before, 2, str(tmp_path))


def arguments_arrive(rank: int) -> None:
    as_under_torchrun(rank)
    from accelerate.utils import DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=3)
    helper = accelerator(rank, {"compress": "int8", "profile_steps": 3}, kwargs_handlers=[handler])
    model = helper.prepare(linear())
    assert model.gradient_as_bucket_view and model.bucket_bytes_cap == 3 << 20

    scaled = accelerator(rank, options_of("oktopk"))
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # Accelerate itself makes one on GPUs only
    residuals = scaled.prepare(gpt2()).comm_state_dict()
    assert residuals["scale"] == 256.0


def test_arguments_of_both_and_the_scaler_reach_the_wrapper() -> None:
    on_ranks(arguments_arrive, 2)


def without_momentum(rank: int, model_first: bool, momentum: float) -> set[tuple[bool, bool]]:
    """For each parameter, whether it is a matrix, and whether it has momentum in the optimizer."""
    options = options_of("oktopk")
    helper = accelerator(rank, {**options, "compress": replace(options["compress"], momentum=momentum)})
    module = gpt2()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    if model_first:
        model, prepared = helper.prepare(module, optimizer)
    else:
        prepared, model = helper.prepare(optimizer, module)
    for batch in list(helper.prepare(batches_of_4()))[:3]:
        helper.backward(model(**batch).loss)
        prepared.step()
        prepared.zero_grad()
    found = {(p.dim() > 1, bool(optimizer.state[p]["exp_avg"].any())) for p in module.parameters()}
    helper.free_memory()
    return found


@pytest.mark.parametrize("model_first", [True, False])
def test_the_optimizer_shares_momentum_with_sparse_gradients_by_itself(model_first: bool) -> None:
    for momentum in (0.9, 0.0):
        for found in on_ranks(without_momentum, 2, model_first, momentum, timeout_s=120):
            assert (False, True) in found
            assert ((True, True) in found) == (momentum == 0)


# Refusals: one sentence each.


def refusals(rank: int) -> list[str]:
    from anabranch.frameworks.accelerate import use_anabranch

    said = []

    def refused(call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call(*args, **kwargs)
        said.append(str(caught.value))

    helper = accelerator(rank, {})
    refused(use_anabranch, helper)
    with patch("accelerate.Accelerator.prepare_model", lambda self, model: model):
        refused(accelerator, rank, {})
    with patch("accelerate.Accelerator.unwrap_model", None):
        refused(accelerator, rank, {})
    # A version that imports the class under another name makes a DDP that is not ours.
    stock = DistributedDataParallel
    with patch(
        "accelerate.Accelerator.prepare_model",
        lambda self, model, device_placement=None, evaluation_mode=False: stock(model),
    ):
        other = accelerator(rank, {})
        refused(other.prepare, linear())
    stock_helper = accelerator(rank, None)
    stock_helper.prepare(linear())
    refused(use_anabranch, stock_helper)
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    hooked = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)
    memory = ab.Lean(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    refused(accelerator(rank, {"memory": memory}, kwargs_handlers=[hooked]).prepare, linear())
    with patch("accelerate.Accelerator.distributed_type", "FSDP"), patch("frameworks.test_accelerate.dist"):
        from accelerate import Accelerator

        refused(use_anabranch, Accelerator(cpu=True))
    return said


def test_another_version_or_another_kind_of_training_is_refused_with_a_sentence() -> None:
    twice, arguments, missing, own, late, hook, kind = on_ranks(refusals, 2)[0]
    assert "called twice" in twice
    tested = "it is tested with 1.15.0: pip install accelerate==1.15.0"
    assert arguments.startswith("anabranch does not fit accelerate 1.") and arguments.endswith(tested)
    assert "prepare_model() takes no device_placement" in arguments
    assert "has no unwrap_model()" in missing and missing.endswith(tested)
    assert "makes a DistributedDataParallel of its own" in own and own.endswith(tested)
    assert late.startswith("use_anabranch() was called after prepare()") and late.endswith("call it before")
    assert "comm_hook=POWER_SGD under Lean" in hook and 'such as "bf16"' in hook
    assert "distributed_type is FSDP: expected NO or MULTI_CPU or MULTI_GPU" in kind
