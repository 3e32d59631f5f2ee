"""Whole exchanges with the Triton kernels: nothing is lost, and they end where their twins do."""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from benchmarks.rival_exchanges import ExchangeFunction
from benchmarks.virtual import VirtualWorld
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse.fixed_exchange import fixed_exchange
from anabranch.exchange.sparse.oktopk import version_for
from anabranch.values.kinds.options import OkTopk
from exchange.sparse.triton_device import DEVICE, triton_exchange, use_small_blocks
from exchange.sparse.worlds import check_narrow_steps, check_overflow, check_step, gradients, step


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


def with_kernels(options: OkTopk) -> ExchangeFunction:
    return partial(triton_exchange.triton_exchange, options=options)


def without(options: OkTopk) -> ExchangeFunction:
    return partial(fixed_exchange, options=options)


def worlds(ranks: int, numel: int) -> Iterator[tuple[VirtualWorld, list[BucketState]]]:
    for device in (DEVICE, torch.device("cpu")):
        yield VirtualWorld(ranks), [BucketState.of(torch.zeros(numel, device=device), ranks) for _ in range(ranks)]


def on_a_grid(ranks: int, numel: int, number: int) -> list[torch.Tensor]:
    """Gradients whose sums are the same in any order."""
    return [(gradient * 64).round() / 64 for gradient in gradients(ranks, numel, number)]


WAYS = [
    (1, 900, 0.05, "fp32"),
    (3, 2003, 0.02, "fp32"),
    (3, 2003, 0.02, "bf16"),
    (2, 1501, 1.0, "fp32"),
    (4, 3, 0.4, "bf16"),
    (3, 2003, 0.02, "int8"),
    (2, 1501, 1.0, "int8"),
]


@pytest.mark.parametrize(("ranks", "numel", "density", "precision"), WAYS)
def test_exchanges_lose_nothing_and_are_the_twins(ranks: int, numel: int, density: float, precision: Any) -> None:
    """Roomy messages and values on a grid, whose sums are the same in any order: then all bits are."""
    options = OkTopk(region_period=2, wire=precision, capacity_factor=4.0)
    (world, held), (twins, twin_held) = worlds(ranks, numel)
    for number in range(2):
        made = on_a_grid(ranks, numel, number)
        copies = [gradient.clone() for gradient in made]
        given = [gradient.to(DEVICE) for gradient in made]
        check_step(with_kernels(options), given, held, world, density)
        step(without(options), copies, twin_held, twins, density)
        assert torch.equal(given[0].cpu(), copies[0])
        for mine, theirs in zip(held, twin_held, strict=True):
            compare(mine, theirs)


def compare(mine: BucketState, theirs: BucketState) -> None:
    assert torch.equal(mine.residual.cpu(), theirs.residual)
    assert torch.equal(mine.boundaries.cpu(), theirs.boundaries)
    assert (int(mine.offered), int(mine.applied), mine.step) == (int(theirs.offered), int(theirs.applied), theirs.step)
    for name in ("threshold_bias", "local_threshold"):
        assert getattr(mine, name).item() == pytest.approx(getattr(theirs, name).item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_full_messages_lose_nothing(precision: Any) -> None:
    """All large values in one region, which therefore has too few slots."""
    options = OkTopk(region_period=64, wire=precision, capacity_factor=1.0)
    world, held = next(worlds(3, 1200))
    for state in held:
        state.fresh, state.step = False, 1  # regions stay uniform
    for number in range(2):
        made = [gradient.to(DEVICE) for gradient in gradients(3, 1200, number)]
        for gradient in made:
            gradient[:300] *= 100
        check_step(with_kernels(options), made, held, world, 0.05)
    assert all(int(state.offered) > 50 for state in held)
    assert all(state.boundaries.tolist() == [0, 400, 800, 1200] for state in held)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter, at inf − inf
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_poisoned_step_changes_no_residual(bad: float, precision: Any) -> None:
    world, held = next(worlds(2, 1100))
    way = with_kernels(OkTopk(wire=precision))
    step(way, [gradient.to(DEVICE) for gradient in gradients(2, 1100, 0)], held, world, 0.02)
    old = [state.residual.clone() for state in held]
    biases = [state.threshold_bias.item() for state in held]
    made = [gradient.to(DEVICE) for gradient in gradients(2, 1100, 1)]
    made[1][1099] = bad
    step(way, made, held, world, 0.02)
    assert all(bool(gradient.isnan().all()) for gradient in made)
    assert all(torch.equal(state.residual, before) for state, before in zip(held, old, strict=True))
    assert [state.threshold_bias.item() for state in held] == biases
    check_step(way, [gradient.to(DEVICE) for gradient in gradients(2, 1100, 2)], held, world, 0.02)


@pytest.mark.campaign
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.bfloat16), ("int8", torch.float16)])
def test_gradients_of_16_bits(precision: Any, dtype: torch.dtype) -> None:
    way = with_kernels(OkTopk(wire=precision, region_period=2))
    check_narrow_steps(way, dtype, DEVICE)
    check_overflow(way, DEVICE)


