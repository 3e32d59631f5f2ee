"""Requests that Lean refuses, with clear errors, and parameters that no rank used, which it treats as DDP does."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from anabranch.values.errors import CollectiveError
from lean.launches import Answers, each_on_ranks
from ranks import cases_on_ranks, on_ranks

WIDTH = 16


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


class Branches(nn.Module):
    """A trunk, and branches of which a forward runs those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, *which: int) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        return x + sum(torch.tanh(self.branches[index](x)) for index in which)


BOTH = (0, 1)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def wrapped(model: nn.Module, **options: Any) -> Any:
    return ab.DataParallel(model, profile_steps=0, memory=ab.Lean(adamw), **options)


def sparse_plan(model: nn.Module, density: float) -> ab.Plan:
    named = list(reversed(list(model.named_parameters())))
    kinds = ((2, f"oktopk:{density:g}"), (1, "dense"))
    return ab.Plan(tuple(ab.Bucket(tuple(n for n, p in named if p.dim() == dim), collective=k) for dim, k in kinds))


def state_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


USES: list[list[tuple[int, ...]]] = [[BOTH, BOTH], [(0,), (0,)], [(0,), BOTH], [(), ()], [(1,), (0,)]]  # by step, rank


def as_ddp_does(rank: int) -> None:
    """Branches that all ranks use, one, or none; with weight decay and momentum, which move what has a gradient."""
    ours, theirs = Branches(), Branches()
    lean = wrapped(ours, find_unused_parameters=True)
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    optimizer = adamw(list(theirs.parameters()))
    for step, uses in enumerate(USES):
        lean(batch(step, rank), *uses[rank]).sum().backward()
        ddp(batch(step, rank), *uses[rank]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)
            assert lean.optimizer.state[a]["step"] == optimizer.state[b]["step"]
    lean.close()


def test_parameters_that_no_rank_used_are_left_alone_as_by_ddp(launched: Answers) -> None:
    assert "as_ddp_does" in launched  # its own assertions hold on every rank


def unused_and_sparse(rank: int, density: float, residuals: Any) -> list[torch.Tensor]:
    model = Branches()
    memory = ab.Lean(adamw, residuals=residuals)
    lean: Any = ab.DataParallel(
        model, plan=sparse_plan(model, density), compress=ab.OkTopk(density, warmup_steps=0), profile_steps=0,
        memory=memory, find_unused_parameters=True,
    )  # fmt: skip
    for step, uses in enumerate(USES):
        idle = [index for index in BOTH if all(index not in use for use in uses)]
        before = state_of(model.branches)
        lean(batch(step, rank), *uses[rank]).sum().backward()
        for index in idle if density == 1.0 else []:  # nothing waits that could still arrive
            assert torch.equal(before[2 * index], state_of(model.branches)[2 * index]), (step, index)
    lean.close()
    return state_of(model)


def test_what_no_rank_used_moves_only_by_its_residual() -> None:
    for answers in each_on_ranks(unused_and_sparse, 2, [(1.0, "in place"), (0.1, "in place"), (0.1, "int8")]):
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def unused_unasked(rank: int, ranks: int) -> str:
    model = Branches()
    lean = wrapped(model)
    lean(batch(0, rank), *BOTH).sum().backward()
    before = copy.deepcopy(model.branches[1])
    try:
        lean(batch(1, rank), 0).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        lean.close()
    return "left alone" if same(before, model.branches[1]) else "moved"


def test_a_missing_gradient_is_an_error_unless_it_is_expected() -> None:
    for answers in on_ranks(unused_unasked, 2, 2):
        assert "branches.1.bias got no gradient" in answers and "find_unused_parameters=True" in answers
    assert on_ranks(unused_unasked, 1, 1) == ["left alone"]  # as a single rank of DataParallel does


def no_sync_is_the_forwards(rank: int) -> list[int]:
    """As under DDP: whether gradients are averaged is decided when forward runs."""
    model = Branches()
    lean = wrapped(model)
    steps = []
    for inside_forward, inside_backward in ((True, False), (False, True), (True, True), (False, False)):
        with lean.no_sync() if inside_forward else nullcontext():
            loss = lean(batch(0, rank), *BOTH).sum()
        with lean.no_sync() if inside_backward else nullcontext():
            loss.backward()
        steps.append(lean._tuner.steps_done)
    assert all(parameter.grad is None for parameter in model.parameters())
    averaged = lean(batch(1, rank), *BOTH).sum()
    with lean.no_sync():
        lean(batch(2, rank), *BOTH).sum().backward()
        added = lean(batch(3, rank), *BOTH).sum()
    steps.append(lean._tuner.steps_done)
    (averaged + added).backward()  # one of them is to be averaged, and so are all
    steps.append(lean._tuner.steps_done)
    assert all(parameter.grad is None for parameter in model.parameters())
    lean.close()
    return steps


def test_no_sync_counts_at_forward(launched: Answers) -> None:
    assert launched["no_sync_is_the_forwards"] == [[0, 1, 1, 2, 2, 3]] * 2


