"""The comm hook that runs a plan: each bucket's collective and lane, the divisor, the marks, what follows the last."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch import Bucket, Plan
from anabranch.ddp.layout import PlanHook
from anabranch.ddp.reducer import Reduction, reduced_parameters, relayout
from anabranch.exchange.bucket_launcher import BucketLauncher
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.dense import DenseExchanges
from anabranch.exchange.lanes import Lane, Lanes
from anabranch.exchange.quantised.exchange import QuantisedExchanges
from anabranch.observe.clock import HostClock
from anabranch.observe.step_timer import StepTimer
from parallel.twins import WIDTH, batch, bits
from ranks import cases_on_ranks, on_ranks

CPU = torch.device("cpu")
PLAN = Plan(
    (Bucket(("2.bias", "0.weight"), 1, "bf16"), Bucket(("1.weight", "1.bias"), 0), Bucket(("2.weight", "0.bias"), 2))
)


class Rig:
    """A DDP of three layers that runs PLAN, and one that is left alone."""

    def __init__(self, **options: Any) -> None:
        self.models = []
        for _ in range(2):
            torch.manual_seed(7)
            module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
            self.models.append(DistributedDataParallel(module, **options))
        assert dist.group.WORLD is not None
        self.lanes = Lanes(dist.group.WORLD, CPU)
        self.lanes.grow(PLAN.lanes)
        self.after: list[int] = []
        self.steps = 0
        self.timer = StepTimer(HostClock(), self.count)
        collectives = Collectives(QuantisedExchanges(), DenseExchanges())
        numels = {name: parameter.numel() for name, parameter in self.models[1].module.named_parameters()}
        self.launcher = BucketLauncher(PLAN, self.lanes, collectives, numels, self.timer.mark_bucket)
        hook = PlanHook(self.launcher, self.after_last)
        ours = self.models[1]
        relayout(ours, PLAN.indices(list(reduced_parameters(ours))), hook.run)

    def count(self) -> None:
        self.steps += 1

    def after_last(self, lane: Lane) -> None:
        self.after.append(self.steps)
        assert lane is self.lanes[0]

    def train(self, step: int) -> dict[str, list[torch.Tensor]]:
        """Gradients by parameter: DDP's and ours."""
        for model in self.models:
            model.zero_grad()
            if model is self.models[1]:
                self.timer.forward_begins()
            output = model(batch(step))
            if model is self.models[1]:
                self.timer.forward_ended(output)
                self.reduction = Reduction(model, self.timer.gradients_averaged)
            output.square().mean().backward()
        theirs, ours = (dict(model.module.named_parameters()) for model in self.models)
        return {name: [p.grad, ours[name].grad] for name, p in theirs.items() if p.grad is not None}


def each_bucket_by_its_own(rank: int, options: dict[str, Any]) -> list[list[str]]:
    """Which gradients are not DDP's to the last bit, step by step, the first included."""
    rig = Rig(**options)
    apart = []
    for step in range(4):
        gradients = rig.train(step)
        apart.append(sorted(name for name, (a, b) in gradients.items() if bits(a) != bits(b)))
        for name in apart[-1]:
            torch.testing.assert_close(gradients[name][1], gradients[name][0], rtol=0.02, atol=1e-3)
    assert rig.after == [0, 1, 2, 3], "once per step, within it"
    rig.lanes.close()
    return apart


def test_each_bucket_is_exchanged_by_its_own_collective() -> None:
    names = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")
    options: list[dict[str, Any]] = [{}, *({name: True} for name in names)]
    for name, answers in cases_on_ranks({str(one): (each_bucket_by_its_own, one) for one in options}, 2).items():
        assert answers == [[["0.weight", "2.bias"]] * 4] * 2, f"{name}: only what bfloat16 has rounded"


def divisor(rank: int) -> list[float]:
    rig = Rig()
    before = rig.train(0)["1.weight"][1].clone()
    rig.launcher.divisor = lambda: 4
    after = rig.train(0)["1.weight"][1]
    ratio = (before / after).flatten()
    rig.lanes.close()
    return [float(ratio.min()), float(ratio.max())]


def test_divisor() -> None:
    for low, high in on_ranks(divisor, 2):
        assert low == high == 2.0


def marks(rank: int) -> dict[str, Any]:
    """Buckets are marked while they are timed, between the launch and the end of the step."""
    rig = Rig()
    rig.train(0)
    not_timed = [list(step.buckets) for step in rig.timer.last_steps(1)]
    with rig.timer.bucket_timing():
        rig.train(1)
    (step,) = rig.timer.last_steps(1)
    rig.train(2)
    inside = all(
        isinstance(begin, float) and isinstance(end, float) and step.backward <= begin <= end <= step.averaged  # type: ignore[operator]
        for _, begin, (end,) in step.buckets
    )
    answer = {
        "not_timed": not_timed,
        "indices": sorted(index for index, _, _ in step.buckets),
        "inside": inside,
        "after": [list(last.buckets) for last in rig.timer.last_steps(1)],
        "steps": rig.steps,
    }
    rig.timer.forget_steps()
    answer["forgotten"] = rig.timer.last_steps(9)
    rig.lanes.close()
    return answer


def test_buckets_are_marked_only_while_they_are_timed() -> None:
    for answer in on_ranks(marks, 2):
        assert answer["not_timed"] == answer["after"] == [[]]
        assert answer["indices"] == [0, 1, 2]
        assert answer["inside"]
        assert answer["steps"] == 3 and answer["forgotten"] == []


def broken(rank: int) -> str:
    """What fails in the hook leaves backward() as it is."""
    rig = Rig()
    rig.train(0)
    rig.launcher.divisor = lambda: 1 // 0
    try:
        rig.train(1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_in_the_hook_leaves_backward() -> None:
    for message in on_ranks(broken, 2):
        assert message.startswith("ZeroDivisionError")
