"""The step timer: its marks, its observers, and the tensors that it finds in outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from anabranch import Bucket, Plan
from anabranch.observe.clock import HostClock
from anabranch.observe.step_timer import StepMarks, StepObserver, StepTimer, tensors_in, timeline_of


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


class Owned(nn.Module):
    """A module whose gradients have an owner, as in DDP: it says when they are averaged."""

    def __init__(self, ended: list[StepMarks]) -> None:
        super().__init__()
        self.timer = StepTimer(HostClock(), lambda: ended.extend(self.timer.last_steps(1)))
        self.heads = TwoHeads()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.timer.forward_begins()
        output: list[torch.Tensor] = self.heads(x)
        self.timer.forward_ended(output)
        return output

    def average_after(self, parameter: torch.Tensor) -> Any:
        """Queue the owner's callback when this gradient arrives."""
        queue = Variable._execution_engine.queue_callback
        return parameter.register_post_accumulate_grad_hook(lambda _: queue(self.timer.gradients_averaged))


def test_a_step_ends_when_its_owner_says_so_and_not_with_any_backward() -> None:
    ended: list[StepMarks] = []
    model = Owned(ended)
    model.average_after(model.heads.left.weight)
    one, other = model(torch.ones(1, 2))
    torch.autograd.grad(one.sum(), list(model.heads.left.parameters()), retain_graph=True)
    other.sum().backward()
    assert not ended, "the gradients of the other head are missing"
    one.sum().backward()
    assert len(ended) == 1
    marks = [ended[0].forward, ended[0].backward, ended[0].computed, ended[0].averaged]
    assert None not in marks and marks == sorted(marks, key=lambda mark: float(str(mark)))


def test_a_loss_that_uses_no_output_ends_a_step_with_all_marks() -> None:
    ended: list[StepMarks] = []
    model = Owned(ended)
    model.average_after(model.heads.left.weight)
    model(torch.ones(1, 2))
    torch.stack([p.sum() for p in model.heads.parameters()]).sum().backward()
    assert len(ended) == 1
    assert ended[0].backward == ended[0].computed is not None
    assert ended[0].averaged is not None


def test_a_backward_that_failed_is_not_waited_for() -> None:
    ended: list[StepMarks] = []
    model = Owned(ended)
    model.average_after(model.heads.left.weight)

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    _, other = model(torch.ones(1, 2))
    handle = model.heads.right.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        other.sum().backward()
    handle.remove()
    model.heads.left.weight.sum().backward()
    assert len(ended) == 1


def test_after_step_is_called_after_so_many_steps_and_those_before_are_timed_coarsely() -> None:
    ended: list[StepMarks] = []
    model = Owned(ended)
    model.average_after(model.heads.left.weight)

    def step() -> None:
        model(torch.ones(1, 2))[0].sum().backward()

    model.timer.call_after(4)
    for count in range(1, 5):
        step()
        assert len(ended) == (count == 4) and model.timer.steps_done == count
    coarse, *_, last = model.timer.last_steps(4)
    assert coarse.backward is None and last.backward is not None and last.computed is not None
    assert isinstance(coarse.forward, float) and isinstance(coarse.averaged, float) and coarse.forward < coarse.averaged
    step()
    assert len(ended) == 2, "and after every step from then on"


def test_an_observer_sees_every_step_in_full_also_while_after_step_waits() -> None:
    ended: list[StepMarks] = []
    model, watcher = Owned(ended), Watcher()
    model.average_after(model.heads.left.weight)
    model.timer.call_after(3)
    model(torch.ones(1, 2))[0].sum().backward()
    output = model(torch.ones(1, 2))[0].sum()
    model.timer.observers.append(watcher)  # between a forward and its backward
    output.backward()
    assert watcher.events == ["step"] and not ended
    model(torch.ones(1, 2))[0].sum().backward()
    assert watcher.events == ["step", "forward True", "gradient True", "step"] and len(ended) == 1


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


def test_the_end_of_each_stage_is_marked_also_of_one_without_works() -> None:
    timer, work = StepTimer(HostClock()), dist.Work()
    with timer.bucket_timing():
        timer.forward_begins()
        step = timer._current
        assert step is not None
        stage_over, flat_over = timer.mark_bucket(0), timer.mark_bucket(1)
        assert stage_over is not None and flat_over is not None
        stage_over([work], False)
        flat_over([work], True)
        stage_over([], False)  # the share was empty
        assert [index for index, _, _ in step.buckets] == [1], "a bucket is there when it is over"
        stage_over([work], True)
    (_, _, one), (index, _, three) = step.buckets
    assert index == 0 and len(one) == 1 and len(three) == 3
    assert three[0] == three[1] and float(str(three[1])) <= float(str(three[2]))


def test_a_bucket_of_which_nothing_is_sent_has_no_end() -> None:
    timer = StepTimer(HostClock())
    with timer.bucket_timing():
        timer.forward_begins()
        stage_over = timer.mark_bucket(0)
        assert stage_over is not None and timer._current is not None
        stage_over([], True)
        assert timer._current.buckets == []


def test_stages_wait_for_the_one_before_and_for_their_turn() -> None:
    """Two two-level buckets and a flat one on one lane, and one more on another."""
    kinds = ("dense@nodes", "int8@nodes", "dense", "dense@nodes")
    plan = Plan(tuple(Bucket((str(number),), number // 3, kind) for number, kind in enumerate(kinds)))
    ends = [[3.0, 5.0, 6.0], [4.0, 8.0, 8.5], [9.0], [3.0, 4.0, 5.0]]
    launches = (1.0, 2.0, 2.5, 2.5)
    step = StepMarks(0.0, 0.0, 3.0, 10.0, [(i, launches[i], list[object](ends[i])) for i in (3, 0, 2, 1)])
    spans = timeline_of(step, plan, HostClock()).communication
    assert [(span.track, span.start_s, span.end_s) for span in spans] == [
        ("inside 0", 1.0, 3.0),
        ("lane 0", 3.0, 5.0),
        ("inside 0", 5.0, 6.0),
        ("inside 0", 3.0, 4.0),
        ("lane 0", 5.0, 8.0),
        ("inside 0", 8.0, 8.5),
        ("lane 0", 8.0, 9.0),
        ("inside 1", 2.5, 3.0),
        ("lane 1", 3.0, 4.0),
        ("inside 1", 4.0, 5.0),
    ]
    assert [span.name.rpartition(", ")[2] for span in spans if span.track == "inside 1"] == ["scatter", "gather"]


def test_frozen_parameters_are_not_timed_and_an_error_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    timer = StepTimer(HostClock())
    with timer.attached(model), timer.gradient_timing(dict(model.named_parameters())):
        model(torch.ones(1, 2)).sum().backward()
    assert set(timer.last_steps(1)[0].ready) == {"1.weight", "1.bias"}
    not_a_leaf = {**dict(model[1].named_parameters()), "sum": torch.ones(1, requires_grad=True) * 2}
    with pytest.raises(RuntimeError), timer.gradient_timing(not_a_leaf):  # type: ignore[arg-type]
        raise AssertionError("not entered")
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
