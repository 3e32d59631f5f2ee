"""The tuner: the stages it goes through, what explain() shows in each, and the nouns that it leaves."""

import re
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from anabranch import Curve, DataParallel, Network, simulate
from anabranch.ddp.reducer import reduced_parameters
from anabranch.tuning.decisions import Comparison, Pairs
from anabranch.tuning.options import TuningPolicy
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
from ranks import cases_on_ranks, on_ranks
from tuning.given_times import give_times, give_windows, note_comparisons

RUNNING = "anabranch: running"
Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def launched() -> Answers:
    """What each scenario that patches nothing returns on each rank, in one launch."""
    scenarios = (tuned_runs, measured, lanes_tried_by_network, frozen, held_at_once)
    return cases_on_ranks({one.__name__: (one,) for one in scenarios}, 2, timeout_s=120.0)


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


def tuned_runs(rank: int) -> dict[str, Any]:
    """Every scenario that forces one outcome."""
    return {name: tuned_run(rank, name) for name in ("keeps the plan", "goes back", "is given the plan")}


def test_a_plan_is_kept_dropped_or_given(launched: Answers) -> None:
    answers = launched["tuned_runs"]
    for answer in answers:
        kept, dropped, given = answer["keeps the plan"], answer["goes back"], answer["is given the plan"]
        assert re.search("settling.*profiling.*planning.*trying scattered.*running", " ".join(kept["stages"]))
        assert kept["plan"] is not None and kept["plan"] == answers[0]["keeps the plan"]["plan"]
        assert kept["layout"] == kept["planned"] and kept["network"] == 2
        assert kept["trace"] == answers[0]["keeps the plan"]["trace"]
        assert set(kept["lanes"]) > {"compute"}
        assert "no plan was clearly faster" in dropped["explained"].splitlines()[0] and dropped["plan"] is None
        assert dropped["layout"] == [[5, 4, 3, 2, 1, 0]], "DDP's own bucket, in the order of backward"
        assert set(dropped["lanes"]) == {"compute", "lane 0"}
        assert given["stages"][-1].startswith("anabranch: running the plan it was given")
        assert given["layout"] == given["planned"]
    for scenario in ("keeps the plan", "goes back"):
        _check_explanation(answers[0][scenario]["explained"])


def _check_explanation(explained: str) -> None:
    """Every layout that was tried has its prediction and its measurement."""
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

    def note(pairs: Pairs, policy: TuningPolicy, found: Comparison) -> Comparison:
        asked.append(policy.min_gain)
        return found._replace(verdict="faster")

    note_comparisons(note)
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


def doubtful_run(rank: int, again_s: float) -> dict[str, Any]:
    """One pair of blocks decides for a plan whose gain nobody had predicted; later it is tried once more."""
    blocks = iter([1e-3])  # of the plan: its first, and then
    give_times(lambda plan: 4e-3 if plan is None else next(blocks, again_s))
    _, model = twins(Feature(ours={"policy": replace(SCENARIOS["keeps the plan"], min_gain=0.01)}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = ""
    for step in steps(model, 1):
        plain_train(model, optimizer, step)
        first = first or (model.explain() if model.plan is not None and stage_of(model).startswith(RUNNING) else "")
    for step in range(40):
        plain_train(model, optimizer, step)
    return {"first": first, "then": model.explain()}


def doubtful_runs(rank: int) -> list[dict[str, Any]]:
    return [doubtful_run(rank, again_s) for again_s in (1e-3, 9e-3)]


def test_a_doubtful_win_must_be_won_again() -> None:
    for answers in on_ranks(doubtful_runs, 2):
        for answer, outcome in zip(answers, ("running scattered", "did not win again"), strict=True):
            assert "running scattered" in answer["first"].splitlines()[0]
            assert outcome in answer["then"].splitlines()[0]


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


def test_measures_the_network_if_none_is_given(launched: Answers) -> None:
    answers = launched["measured"]
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


def lanes_tried_by_network(rank: int) -> list[list[int]]:
    """Where two messages at once pay, however long computing takes, and on a link that one message fills."""
    return [lanes_tried(rank, 0.1, 1e-5, 0.0), lanes_tried(rank, 1e-7, 1e-6, 1.0)]


def test_lanes_are_tried_where_they_are_predicted_to_pay(launched: Answers) -> None:
    assert launched["lanes_tried_by_network"] == [[[0, 1, 2], [0, 1]]] * 2


def drift(rank: int) -> list[str]:
    """Steps become much slower on rank 0 only, by its own clock: everyone plans again."""
    stages: list[str] = []
    policy = replace(SCENARIOS["keeps the plan"], max_drift=0.9, drift_check_steps=5)
    slow_from = 60
    give_windows(lambda: 0.3 if rank == 0 and step >= slow_from else 0.002)
    _, model = twins(Feature(ours={"policy": policy}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(slow_from + 40):
        plain_train(model, optimizer, step)
        if stage_of(model) not in stages[-1:]:
            stages.append(stage_of(model))
    return stages


def test_drift_on_rank_0_makes_everyone_plan_again() -> None:
    for stages in on_ranks(drift, 2):
        (again,) = [line for line in stages if "profiling again" in line]
        assert "steps take 300.0 ms instead of 2.0 ms" in again


def not_worth_it(rank: int) -> list[str]:
    """The first search of a given network is not worth while; a later one is asked for."""
    policy = replace(SCENARIOS["keeps the plan"], min_predicted_gain=0.9, drift_check_steps=2, max_drift=1e9)
    give_times(lambda plan: 1e-3)
    model = DataParallel(mlp(), planner=scattered, network=ring(), profile_steps=2, policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stages = []
    for step in range(40):
        if step == 12:
            give_times(lambda plan: 1e-3, exposed=0.95)
            model.replan()
        plain_train(model, optimizer, step)
        stages.append(stage_of(model))
    model.close()
    return list(dict.fromkeys(stages))


def test_a_network_that_was_given_is_known_in_a_later_search() -> None:
    for stages in on_ranks(not_worth_it, 2):
        assert any("only 50.0% of a step waits for communication" in stage for stage in stages)
        assert "anabranch: planning." in stages


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


def test_frozen_before_there_is_a_plan(launched: Answers) -> None:
    for stages in launched["frozen"]:
        assert "no longer planning: parameters were frozen, unfrozen or replaced" in stages


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


def test_hold_keeps_a_plan_that_was_given(launched: Answers) -> None:
    assert launched["held_at_once"] == [[True, "anabranch: running the plan it was given, held."]] * 2