def copied(rank: int, mode: str) -> list[str]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    options: Any = {"within": 1 << 30} if mode == "auto" else {"activations": mode}
    lean: Any = ab.DataParallel(model, profile_steps=0, memory=ab.Lean(adamw, **options))
    lean(batch(0, rank)).sum().backward()
    try:
        other = copy.deepcopy(lean)
    except RuntimeError as error:
        lean.close()
        return [str(error)]
    with torch.no_grad():
        assert torch.equal(other(batch(1, rank)), lean(batch(1, rank)))
    assert other.plan is None and other.comm_state_dict() == {}
    with pytest.raises(RuntimeError, match="is a copy") as caught:
        other(batch(1, rank))
    again: Any = ab.DataParallel(other.module, profile_steps=0, memory=ab.Lean(adamw, **options))
    for each in (again, lean):
        each(batch(1, rank)).sum().backward()
    assert not same(again.module, other.module) or again.module is other.module
    for each in (again, other, lean):
        each.close()
    return [str(caught.value)]


def test_a_copy_computes_and_says_that_it_cannot_train() -> None:
    kept, recomputed, mixed = each_on_ranks(copied, 2, [("keep",), ("recompute",), ("auto",)])
    for answers in (*kept, *recomputed):
        assert "wrap its module: DataParallel(copy.module" in answers[0]
    assert all("copy the module before it is wrapped" in answers[0] for answers in mixed)