class Counted(TorchDispatchMode):
    """Torch operations that take a launch; the others only make tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) not in (
            "view",
            "slice",
            "select",
            "empty",
            "empty_like",
            "unbind",
            "detach",
            "split",
            "split_with_sizes",
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("precision", "most"), [("fp32", 13), ("bf16", 22), ("int8", 22)])
def test_an_exchange_takes_few_launches(precision: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch operations take more than two hundred."""
    launched = []
    options, bucket = OkTopk(wire=precision), torch.ones(800, device=DEVICE)
    world, (state,) = next(worlds(1, 800))
    state.fresh, state.step = False, 1
    world.comms[0].zeros(800, DEVICE)
    kind = type(import_module("anabranch.exchange.sparse.kernels").reset)
    monkeypatch.setattr(kind, "run", lambda self, *args, **kwargs: launched.append(self))
    with Counted() as counted:
        world.run([with_kernels(options)(bucket, state, world.comms[0], 1.0, 0.05)])
    assert len(launched) == most
    assert set(counted.names) - {"zeros"} <= {"stack", "cat", "copy_", "record_stream"}  # the virtual world's
    assert counted.names.count("zeros") == (0 if precision == "fp32" else 2)  # of tables, to count in


def test_kernels_are_for_gpus_and_sums_in_any_order() -> None:
    gpu = torch.device("cuda")
    assert version_for(gpu, OkTopk()) is triton_exchange.triton_exchange
    assert version_for(gpu, OkTopk(deterministic=True)) is fixed_exchange


@pytest.mark.campaign_but_first
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter, at inf − inf
@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize(("ranks", "numel", "density", "precision"), [*WAYS[1:4], WAYS[5]])
def test_sums_may_be_added_up_in_the_gradients_place(
    ranks: int, numel: int, density: float, precision: Any, poisoned: bool
) -> None:
    """Gradients that were added to the residual as they came, in a memory of zeros: the same bits, no zero buffer."""
    options = OkTopk(region_period=2, wire=precision, capacity_factor=4.0)
    (world, held), (twins, twin_held) = (next(worlds(ranks, numel)) for _ in range(2))
    for number in range(3):
        given = [gradient.to(DEVICE) for gradient in on_a_grid(ranks, numel, number)]
        zeros = [torch.zeros_like(gradient) for gradient in given]
        for state, gradient in zip(held, given, strict=True):
            state.residual.add_(gradient)
            state.accumulates_in_place = True
        if poisoned and number == 1:
            zeros[-1][0] = given[-1][0] = torch.inf
        runs = [(world, held, zeros), (twins, twin_held, given)]
        for where, states, tensors in runs:
            calls = zip(tensors, states, where.comms, strict=True)
            where.run([with_kernels(options)(g, s, c, float(ranks), density) for g, s, c in calls])
        if poisoned and number == 1:
            assert all(tensor.isnan().all() for _, _, tensors in runs for tensor in tensors)
            for state, gradient in zip(held, on_a_grid(ranks, numel, number), strict=True):
                state.residual.sub_(gradient.to(DEVICE))  # which is exact on a grid
        else:
            assert all(torch.equal(one, other) for one, other in zip(zeros, given, strict=True))
        assert all(torch.equal(one.residual, other.residual) for one, other in zip(held, twin_held, strict=True))
        assert len(world.comms[0]._zeros) == 0
