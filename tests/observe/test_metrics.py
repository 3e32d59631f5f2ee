"""Metrics of live steps: their values, when loggers get them, and that a failing logger does no harm."""

import gc
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from anabranch import DataParallel, JsonLines, Lean, Metrics, OkTopk
from anabranch.observe.clock import HostClock
from anabranch.observe.metrics import MetricsFeed
from anabranch.observe.step_timer import StepContext, StepMarks, StepTimer
from parallel.given_gradients import fresh, one_step, two_buckets
from parallel.twins import SCENARIOS, batch, mlp, plain_train, ring, scattered, sgd, steps
from ranks import on_ranks

MLP_NBYTES = 4 * 3 * (6 * 6 + 6)


class KeepingLogger:
    """A logger that keeps the metrics it gets."""

    def __init__(self) -> None:
        self.logged: list[Metrics] = []
        self.closed = 0

    def log(self, metrics: Metrics) -> None:
        self.logged.append(metrics)

    def close(self) -> None:
        self.closed += 1


class FailingLogger(KeepingLogger):
    """One whose disk is full."""

    def log(self, metrics: Metrics) -> None:
        super().log(metrics)
        raise OSError("no space left on device")


def whole_life(rank: int, folder: str) -> dict[str, Any]:
    """All stages to a plan that is kept, logged to a file, to a list, and to a logger that fails."""
    torch.manual_seed(7)
    kept, broken, others = KeepingLogger(), FailingLogger(), KeepingLogger()
    model = DataParallel(mlp(), planner=scattered, network=ring(), profile_steps=2, policy=SCENARIOS["keeps the plan"])
    model.log_to(JsonLines(Path(folder, "run.jsonl")), broken, kept)
    model.log_to(others, every_rank=True)
    optimizer, made = sgd(model), 0
    for step in steps(model):
        plain_train(model, optimizer, step)
        made += 1
    plan = model.plan
    assert plan is not None
    model.close()
    return {
        "steps": made,
        "logged": [asdict(one) for one in kept.logged],
        "own": [asdict(one) for one in others.logged],
        "broken": len(broken.logged),
        "closed": [kept.closed, broken.closed, others.closed],
        "plan": [plan.fingerprint[:12], len(plan), plan.lanes],
    }


def check_sane(one: dict[str, Any]) -> None:
    """Whatever the layout."""
    assert one["measured_s"] > 0 and one["compute_s"] > 0 and one["exposed_s"] >= 0
    assert one["measured_s"] == pytest.approx(one["compute_s"] + one["exposed_s"])
    assert one["overlap"] is None or 0 <= one["overlap"] <= 1
    assert one["predicted_s"] is None or one["predicted_s"] > 0


def test_every_step_of_a_whole_life(tmp_path: Path) -> None:
    first, second = on_ranks(whole_life, 2, str(tmp_path))
    logged = first["logged"]
    assert [one["step"] for one in logged] == list(range(1, first["steps"] + 1))
    for one in [*logged, *first["own"], *second["own"]]:
        check_sane(one)
        assert one["sent_nbytes"] == one["received_nbytes"] == MLP_NBYTES, "2(P−1)/P of all gradients, P = 2"
        assert one["density"] == 1.0
    assert logged[0]["plan"] is None and logged[0]["overlap"] is None and logged[0]["predicted_s"] is None
    assert logged[0]["stage"] == "settling"
    last = logged[-1]
    assert [last["plan"], last["buckets"], last["lanes"]] == first["plan"]
    assert last["overlap"] is not None and last["predicted_s"] is not None and "running" in last["stage"]
    assert second["logged"] == [] and [one["rank"] for one in second["own"]] == [1] * second["steps"]
    assert first["broken"] == 1, "a logger that fails is asked no more"
    assert first["closed"] == [1, 0, 1]
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == logged


def sparse_steps(rank: int) -> list[dict[str, Any]]:
    """A plan with one sparse bucket and one dense."""
    kept = KeepingLogger()
    model, parallel = fresh(two_buckets(0.1))
    parallel.log_to(kept, every_rank=True)
    for step in range(6):
        one_step(model, parallel, step, rank)
    parallel.close()
    return [asdict(one) for one in kept.logged]


def test_sparse_steps_report_density_and_bytes() -> None:
    for logged in on_ranks(sparse_steps, 2):
        assert len(logged) == 6
        for one in logged:
            check_sane(one)
            # 2000 elements at 10 %, of which at most twice as many may pass, and 25 dense ones.
            assert 25 / 2025 < one["density"] <= (400 + 25) / 2025
            assert 100 < one["sent_nbytes"] <= 100 + (400 + 400) * 8 // 2
            assert one["overlap"] is not None
        exact = logged[0]  # the first step's thresholds are exact: k = 200 values are applied
        assert exact["density"] == pytest.approx((200 + 25) / 2025, rel=0.02)


