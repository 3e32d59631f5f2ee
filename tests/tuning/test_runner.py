"""The plan runner: plans take effect between steps only, never on a changed model, and states load before steps."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch import Bucket, DisagreementError, Plan
from anabranch.exchange.bucket_launcher import BucketLauncher
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.dense import DenseExchanges
from anabranch.tuning.runner import PlanRunner
from exchange.fake_exchanges import EighthsExchanges, RecordingResiduals
from ranks import on_ranks

BOTH = Plan((Bucket(("weight", "bias")),))
APART = Plan((Bucket(("weight",)), Bucket(("bias",), 1)))


class FakeLayout:
    """A layout that builds nothing and keeps its calls; it may change only before averaged forwards."""

    default_label = "its own buckets"

    def __init__(self, default_plan: Plan | None = None) -> None:
        self.default_plan = default_plan
        self.module = nn.Linear(2, 2)
        self.rebuildable = True
        self.calls: list[str] = []

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def report_averaged(self, callback: Callable[[], None]) -> None:
        self.on_averaged = callback

    def can_rebuild(self) -> bool:
        return self.rebuildable

    def may_change(self, averaged: bool) -> bool:
        return averaged

    def before_forward(self) -> None:
        self.calls.append("before_forward")

    def use(self, launcher: BucketLauncher | None) -> None:
        self.calls.append(f"use {None if launcher is None else len(launcher.plan)}")

    def close(self) -> None:
        self.calls.append("close")


class Rig:
    """A runner of a fake layout, on the process group of the test."""

    def __init__(self, default_plan: Plan | None = None) -> None:
        assert dist.group.WORLD is not None
        self.residuals = RecordingResiduals()
        collectives = Collectives(EighthsExchanges(), DenseExchanges(), residuals=self.residuals)
        self.layout = FakeLayout(default_plan)
        self.runner = PlanRunner(self.layout, dist.group.WORLD, collectives, lambda: None)

    def calls(self) -> list[str]:
        """The calls since the last time."""
        calls = self.layout.calls
        self.layout.calls = []
        return calls


def changes() -> None:
    """A plan takes effect between two steps."""
    rig = Rig()
    runner = rig.runner
    assert (runner.plan, runner.plan_in_force, runner.launcher, rig.calls()) == (None, None, None, [])
    runner.use_plan(APART)
    assert (runner.plan, runner.plan_in_force, runner.launcher) == (APART, None, None), "not before the next step"
    assert len(runner.lanes) == 2 and rig.residuals.calls == ["use_plan 2"]
    runner.before_forward(averaged=False)
    assert runner.plan_in_force is None and rig.calls() == ["before_forward"], "the layout may refuse"
    runner.before_forward(averaged=True)
    assert runner.plan_in_force == runner.plan == APART and rig.calls() == ["before_forward", "use 2"]
    first = runner.launcher
    assert first is not None and first.plan == APART
    first.divisor = lambda: 1
    runner.before_forward(averaged=True)
    assert runner.launcher is first and first.divisor is None, "a divisor is for one step"
    runner.use_plan(APART)
    runner.before_forward(averaged=True)
    assert runner.launcher is first and "use 2" not in rig.calls(), "the same plan is not built again"
    runner.use_plan(BOTH)
    runner.use_plan(None)
    assert runner.plan is None and runner.plan_in_force == APART, "the last request counts"
    runner.before_forward(averaged=True)
    assert runner.launcher is None and rig.calls()[-1] == "use None"
    runner.close()
    assert rig.layout.calls == ["close"] and rig.residuals.calls[-1] == "close" and len(runner.lanes) == 0


def defaults() -> None:
    """A layout with a default plan runs it from the start."""
    rig = Rig(default_plan=BOTH)
    runner = rig.runner
    assert rig.calls() == ["use 1"] and runner.launcher is not None and runner.launcher.plan == BOTH
    assert runner.plan is None and runner.plan_in_force is None, "these are the layout's own buckets"
    runner.use_plan(APART)
    runner.before_forward(averaged=True)
    runner.use_plan(None)
    runner.before_forward(averaged=True)
    assert [call for call in rig.calls() if call.startswith("use")] == ["use 2", "use 1"]
    runner.use_plan(BOTH)
    runner.before_forward(averaged=True)
    assert runner.plan_in_force == BOTH and "use 1" not in rig.calls(), "the same buckets, now as a plan"
    runner.close()


def frozen() -> None:
    """Parameters that were frozen do not keep buckets from changing."""
    rig = Rig()
    runner = rig.runner
    runner.use_plan(BOTH)
    rig.layout.rebuildable = False
    runner.before_forward(averaged=True)
    assert runner.stale and runner.plan_in_force is None
    assert rig.calls() == ["before_forward"], "buckets stay"
    rig.layout.rebuildable = True
    rig.layout.module.bias.requires_grad_(False)
    runner.use_plan(BOTH)
    runner.before_forward(averaged=True)
    assert runner.plan_in_force == BOTH, "other ranks change, too, and may not have frozen it"
    assert not runner.trains_the_same()
    rig.layout.module.bias.requires_grad_(True)
    assert runner.trains_the_same()
    rig.layout.module.weight = nn.Parameter(torch.zeros(2, 2))
    assert not runner.trains_the_same(), "another parameter of the same name"
    runner.close()


def states(rank: int) -> str:
    """States load before the first step, on every rank alike."""
    rig = Rig()
    rig.runner.load("a checkpoint")
    assert rig.residuals.states == ["a checkpoint"]
    rig.runner.check_loaded()
    rig.runner.check_loaded()  # only the first compares
    with pytest.raises(RuntimeError, match=r"load_comm_state_dict\(\) after steps were made: load before the first"):
        rig.runner.load("another")
    assert rig.residuals.states == ["a checkpoint"]
    rig.runner.close()
    other = Rig()
    if rank == 1:
        other.runner.load("only here")
    with pytest.raises(DisagreementError) as caught:
        other.runner.check_loaded()
    with pytest.raises(DisagreementError):  # a program that goes on does not get past it
        other.runner.check_loaded()
    other.runner.close()
    return str(caught.value)


def first_bucket(rank: int) -> str:
    """The launcher compares what ranks have loaded before the first bucket of the first planned step."""
    rig = Rig()
    rig.runner.use_plan(BOTH)
    rig.runner.before_forward(averaged=True)
    rig.runner.load(f"of rank {rank}")
    assert rig.runner.launcher is not None
    buffer = torch.full((6,), float(rank))
    with pytest.raises(DisagreementError) as caught:
        rig.runner.launcher.launch(0, buffer)
    rig.runner.close()
    assert buffer.tolist() == [rank] * 6, "nothing was exchanged"
    return str(caught.value)


def every_scenario(rank: int) -> list[str]:
    changes()
    defaults()
    frozen()
    return [states(rank), first_bucket(rank)]


def test_plans_change_between_steps_and_states_load_before_the_first() -> None:
    answers = on_ranks(every_scenario, 2)
    for disagreed, in_first_bucket in answers:
        assert disagreed == answers[0][0] and "ranks 1 differ from rank 0" in disagreed
        assert "load_comm_state_dict()" in disagreed
        assert "rank 0 has 'of rank 0' (item 0), rank 1 has 'of rank 1' (item 0)" in in_first_bucket
