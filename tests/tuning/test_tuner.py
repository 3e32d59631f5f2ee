"""The tuner: the stages it goes through, what explain() shows in each, and the nouns that it leaves."""

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from anabranch import Bucket, Curve, DataParallel, Network, Plan, simulate
from anabranch.ddp.reducer import reduced_parameters
from anabranch.tuning import search
from anabranch.tuning.comparison import Comparison, Verdict
from anabranch.tuning.live_trials import LiveTrials
from anabranch.tuning.trial import PRICE_OF_FIDELITY, StepTimes, Trial, allowed_loss
from ddp.inspection import layout_in_force
from parallel.twins import (
    SCENARIOS,
    Feature,
    dtypes_of,
    mlp,
    plain_train,
    ring,
    scatter,
    scattered,
    stage_of,
    steps,
    twins,
)
from ranks import on_ranks

RUNNING = "anabranch: running"


def tuned_run(rank: int, scenario: str) -> dict[str, Any]:
    """The stages after every step, until it has decided; checks that its nouns always fit each other."""
    stages: list[str] = []
    _, model = twins(Feature(), scenario)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps(model, 1):
        plain_train(model, optimizer, step)
        stages.append(stage_of(model))
        _check_nouns(model)
    stock = layout_in_force(model)
    return {
        "stages": list(dict.fromkeys(stages)),
        "explained": model.explain(),
        "plan": model.plan.fingerprint if model.plan is not None else None,
        "layout": stock,
        "planned": model.plan.indices(list(reduced_parameters(model))) if model.plan is not None else None,
        "trace": [t.name for t in model.trace.tensors] if model.trace is not None else [],
        "network": model.network.world_size if model.network is not None else 0,
        "lanes": Counter(span.track for span in model.timeline.spans) if model.timeline is not None else {},
    }


def _check_nouns(model: DataParallel) -> None:
    if model.trace is not None:
        names = {name for name, p in model.module.named_parameters() if p.requires_grad}
        assert {tensor.name for tensor in model.trace.tensors} == names
        assert all(tensor.numel == model.module.get_parameter(tensor.name).numel() for tensor in model.trace.tensors)
        assert model.trace.meta["model"] == "Sequential"
        if model.plan is not None:
            model.plan.check(model.trace)
            assert model.network is not None
            assert simulate(model.trace, model.plan, model.network).exposed_s >= 0
    if model.timeline is not None:
        assert model.timeline.meta["source"] == "measured"
        assert model.timeline.exposed_s >= 0
        assert {span.name for span in model.timeline.compute} == {"forward", "backward"}
        assert all(span.track in ("lane 0", "lane 1") for span in model.timeline.communication)


def test_keeps_the_plan() -> None:
    answers = on_ranks(tuned_run, 2, "keeps the plan")
    for answer in answers:
        stages = " ".join(answer["stages"])
        assert re.search("settling.*profiling.*planning.*trying scattered.*running", stages)
        assert answer["plan"] is not None and answer["plan"] == answers[0]["plan"]
        assert answer["layout"] == answer["planned"]
        assert answer["network"] == 2
        assert answer["trace"] == answers[0]["trace"]
        assert set(answer["lanes"]) > {"compute"}


def test_goes_back() -> None:
    for answer in on_ranks(tuned_run, 2, "goes back"):
        assert "no plan was clearly faster" in answer["explained"].splitlines()[0]
        assert answer["plan"] is None
        assert answer["layout"] == [[5, 4, 3, 2, 1, 0]], "DDP's own bucket, in the order of backward"
        assert set(answer["lanes"]) == {"compute", "lane 0"}


@pytest.mark.parametrize("scenario", ["keeps the plan", "goes back"])
def test_explains_prediction_and_measurement_of_every_layout(scenario: str) -> None:
    explained = on_ranks(tuned_run, 2, scenario)[0]["explained"]
    head = next(line for line in explained.splitlines() if "predicted" in line)
    assert "measured" in head and "exposed" in head
    rows = explained.splitlines()[explained.splitlines().index(head) + 1 :]
    tried = [row for row in rows if re.search(r"\d+\.\d\d ms +\d+\.\d\d ms", row)]
    assert any("DDP's own buckets" in row for row in tried)
    assert any("scattered" in row for row in tried)
    assert sum(row.startswith("*") for row in tried) == 1
    assert "Network: 2 ranks" in explained and "Model: 6 gradients" in explained


