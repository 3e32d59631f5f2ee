"""What Lean refuses, and in which words: ranks that differ, requests of DDP's, what is changed after wrapping."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.errors import CollectiveError
from ranks import on_ranks


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def rates_differ(rank: int) -> str:
    with pytest.raises(ab.DisagreementError) as caught:
        ab.DataParallel(nn.Linear(4, 4), memory=ab.Lean(lambda params: torch.optim.SGD(params, lr=0.1 * (1 + rank))))
    return str(caught.value)


class Odd(torch.optim.SGD):
    """With a setting that lies elsewhere in memory on every rank."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=torch.tensor(0.1))
        for group in self.param_groups:
            group["shape"] = lambda x: x


def odd_settings(rank: int) -> None:
    keep = [object() for _ in range(100 * rank)]  # other places in memory
    ab.DataParallel(nn.Linear(4, 4), memory=ab.Lean(Odd)).close()
    assert len(keep) == 100 * rank


def test_settings_are_compared_by_what_they_say() -> None:
    on_ranks(odd_settings, 2)


def test_ranks_must_update_alike() -> None:
    for told in on_ranks(rates_differ, 2):
        assert "Lean's optimizer" in told and "lr 0.1" in told and "lr 0.2" in told


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise TypeError("step() needs a closure")


def asked(rank: int) -> list[str]:
    """Requests of DDP's, clipping afterwards, and an optimizer that fails: in words."""
    told = []
    for odd in ({"device_ids": [0]}, {"static_graph": True, "gradient_as_bucket_view": True}):
        with pytest.raises(ValueError) as caught:
            ab.DataParallel(nn.Linear(4, 4), memory=ab.Lean(sgd), **odd)
        told.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        ab.DataParallel(nn.Linear(4, 4), [0], memory=ab.Lean(sgd))
    told.append(str(caught.value))
    lean: Any = ab.DataParallel(nn.Linear(4, 4), profile_steps=0, memory=ab.Lean(sgd))
    with pytest.raises(RuntimeError) as clipped:
        lean.clip_grad_norm_(1.0)
    told.append(str(clipped.value))
    lean.close()
    lean = ab.DataParallel(
        nn.Linear(4, 4), profile_steps=0, memory=ab.Lean(lambda params: NeedsClosure(params, lr=0.1))
    )
    with pytest.raises((RuntimeError, CollectiveError)) as failed:
        lean(torch.ones(1, 4)).sum().backward()
    told.append(str(failed.value))
    lean.close()
    return told


def test_requests_of_others_are_answered_in_words() -> None:
    for told in on_ranks(asked, 1):
        given, many, unnamed, clipped, failed = told
        assert "was given device_ids" in given and "leave the others out" in given
        assert "static_graph, gradient_as_bucket_view" in many and "device_ids" in unnamed
        assert "Lean(clip_norm=...)" in clipped
        assert "step failed on this rank" in failed and "Another rank" not in failed


def differing(rank: int) -> list[str]:
    """What differs between ranks, by name: strides, who is in which group, buffers."""

    def grouped_by(swapped: bool) -> Any:
        def make(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            parts = [[p for p in params if (p.dim() > 1) != swapped], [p for p in params if (p.dim() > 1) == swapped]]
            groups = [{"params": part, "lr": rate} for part, rate in zip(parts, (0.1, 0.2), strict=True) if part]
            return torch.optim.SGD(groups, lr=0.1)

        return make

    convolution: Any = nn.Conv2d(3, 4, 3)
    if rank == 1:
        convolution = convolution.to(memory_format=torch.channels_last)
    told = []
    for model, wishes in (
        (convolution, {"memory": ab.Lean(sgd)}),
        (nn.Linear(4, 4), {"memory": ab.Lean(grouped_by(rank == 1))}),
        (nn.Linear(4, 4), {"memory": ab.Lean(sgd), "broadcast_buffers": rank == 0}),
    ):
        with pytest.raises(ab.DisagreementError) as caught:
            ab.DataParallel(model, **wishes)
        told.append(str(caught.value))
    return told


def test_what_differs_between_ranks_is_named() -> None:
    for strides, groups, buffers in on_ranks(differing, 2):
        assert "strides (27, 1, 9, 3)" in strides
        assert "Lean's optimizer" in groups and "'weight in group 0'" in groups and "'weight in group 1'" in groups
        assert "broadcast_buffers True" in buffers and "broadcast_buffers False" in buffers


class Counting(torch.optim.SGD):
    """Keeps a count of all steps in its state, for no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state["steps"] = 1  # type: ignore[index]


def another_order(rank: int) -> str:
    """What waits of a model in channels last, loaded into another such, and into one that is not."""
    formats = (torch.channels_last, torch.channels_last, torch.contiguous_format)
    kept: Any = None
    told = ""
    for format_ in formats:
        convolution: Any = nn.Conv2d(3, 4, 3, bias=False)
        lean: Any = ab.DataParallel(
            convolution.to(memory_format=format_),
            plan=ab.Plan((ab.Bucket(("weight",), collective="oktopk:0.1"),)),
            compress=ab.OkTopk(density=0.1, warmup_steps=0),
            profile_steps=0,
            memory=ab.Lean(sgd),
        )
        if kept is None:
            lean(torch.randn(1, 3, 4, 4)).square().sum().backward()
            kept = lean.comm_state_dict()
        else:
            try:
                lean.load_comm_state_dict(kept)
            except ValueError as error:
                assert format_ == torch.contiguous_format
                told = str(error)
        lean.close()
    return told


def test_what_waits_is_loaded_in_its_own_order() -> None:
    for told in on_ranks(another_order, 2):
        assert "the residual of weight" in told and "strides [27, 1, 9, 3], and here it is row-major" in told


def changed_later(rank: int) -> list[str]:
    """Another order in memory, a group that comes too late, a memory of all parameters together."""
    told = []
    convolution: Any = nn.Conv2d(3, 4, 3, bias=False)
    lean: Any = ab.DataParallel(convolution, profile_steps=0, memory=ab.Lean(sgd))
    lean(torch.ones(1, 3, 4, 4)).sum().backward()
    with pytest.raises(ValueError) as late:
        lean.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    convolution.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError) as other:
        lean(torch.ones(1, 3, 4, 4))
    lean.close()
    lean = ab.DataParallel(nn.Linear(4, 4), profile_steps=0, memory=ab.Lean(lambda params: Counting(params, lr=0.1)))
    with pytest.raises((RuntimeError, CollectiveError)) as counted:
        lean(torch.ones(1, 4)).sum().backward()
    lean.close()
    told += [str(late.value), str(other.value), str(counted.value)]
    return told


def test_what_is_changed_later_is_refused() -> None:
    for late, other, counted in on_ranks(changed_later, 1):
        assert "add_param_group() of 1 parameters" in late and "wrap a module" in late
        assert "with strides (27, 1, 9, 3) and was" in other
        assert "keeps 'steps' in its state" in counted
