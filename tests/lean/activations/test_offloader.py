"""Offloading: the same bits, one copy per storage, nothing left behind, nothing read too early; beside other hooks."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lean.activations.lazy_copies import LazyCopies
from lean.activations.networks import (
    Attention,
    Net,
    Vgg,
    assert_same,
    inputs_of,
    offloaded,
    one_thread,
    packed_bytes,
    plainly,
    small,
    trained,
)

__all__ = ["one_thread"]


def builders() -> list[Callable[[], nn.Module]]:
    return [Net, lambda: Net(drop=0.3), Attention, Vgg]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("window", "ahead"), [(0, 0), (4096, 20_000), (1 << 20, 1 << 20)])
@pytest.mark.parametrize("build", builders())
def test_training_is_the_same_to_the_bit(build: Callable[[], nn.Module], window: int, ahead: int, lazy: bool) -> None:
    offloader = small(window, ahead, LazyCopies() if lazy else None)
    assert_same(trained(build), trained(build, offloaded(offloader)))
    assert offloader.offloaded > 10
    assert offloader.live_storages == 0


def test_buffers_are_used_again_in_the_next_step() -> None:
    offloader = small()
    trained(Net, offloaded(offloader), steps=1)
    gc.collect()
    first = offloader.pool.allocations
    trained(Net, offloaded(offloader), steps=5)
    assert offloader.pool.allocations == first
    assert offloader.pool.free_nbytes == offloader.pool.nbytes > 0
    offloader.close()
    assert offloader.pool.nbytes == 0


def test_a_storage_is_copied_once_however_often_it_is_saved() -> None:
    offloader, model = small(), Net()
    sizes: list[int] = []
    with packed_bytes(sizes):
        model(inputs_of(model))
    with offloader.hooks(model):
        output = model(inputs_of(model))
    assert offloader.shared > 0
    assert offloader.offloaded + offloader.shared + offloader.kept == len(sizes)
    assert offloader.offloaded == offloader.live_storages
    del output
    assert offloader.live_storages == 0


def test_a_storage_that_was_changed_in_place_between_is_copied_again() -> None:
    offloader = small()
    x = torch.randn(100, requires_grad=True)
    with offloader.hooks():
        y = x * 2
        a = y.sin()  # saves version 0, which backward does not need below
        y.mul_(3)
        b = y.cos()
    assert offloader.offloaded == 2
    b.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, -6 * (6 * x.detach()).sin())
    with pytest.raises(
        RuntimeError, match=r"shape \(100,\) .* modified by an inplace operation .* version 1, expected 0"
    ):
        a.sum().backward()


def test_a_kept_tensor_that_was_changed_is_refused_as_torch_does() -> None:
    offloader = small()
    x = torch.randn(10, requires_grad=True)  # too small to offload
    with offloader.hooks():
        y = x * 2
        z = y.sin()
        y.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_the_device_keeps_a_window_and_no_more() -> None:
    offloader = small(window=1000)
    x = torch.randn(100, requires_grad=True)
    with offloader.hooks():
        storages, y = [], x.exp()
        for _ in range(8):
            storages.append(StorageWeakRef(y.untyped_storage()))
            y = y.exp()
    alive = [not storage.expired() for storage in storages]
    assert alive == [False] * 7 + [True]  # two of 400 bytes: this and the output
    del y


def test_back_in_reverse_order_ahead_of_use_and_within_the_bytes() -> None:
    copies = LazyCopies()
    offloader = small(window=0, ahead=1000, copies=copies)
    x = torch.randn(100, requires_grad=True)
    fresh: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            storages = [ref() for ref in offloader._by_position.values()]
            fresh.append(sum(storage.nbytes for storage in storages if storage is not None and storage.fetched_ahead))
            return gradients[0]

    with offloader.hooks():
        y = x
        for _ in range(10):
            y = Look.apply(y.exp())  # type: ignore[no-untyped-call]
    y.sum().backward()
    assert offloader.fetched == offloader.offloaded == 10
    assert offloader.counts.late_fetches == 1  # the first: nothing said that backward would begin
    assert max(fresh) == 800
    assert copies.log.count("to_device") == 10


def test_backward_twice_and_gradients_of_gradients() -> None:
    offloader = small(window=0)
    x = torch.randn(100, requires_grad=True)
    with offloader.hooks():
        y = (x.sin() * x.exp()).tanh().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    second = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, second)
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    curvature = torch.autograd.grad(gradient.sum(), x)[0]
    z = (x.sin() * x.exp()).tanh().sum()
    (wanted,) = torch.autograd.grad(z, x, create_graph=True)
    assert torch.equal(first, wanted)
    assert torch.equal(curvature, torch.autograd.grad(wanted.sum(), x)[0])
    del y, gradient
    assert offloader.live_storages == 0


def test_a_kept_graph_does_not_stay_on_the_device() -> None:
    offloader = small(window=0, ahead=400)
    x = torch.randn(100, requires_grad=True)
    with offloader.hooks():
        y = x.exp().exp().exp().exp().exp().sum()
    y.backward(retain_graph=True)
    storages = [ref() for ref in offloader._by_position.values()]
    assert all(storage is not None and storage.on_device is None for storage in storages)


def test_parameters_buffers_and_small_things_stay() -> None:
    offloader = small()
    linear = nn.Linear(60, 60, bias=False)
    with offloader.hooks(linear):
        y = linear(torch.randn(1, 60, requires_grad=True)) @ linear.weight.t()
    assert offloader.offloaded == 0
    assert offloader.kept >= 3
    del y


def test_a_slice_of_something_large_stays() -> None:
    offloader = small()
    data = torch.randn(1000, 100)
    weight = torch.randn(100, requires_grad=True)
    with offloader.hooks():
        y = data[3:7] * weight
    assert offloader.offloaded == 0
    del y


def test_views_come_back_with_their_strides_and_one_storage() -> None:
    offloader = small(window=0)
    x = torch.randn(3, 40, requires_grad=True)
    seen: list[tuple[int, ...]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, *views: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*views)
            return views[0].sum()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
            views = ctx.saved_tensors  # type: ignore[attr-defined]
            seen.extend(view.stride() for view in views)
            return tuple(torch.ones_like(view) * gradients[0] for view in views)

    with offloader.hooks():
        y = x.exp()
        out = Look.apply(y.t(), y[:, ::2], y.view(4, 30))  # type: ignore[no-untyped-call]
    out.backward()
    assert seen == [(1, 40), (40, 2), (30, 1)]
    assert offloader.offloaded == 1


def test_nothing_is_packed_without_gradients() -> None:
    offloader, model = small(), Net()
    with torch.no_grad(), offloader.hooks(model):
        model(inputs_of(model))
    with torch.inference_mode(), offloader.hooks(model):
        model.eval()(inputs_of(model))
    assert offloader.offloaded == offloader.kept == 0


def test_what_has_come_back_for_another_pass_stays_when_its_copy_out_is_over() -> None:
    offloader = small(window=10**9, copies=LazyCopies())
    x = torch.randn(100, requires_grad=True)
    outputs: list[torch.Tensor] = []
    with offloader.hooks():
        y = x
        for _ in range(6):
            y = y.exp().mul(0.1)
            outputs.append(y)
    expected = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert offloader.fetched == 0  # all are there: no copy out is over
    outputs[3].register_hook(lambda gradient: offloader.close())  # now they are, when some have come back
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert offloader.fetched == offloader.offloaded  # each of them once


def test_an_exception_in_forward_leaks_nothing() -> None:
    offloader, model = small(copies=LazyCopies()), Net()

    def fail(*_: object) -> None:
        raise KeyError("on purpose")

    handle = model.stage2.register_forward_hook(fail)
    for _ in range(3):
        with pytest.raises(KeyError), offloader.hooks(model):
            model(inputs_of(model))
    gc.collect()
    assert offloader.live_storages == 0
    handle.remove()
    before = offloader.pool.allocations
    assert_same(trained(Net), trained(Net, offloaded(offloader)))
    assert offloader.live_storages == 0
    assert offloader.pool.free_nbytes == offloader.pool.nbytes
    assert before > 0


def test_a_graph_that_is_dropped_half_way_leaks_nothing() -> None:
    offloader, model = small(window=0, copies=LazyCopies()), Net()
    with offloader.hooks(model):
        output = model(inputs_of(model))

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("on purpose")

    model.get_parameter("stage1.1.first.weight").register_hook(fail)
    with pytest.raises(KeyError):
        output.sum().backward()
    del output
    torch.ones(1, requires_grad=True).sum().backward()  # only now torch drops what was still to be done
    gc.collect()
    assert offloader.live_storages == 0
    offloader.close()
    assert offloader.pool.nbytes == 0


def test_where_the_host_has_no_room_tensors_stay() -> None:
    offloader = small(host=30_000)
    assert_same(trained(Net), trained(Net, offloaded(offloader)))
    assert 0 < offloader.pool.nbytes <= 30_000
    assert offloader.kept > 20


# ---------------------------------------------- beside the user's own hooks, checkpointing and autocast


def test_hooks_of_the_users_own_win_inside_and_outside() -> None:
    model = Net()
    mine: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        mine.append(tensor.shape)
        return tensor.detach()

    own = saved_tensors_hooks(pack, lambda tensor: tensor)
    offloader = small()
    with own, offloader.hooks(model):
        model(inputs_of(model)).sum().backward()
    assert offloader.offloaded == offloader.kept == 0
    count = len(mine)
    assert count > 20
    with offloader.hooks(model):
        x = model.norm(model.stem(inputs_of(model))).relu()
        with own, offloader.hooks(model):
            x = model.stage1(x)
        model.stage2(x).sum().backward()
    assert count < len(mine) < 2 * count
    assert offloader.offloaded > 3


def test_keep_within_hooks() -> None:
    offloader = small()
    x = torch.randn(100, requires_grad=True)
    with offloader.hooks():
        y = x.exp()
        with offloader.keep():
            y = y.exp().exp()
        assert offloader.offloaded == 1
        y = y.exp()
    assert offloader.offloaded == 2
    y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_the_users_own_checkpointing(reentrant: bool) -> None:
    def checkpointed(model: nn.Module) -> None:
        assert isinstance(model, Net)
        stage = model.stage1
        model.stage1.forward = lambda x: checkpoint(  # type: ignore[method-assign]
            nn.Sequential.forward, stage, x, use_reentrant=reentrant
        )

    offloader = small(window=0)
    assert_same(trained(Net, plainly, checkpointed), trained(Net, offloaded(offloader), checkpointed))
    assert offloader.offloaded > 10
    assert offloader.live_storages == 0


def test_within_the_users_own_checkpointing() -> None:
    offloader, model = small(), Net()
    twin = copy.deepcopy(model)

    runs: list[int] = []

    def lean(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        with offloader.hooks(model):
            result: torch.Tensor = model(x)
        return result

    batch = inputs_of(model).requires_grad_()
    checkpoint(lean, batch, use_reentrant=False).sum().backward()
    twin(inputs_of(model).requires_grad_()).sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert len(runs) == 2  # in forward and in recomputation, and checkpoint's own hooks saw both
    assert offloader.offloaded == offloader.kept == 0


def test_under_autocast() -> None:
    def half(model: nn.Module) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    offloader = small(window=0)

    class Both:
        def __init__(self, model: nn.Module) -> None:
            self.inner = offloader.hooks(model)
            self.outer = half(model)

        def __enter__(self) -> None:
            self.outer.__enter__()
            self.inner.__enter__()

        def __exit__(self, *exception: object) -> None:
            self.inner.__exit__(None, None, None)
            self.outer.__exit__(None, None, None)

    assert_same(trained(Net, half), trained(Net, Both))
    assert offloader.offloaded > 10


def test_two_graphs_at_once() -> None:
    offloader, model = small(window=0), Attention()
    twin = copy.deepcopy(model)
    with offloader.hooks(model):
        one, two = model(inputs_of(model)), model(inputs_of(model) * 2)
    (one.sum() + two.square().sum()).backward()
    (twin(inputs_of(model)).sum() + twin(inputs_of(model) * 2).square().sum()).backward()
    for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and wanted.grad is not None
        assert torch.equal(mine.grad, wanted.grad)
    assert offloader.live_storages == 0