def faithful_run(rank: int) -> dict[str, Any]:
    """An int8 plan wins, and the same plan dense, which is predicted to be a little slower, is tried after it."""
    asked: list[float] = []

    def verdict(self: LiveTrials, found: Comparison, min_gain: float, to_the_end: bool) -> Verdict:
        asked.append(min_gain)
        return "faster"

    LiveTrials._verdict = verdict  # type: ignore[method-assign]
    network = Network(2, {"dense": Curve.linear(1e-3, 1e-9), "int8": Curve.linear(0.995e-3, 1e-9)})
    policy = replace(SCENARIOS["keeps the plan"], min_gain=0.05, min_predicted_gain=-0.001)
    model = DataParallel(mlp(), compress="int8", planner="single", network=network, lanes=1, policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps(model):
        plain_train(model, optimizer, step)
    kinds = {bucket.collective for bucket in model.plan.buckets} if model.plan is not None else set()
    model.close()
    return {"asked": asked, "kinds": kinds}


def test_a_plan_that_is_more_faithful_may_be_a_little_slower() -> None:
    answer = on_ranks(faithful_run, 2)[0]
    assert answer["asked"][0] == 0.05 != answer["asked"][1] and answer["kinds"] == {"dense"}


def test_what_fidelity_may_cost_does_not_add_up_and_never_loses_to_ddp() -> None:
    def trial(step_s: float, kind: str = "int8") -> Trial:
        plan = Plan((Bucket(("a",), collective=kind),)) if kind else None
        return Trial("", plan, (StepTimes(step_s, 0.0, step_s),), ())

    own, fastest, slower = trial(0.2, ""), trial(0.1), trial(0.1005)
    assert allowed_loss(fastest, [own, fastest]) == pytest.approx(-PRICE_OF_FIDELITY)
    # after one such step only the rest of it is left
    assert allowed_loss(slower, [own, fastest, slower]) == pytest.approx(1 - 0.101 / 0.1005)
    assert allowed_loss(fastest, [trial(0.1004, ""), fastest]) == pytest.approx(-0.004)
    assert allowed_loss(fastest, [fastest]) == pytest.approx(-PRICE_OF_FIDELITY)


def doubtful_run(rank: int, again: Verdict) -> dict[str, Any]:
    """One pair of blocks decides for a plan whose gain nobody had predicted; later it is tried once more."""
    verdicts: Iterator[Verdict] = iter(["faster", again])
    LiveTrials._verdict = lambda self, found, min_gain, to_the_end: next(verdicts)  # type: ignore[method-assign]
    search.simulated_gain = lambda *_: math.inf  # type: ignore[attr-defined]
    _, model = twins(Feature(), "keeps the plan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = ""
    for step in steps(model, 1):
        plain_train(model, optimizer, step)
        first = first or (model.explain() if model.plan is not None and stage_of(model).startswith(RUNNING) else "")
    for step in range(30):
        plain_train(model, optimizer, step)
    return {"first": first, "then": model.explain(), "left": next(verdicts, None)}


@pytest.mark.parametrize(("again", "outcome"), [("faster", "running scattered"), ("not faster", "did not win again")])
def test_a_doubtful_win_must_be_won_again(again: Verdict, outcome: str) -> None:
    for answer in on_ranks(doubtful_run, 2, again):
        assert "running scattered" in answer["first"].splitlines()[0]
        assert outcome in answer["then"].splitlines()[0]
        assert answer["left"] is None, "both verdicts were asked for"


def given_plan(rank: int) -> dict[str, Any]:
    answer = tuned_run(rank, "is given the plan")
    return {"stages": answer["stages"], "same": answer["layout"] == answer["planned"], "explained": answer["explained"]}


def test_runs_the_plan_it_is_given() -> None:
    for answer in on_ranks(given_plan, 2):
        assert answer["stages"][-1].startswith("anabranch: running the plan it was given")
        assert answer["same"]


def measured(rank: int) -> dict[str, Any]:
    """Without a network it measures one, lanes included, and everyone holds the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the network's costs vary")
        model = DataParallel(mlp(), profile_steps=2, lanes=2, compress="bf16", policy=SCENARIOS["keeps the plan"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in steps(model):
            plain_train(model, optimizer, step)
    network = model.network
    assert network is not None
    assert model.trace is not None
    return {
        "curves": sorted(network.curves),
        "seconds": [network.seconds("dense", 1 << k) for k in range(8, 20)],
        "slowdown": network.contention.slowdown(2),
        "stage": stage_of(model),
        "ready": [tensor.ready_s for tensor in model.trace.tensors],
        "plan": model.plan.fingerprint if model.plan is not None else None,
    }


def test_measures_the_network_if_none_is_given() -> None:
    answers = on_ranks(measured, 2)
    for answer in answers:
        assert answer == answers[0], "trace, network and plan are the same on every rank, to the last bit"
        assert answer["curves"] == ["bf16", "dense"]
        assert answer["plan"] is not None
        assert all(seconds > 0 for seconds in answer["seconds"])


def lanes_tried(rank: int, start_s: float, s_per_byte: float, eta: float) -> list[int]:
    """How many lanes the plans have that are tried on such a network; 0 for DDP's own buckets."""
    given = Network.ring(2, start_s, s_per_byte, eta=eta)
    model = DataParallel(
        nn.Sequential(*(nn.Linear(50, 50) for _ in range(6))),
        profile_steps=2,
        network=given,
        policy=SCENARIOS["keeps the plan"],
    )
    tried = set()
    for step in steps(model):
        model.zero_grad()
        model(torch.ones(2, 50) * step).sum().backward()
        tried.add(model.plan.lanes if model.plan is not None else 0)
    return sorted(tried)


def test_lanes_are_tried_where_they_are_predicted_to_pay() -> None:
    assert on_ranks(lanes_tried, 2, 1e-3, 1e-7, 0.0) == [[0, 1, 2], [0, 1, 2]]


def test_lanes_are_not_tried_on_a_link_that_one_message_fills() -> None:
    assert on_ranks(lanes_tried, 2, 1e-7, 1e-6, 1.0) == [[0, 1], [0, 1]]


def drift(rank: int) -> list[str]:
    """Steps become much slower on rank 0 only, by its own clock: everyone plans again."""
    stages: list[str] = []
    policy = replace(SCENARIOS["keeps the plan"], max_drift=0.9, drift_check_steps=5)
    _, model = twins(Feature(Sleepy, ours={"policy": policy}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    slow_from = None
    for step in range(200):
        plain_train(model, optimizer, step)
        if stage_of(model) not in stages[-1:]:
            stages.append(stage_of(model))
        if slow_from is None and "running" in stages[-1]:
            slow_from = step + 40  # after a doubtful win was repeated
        if slow_from is not None and step == slow_from and rank == 0:
            model.module.pause_s = 0.3
        if slow_from is not None and step > slow_from and "profiling" in stages[-1]:
            break
    return stages


class Sleepy(nn.Module):
    """Sleeps as long as a test says."""

    pause_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(self.pause_s)
        result: torch.Tensor = self.layers(x)
        return result


def test_drift_on_rank_0_makes_everyone_plan_again() -> None:
    for stages in on_ranks(drift, 2):
        assert sum("profiling" in line for line in stages) >= 2
        assert "profiling" in stages[-1]


def frozen(rank: int) -> str:
    """A layer frozen before there is a plan: DDP's buckets stay, and it says why."""
    model = DataParallel(
        mlp(),
        planner=scattered,
        network=ring(),
        profile_steps=2,
        find_unused_parameters=True,
        policy=SCENARIOS["keeps the plan"],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(12):
        if step == 1:
            model.module[0].requires_grad_(False)
        plain_train(model, optimizer, step)
    assert model.plan is None
    return stage_of(model)


def test_frozen_before_there_is_a_plan() -> None:
    assert all(
        "no longer planning: parameters were frozen, unfrozen or replaced" in stages for stages in on_ranks(frozen, 2)
    )


def held_at_once(rank: int) -> list[object]:
    plan = scatter(dtypes_of(mlp()))
    model = DataParallel(mlp(), plan=plan, profile_steps=0)
    model.hold()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        plain_train(model, optimizer, step)
    answer = [model.plan == plan, stage_of(model)]
    model.close()
    return answer


def test_hold_keeps_a_plan_that_was_given() -> None:
    assert on_ranks(held_at_once, 2) == [[True, "anabranch: running the plan it was given, held."]] * 2
