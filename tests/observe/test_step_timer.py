"""The step timer: its marks, its observers, and the tensors that it finds in outputs."""

from collections.abc import Callable

import torch
from torch import nn

from anabranch.observe.clock import HostClock
from anabranch.observe.step_timer import StepMarks, StepObserver, StepTimer, tensors_in


def test_tensors_in_what_a_model_returns() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert [t.numel() for t in tensors_in({"x": [a, (b, "text")], "y": None})] == [1, 2]
    assert tensors_in("nothing") == []


class Watcher(StepObserver):
    """Notes every event by name."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_forward_end(self, averaged: bool) -> Callable[[], None]:
        self.events.append(f"forward {averaged}")
        return lambda: self.events.append(f"gradient {averaged}")

    def on_step_end(self, step: StepMarks) -> None:
        self.events.append("step")

    def close(self) -> None:
        self.events.append("closed")


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.left(x), self.right(x)]


def test_observers_are_called_for_each_output_that_gets_a_gradient_and_of_one_step() -> None:
    timer, watcher, model = StepTimer(HostClock()), Watcher(), TwoHeads()
    timer.observers.append(watcher)
    with timer.attached(model):
        one, other = model(torch.ones(1, 2))
        (one + other).sum().backward()
    assert watcher.events == ["forward True", "gradient True", "gradient True", "step"]
    timer.close()
    assert watcher.events[-1] == "closed" and timer.observers == []


def test_a_forward_that_is_not_averaged_is_no_step() -> None:
    timer, watcher, model = StepTimer(HostClock()), Watcher(), TwoHeads()
    timer.observers.append(watcher)
    one, _ = output = model(torch.ones(1, 2))
    timer.forward_ended(output, averaged=False)
    one.sum().backward()
    assert watcher.events == ["forward False", "gradient False"] and timer.last_steps(1) == []


def test_a_backward_without_progress_is_no_step() -> None:
    reduced: list[int] = [0]
    ended: list[int] = []
    timer, model = StepTimer(HostClock(), lambda: ended.append(1), lambda: reduced[0]), TwoHeads()
    with timer.attached(model):
        one, _ = model(torch.ones(1, 2))
        torch.autograd.grad(one.sum(), list(model.left.parameters()), retain_graph=True)
        assert not ended, "autograd.grad() reaches no reducer"
        reduced[0] += 1
        one.sum().backward()
    assert len(ended) == len(timer.last_steps(9)) == 1


def test_marks_are_in_order_and_gradients_are_marked_only_while_that_is_wanted() -> None:
    timer, model = StepTimer(HostClock()), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with timer.attached(model):
        model(torch.ones(1, 2)).sum().backward()
        with timer.gradient_timing(dict(model.named_parameters())):
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    before, timed, after = timer.last_steps(3)
    assert not before.ready and not after.ready
    assert {name.partition(".")[0] for name in timed.ready} == {"0", "1"} and next(iter(timed.ready)).startswith("1")
    marks = [timed.forward, timed.backward, *timed.ready.values(), timed.computed, timed.averaged]
    assert marks == sorted(marks, key=lambda mark: float(str(mark)))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_buckets_are_marked_only_inside_a_step_while_that_is_wanted() -> None:
    timer = StepTimer(HostClock())
    with timer.bucket_timing():
        assert timer.mark_bucket(0) is None, "no step has begun"
        timer.forward_begins()
        mark_end = timer.mark_bucket(0)
        assert mark_end is not None
    assert timer.mark_bucket(1) is None