def converted(rank: int, change: str) -> str:
    model = Branches()
    lean = wrapped(model)
    lean.to("cpu").float()  # which changes nothing
    lean(batch(0, rank), *BOTH).sum().backward()
    changes: dict[str, Callable[[], object]] = {
        "dtype": lambda: lean.double(),
        "inner": lambda: model.branches[1].to(torch.bfloat16),
        "device": lambda: model.to("meta"),
        "replaced": lambda: setattr(model.trunk, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
        "added": lambda: setattr(model, "further", nn.Linear(2, 2)),
        "frozen": lambda: model.branches[1].requires_grad_(False),
    }
    changes[change]()
    try:
        lean(batch(1, rank), *BOTH).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        lean.close()
    return "works"


def test_a_model_that_is_changed_after_wrapping() -> None:
    expected = {
        "dtype": "trunk.weight is torch.float64 on cpu with strides (16, 1) and was torch.float32 on cpu",
        "inner": "branches.1.weight is torch.bfloat16 on cpu",
        "device": "trunk.weight is torch.float32 on meta",
        "replaced": "unfrozen, added or replaced since",
        "added": "further.weight is ",
        "frozen": "works",
    }
    for says, answers in zip(
        expected.values(), each_on_ranks(converted, 2, [(change,) for change in expected]), strict=True
    ):
        assert all(says in answer for answer in answers)


def late(rank: int, case: str) -> str:
    model = Branches()
    lean = wrapped(model)
    loss = lean(batch(0, rank), *BOTH).sum()
    second = lean(batch(1, rank), *BOTH).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as caught:
        (loss if case == "again" else second).backward()
    lean(batch(2, rank), *BOTH).sum().backward()  # nothing was begun, so it goes on
    assert lean._tuner.steps_done == 2
    lean.close()
    return str(caught.value)


def test_backward_through_an_old_forward_is_an_error() -> None:
    for answers in each_on_ranks(late, 2, [("again",), ("second",)]):
        assert all("1 steps old" in answer and "no_sync()" in answer for answer in answers)


class Odd(nn.Module):
    """Complex numbers, and an embedding whose gradient may be sparse whatever the module says."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.rows = nn.Parameter(torch.randn(5, WIDTH))
        self.sparse = "by the call" if sparse else ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(torch.tensor([1, 2, 2, 0]), self.rows, sparse=bool(self.sparse))
        return (self.turn * x * rows).abs()


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def complex_numbers(rank: int) -> None:
    ours, theirs = Odd(False), Odd(False)
    lean: Any = ab.DataParallel(ours, profile_steps=0, memory=ab.Lean(sgd, clip_norm=1e9))
    ddp, optimizer = DistributedDataParallel(theirs), sgd(list(theirs.parameters()))
    for step in range(3):
        lean(batch(step, rank)).sum().backward()
        ddp(batch(step, rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    lean.close()


def test_complex_parameters_train_as_under_ddp(launched: Answers) -> None:
    assert "complex_numbers" in launched  # its own assertions hold on every rank


def odd_requests(rank: int) -> list[str]:
    answers = []
    by_the_call = wrapped(Odd(True))
    requests: list[Callable[[], object]] = [
        lambda: by_the_call(batch(0, rank)).sum().backward(),
        lambda: wrapped(nn.Linear(2, 2, device="meta")),
        lambda: wrapped(nn.ReLU()),
        lambda: wrapped(nn.Embedding(4, 4, sparse=True)),
        lambda: wrapped(Branches(), compress=ab.OkTopk(momentum=0.9)),
        lambda: ab.DataParallel(Branches(), memory="lean"),  # type: ignore[arg-type]
    ]
    for request in requests:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            request()
        answers.append(str(caught.value))
    return answers


def test_odd_requests_get_clear_errors(launched: Answers) -> None:
    expected = [
        "the gradient of rows is torch.sparse_coo", "expected all on one CPU or GPU", "nothing to train",
        "sparse=False", "use the momentum of the optimizer", "expected anabranch.Lean",
    ]  # fmt: skip
    for answers in launched["odd_requests"]:
        assert [words in line for words, line in zip(expected, answers, strict=True)] == [True] * 6, answers


def refused_late(rank: int) -> bool:
    """A plan for another model is refused when activations are already seen to: the module is left as it was."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    memory = ab.Lean(adamw, activations=ab.Activations("recompute"))
    with pytest.raises(ab.PlanError, match="does not train"):
        ab.DataParallel(model, plan=ab.Plan((ab.Bucket(("other",)),)), memory=memory)
    return any("forward" in vars(part) for part in model.modules())


def test_a_refusal_leaves_the_module_as_it_was(launched: Answers) -> None:
    assert launched["refused_late"] == [False, False]


def scaler_as_usual(rank: int) -> str:
    lean = wrapped(Branches())
    scaler = torch.amp.GradScaler("cpu")
    lean.follow(scaler)
    for step in range(2):
        scaler.scale(lean(batch(step, rank), *BOTH).sum()).backward()
    lean.optimizer.step()
    with pytest.raises(RuntimeError) as caught:
        scaler.step(lean.optimizer)
    lean.optimizer.step()
    lean.close()
    return str(caught.value)


def test_a_scaler_is_followed_not_stepped(launched: Answers) -> None:
    assert all("follow(scaler)" in answers for answers in launched["scaler_as_usual"])


def plain_sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise TypeError("step() needs a closure")


def asked(rank: int) -> list[str]:
    """Requests of DDP's, and an optimizer that fails: in words."""
    answers = []
    for odd in ({"device_ids": [0]}, {"static_graph": True, "gradient_as_bucket_view": True}):
        with pytest.raises(ValueError) as caught:
            ab.DataParallel(nn.Linear(4, 4), memory=ab.Lean(plain_sgd), **odd)
        answers.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        ab.DataParallel(nn.Linear(4, 4), [0], memory=ab.Lean(plain_sgd))
    answers.append(str(caught.value))
    lean: Any = ab.DataParallel(
        nn.Linear(4, 4), profile_steps=0, memory=ab.Lean(lambda params: NeedsClosure(params, lr=0.1))
    )
    with pytest.raises((RuntimeError, CollectiveError)) as failed:
        lean(torch.ones(1, 4)).sum().backward()
    answers.append(str(failed.value))
    lean.close()
    return answers


def test_unsupported_requests_get_clear_errors() -> None:
    for answers in on_ranks(asked, 1):
        given, many, unnamed, failed = answers
        assert "was given device_ids" in given and "leave the others out" in given
        assert "static_graph, gradient_as_bucket_view" in many and "device_ids" in unnamed
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
    answers = []
    for model, wishes in (
        (convolution, {"memory": ab.Lean(plain_sgd)}),
        (nn.Linear(4, 4), {"memory": ab.Lean(grouped_by(rank == 1))}),
        (nn.Linear(4, 4), {"memory": ab.Lean(plain_sgd), "broadcast_buffers": rank == 0}),
    ):
        with pytest.raises(ab.DisagreementError) as caught:
            ab.DataParallel(model, **wishes)
        answers.append(str(caught.value))
    return answers


def test_what_differs_between_ranks_is_named(launched: Answers) -> None:
    for strides, groups, buffers in launched["differing"]:
        assert "strides (27, 1, 9, 3)" in strides
        assert "Lean's optimizer" in groups and "'weight in group 0'" in groups and "'weight in group 1'" in groups
        assert "broadcast_buffers True" in buffers and "broadcast_buffers False" in buffers


class Counting(torch.optim.SGD):
    """Keeps a count of all steps in its state, for no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state["steps"] = 1  # type: ignore[index]


def changed_later(rank: int) -> list[str]:
    """Another order in memory, a group that comes too late, a memory of all parameters together."""
    answers = []
    convolution: Any = nn.Conv2d(3, 4, 3, bias=False)
    lean: Any = ab.DataParallel(convolution, profile_steps=0, memory=ab.Lean(plain_sgd))
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
    answers += [str(late.value), str(other.value), str(counted.value)]
    return answers


def test_changes_after_wrapping_are_refused() -> None:
    for late, other, counted in on_ranks(changed_later, 1):
        assert "add_param_group() of 1 parameters" in late and "wrap a module" in late
        assert "with strides (27, 1, 9, 3) and was" in other
        assert "changes 'steps' in its state" in counted


@pytest.fixture(scope="module")
def launched() -> Answers:
    """What each scenario of this file returns on each rank, in one launch."""
    return cases_on_ranks({one.__name__: (one,) for one in SCENARIOS}, 2, timeout_s=240.0)


SCENARIOS: tuple[Callable[[int], object], ...] = (
    as_ddp_does,
    no_sync_is_the_forwards,
    complex_numbers,
    odd_requests,
    refused_late,
    scaler_as_usual,
    differing,
)