def lean_steps(rank: int) -> list[int | None]:
    """The other wrapper has it, too; and one that was closed says so."""
    kept, norms = KeepingLogger(), []
    memory = Lean(optimizer=lambda params: torch.optim.SGD(params, lr=0.1), clip_norm=0.1)
    model: Any = DataParallel(mlp(), memory=memory, profile_steps=0)
    model.log_to(kept)
    for step in range(3):
        (model(batch(step)).square().mean() * (math.inf if step == 2 else 1.0)).backward()
        norms.append(float(model.grad_norm) if step < 2 else None)
    model.close()
    assert not kept.logged or [one.grad_norm for one in kept.logged] == norms
    with pytest.raises(RuntimeError, match="closed"):
        model.log_to(kept)
    return [one.sent_nbytes for one in kept.logged]


def test_lean_models_log_too() -> None:
    assert on_ranks(lean_steps, 2) == [[MLP_NBYTES] * 3, []]


def dropped(rank: int) -> list[int]:
    """A model that is never closed."""
    kept = KeepingLogger()
    model = DataParallel(mlp(), network=ring(), profile_steps=2)
    model.log_to(kept)
    plain_train(model, sgd(model), 0)
    model.trace_steps(2, 3, "never.json")
    module = model.module
    del model
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    return [len(kept.logged), kept.closed]


def test_a_model_that_is_dropped_closes_its_loggers() -> None:
    assert on_ranks(dropped, 2) == [[1, 1], [0, 0]]


class ClosingLogger(KeepingLogger):
    """One that ends the training, as a logger that has seen enough would."""

    def __init__(self, model: DataParallel, last: int) -> None:
        super().__init__()
        self.model = model
        self.last = last

    def log(self, metrics: Metrics) -> None:
        super().log(metrics)
        if metrics.step == self.last:
            self.model.close()


def closed_by_a_logger(rank: int, last: int) -> dict[str, Any]:
    model = DataParallel(mlp(), planner=scattered, network=ring(), profile_steps=2, policy=SCENARIOS["keeps the plan"])
    before, behind, apart = KeepingLogger(), KeepingLogger(), KeepingLogger()
    model.log_to(before, ClosingLogger(model, last), behind, every_rank=True)
    model.log_to(apart, every_rank=True)
    optimizer = sgd(model)
    for step in range(last):
        plain_train(model, optimizer, step)
    with pytest.raises(RuntimeError, match="closed: wrap the module again"):
        plain_train(model, optimizer, last)
    loggers = (before, behind, apart)
    return {"logged": [len(one.logged) for one in loggers], "closed": [one.closed for one in loggers]}


@pytest.mark.parametrize("last", [1, 4, 9])
def test_a_logger_may_close_the_model(last: int) -> None:
    for answer in on_ranks(closed_by_a_logger, 2, last):
        assert answer == {"logged": [last, last - 1, last - 1], "closed": [1, 1, 1]}


def alone(rank: int) -> int:
    """One rank has nothing to show, and that is no error."""
    kept = KeepingLogger()
    model = DataParallel(mlp(), compress=OkTopk())
    model.log_to(kept)
    model.trace_steps(1, 2, "nowhere/trace.json")
    plain_train(model, sgd(model), 0)
    model.close()
    return len(kept.logged)


def test_one_rank_has_nothing_to_show() -> None:
    assert on_ranks(alone, 1) == [0]


class LateClock(HostClock):
    """Like a GPU's: a mark has a time some steps later."""

    def __init__(self) -> None:
        self.now = 0.0

    def settled(self, mark: object) -> bool:
        return isinstance(mark, float) and mark <= self.now


def test_a_step_is_logged_when_its_marks_have_settled() -> None:
    clock, kept = LateClock(), KeepingLogger()
    now = StepContext(1, None, "settling", None, None)
    parameters = {"a": nn.Parameter(torch.zeros(8))}
    feed = MetricsFeed([kept], StepTimer(clock), lambda: now, lambda *_: None, parameters, rank=0, ranks=4)
    feed.on_step_end(StepMarks(1.0, 2.0, 3.0, 4.0))
    now = replace(now, number=2, stage="profiling")
    feed.on_step_end(StepMarks(5.0, 6.0, 7.0, 9.0))
    assert kept.logged == []
    clock.now = 8.0
    now = replace(now, number=3)
    feed.on_step_end(StepMarks(10.0, 11.0, 12.0, 13.0))
    assert [(one.step, one.stage) for one in kept.logged] == [(1, "settling")], "as it was in that step"
    clock.now = 9.5
    feed.close()
    assert [(one.step, one.measured_s, one.compute_s, one.exposed_s) for one in kept.logged] == [
        (1, 3.0, 2.0, 1.0),
        (2, 4.0, 2.0, 2.0),
    ]
    assert kept.logged[0].sent_nbytes == 2 * 3 * 32 // 4
    assert kept.closed == 1


@pytest.mark.parametrize("logger", [None, "run.jsonl", JsonLines])
def test_what_is_no_logger_is_refused_at_once(logger: Any) -> None:
    with pytest.raises(ValueError, match="expected loggers with log"):
        DataParallel.log_to(SimpleNamespace(), logger)  # type: ignore[arg-type]  # before it uses self
