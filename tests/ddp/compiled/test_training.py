"""Training compiled models: the weights of DDP, gradients that leave part by part, and how often torch compiles."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import Bucket, Curve, Lean, Network, OkTopk, Plan, Trace
from anabranch import planning as planners
from anabranch.exchange.bucket_launcher import BucketLauncher
from anabranch.tuning.calibration import CalibratedNetwork
from anabranch.tuning.decisions import Comparison, Pairs
from anabranch.tuning.options import TuningPolicy
from anabranch.tuning.search import HELD_EARLY
from anabranch.tuning.trial import Trial
from anabranch.values.kinds.names import kind_of
from ddp.compiled import residual
from ddp.compiled.models import LAYERS, ORDERS, Log, compiled, forget_compiled, furthest, inputs, pair
from observe.trace_events import check_format, of_rank
from parallel.twins import SCENARIOS, ring, steps
from ranks import cases_on_ranks, on_ranks
from tuning.given_times import give_times, note_comparisons


def in_pairs(trace: Trace, network: Network) -> Plan:
    """A bucket for every two layers, in the order in which gradients are ready."""
    return pairs_of([tensor.name for tensor in trace.tensors])


def pairs_of(names: Sequence[str]) -> Plan:
    """The same, for gradients of these names."""
    pairs = [(f"layers.{layer}.", f"layers.{layer - 1}.") for layer in range(LAYERS - 1, 0, -2)]
    groups = [[name for name in names if any(layer in name for layer in pair)] for pair in pairs]
    groups[0] += [name for name in names if "norm" in name]
    return Plan(tuple(Bucket(tuple(group)) for group in groups))


def trained(
    rank: int,
    order: str,
    scenario: str,
    backend: str,
    options: dict[str, Any],
    part_s: float = 0.0,
    decisions: int = 1,
) -> dict[str, Any]:
    """Train beside an eager DDP, until there are so many choices and some steps more."""
    forget_compiled()
    if backend:
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, in inductor
    log = Log(name=backend, part_s=part_s)
    theirs, net = pair()
    defaults = {"planner": in_pairs, "lanes": 1, "profile_steps": 2, "network": ring(), "policy": SCENARIOS[scenario]}
    made, called = compiled(net, order, log, **{**defaults, **options})
    last_ready = net.get_parameter("layers.0.weight")
    early: list[bool] = []  # of each launch of the last step, whether backward had gradients to compute
    launch = BucketLauncher.launch

    def noted(self: BucketLauncher, *given: Any) -> Any:
        early.append(last_ready.grad is None)
        return launch(self, *given)

    BucketLauncher.launch = noted  # type: ignore[method-assign,assignment]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, made)]
    for step in steps(made, decisions):
        log.step = step
        log.events.clear()
        early.clear()
        for model, optimizer in zip((theirs, called), optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs(rank, step)).square().mean().backward()
            optimizer.step()
    return {
        "apart": furthest(theirs, made),
        "compiled": log.compiled,
        "parts": log.parts() if not backend else [],
        "explained": made.explain(),
        "spread": [tensor.ready_s / made.trace.backward_s for tensor in made.trace.tensors],  # type: ignore[union-attr]
        "symbolic": log.symbolic,
        "early": early,
    }


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["keeps the plan", "goes back"])
def test_the_weights_of_ddp_with_one_recompilation(scenario: str) -> None:
    found = cases_on_ranks({order: (trained, order, scenario, "", {}) for order in ORDERS}, 2, timeout_s=120)
    for order, answer in ((order, answer) for order, answers in found.items() for answer in answers):
        assert answer["apart"] < 1e-6, order
        assert not answer["symbolic"], "shapes stay known: code for any shape is slow"
        first = answer["compiled"].count(0)
        assert first == LAYERS, "at first every layer is a part"
        later = set(answer["compiled"]) - {0}
        assert len(later) <= 1, "graphs are compiled once more at most"
        if scenario == "keeps the plan":
            assert later, "the plan needs fewer cuts"
            assert "where buckets end" in answer["explained"]
            assert len(answer["parts"]) == answer["compiled"].count(*later) < LAYERS
        else:
            assert len(answer["parts"]) == LAYERS


def believed(rank: int) -> tuple[str, str]:
    """The label of the trial whose computing predictions were made with last, and what is in force."""
    labels = []
    faster = CalibratedNetwork.trace_under

    def noted(self: CalibratedNetwork, trace: Trace, best: Trial, first: Trial) -> Trace:
        labels.append(best.label)
        return faster(self, trace, best, first)

    CalibratedNetwork.trace_under = noted  # type: ignore[method-assign]
    explained = trained(rank, "compile(DP)", "keeps the plan", "", {})["explained"]
    return labels[-1], explained


@pytest.mark.slow
def test_predictions_are_made_with_the_cuts_in_force() -> None:
    for label, explained in on_ranks(believed, 2):
        assert label == "in_pairs, graphs cut for it"
        assert f"* {label}" in explained


@pytest.mark.slow
def test_later_searches_compile_nothing() -> None:
    for answer in on_ranks(trained, 2, "compile(DP)", "plans again and again", "", {}, 0.0, 4):
        assert answer["apart"] < 1e-6
        assert len(set(answer["compiled"])) == 2, "at first, and once after planning"
        assert "cut where buckets end" in answer["explained"]


def with_equal_times(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Every trial takes as long as every other, so that a cut is not measured to cost anything."""
    give_times(lambda plan: 1e-2)
    return trained(rank, "compile(DP)", "keeps the plan", "", options)


@pytest.mark.slow
def test_a_policy_may_allow_more_versions() -> None:
    dear = {"policy": replace(SCENARIOS["keeps the plan"], cut_share=1e6, recompilations=3)}  # keeps whatever it tries
    for answer in on_ranks(with_equal_times, 2, dear):
        assert answer["apart"] < 1e-6
        first, *again = sorted(set(answer["compiled"]))
        assert first == 0 and 1 <= len(again) <= 3, "DDP has one bucket: its graph may have been compiled before"
        assert 2 <= answer["explained"].count(" cuts computing takes ") <= 3, "which ones depends on times"


@pytest.mark.slow
def test_recorded_gradients_are_spread_over_backward() -> None:
    for answer in on_ranks(trained, 2, "compile(DP)", "goes back", "", {}, 0.02):
        assert [sorted({name.split(".")[1] for name in part if "layers" in name}) for part in answer["parts"]] == [
            [str(layer)] for layer in reversed(range(LAYERS))
        ]
        assert len(set(answer["spread"])) >= LAYERS


@pytest.mark.campaign
@pytest.mark.parametrize("order", ORDERS)
def test_inductor(order: str) -> None:
    for answer in on_ranks(trained, 2, order, "keeps the plan", "inductor", {}, timeout_s=150):
        assert answer["apart"] < 1e-4
        assert len(set(answer["compiled"])) == 2, answer["explained"]
        assert answer["early"][0], "the plan that was found sends while backward computes"


@pytest.mark.campaign
def test_a_residual_network(tmp_path: Path) -> None:
    answers = on_ranks(residual.trained, residual.RANKS, str(tmp_path), "cpu", "aot_eager", None, timeout_s=100)
    residual.check(answers, 1e-3)


@pytest.mark.campaign
def test_a_residual_network_with_sparse_messages(tmp_path: Path) -> None:
    answers = on_ranks(residual.sparse, residual.RANKS, str(tmp_path), "cpu", "aot_eager", timeout_s=100)
    residual.check_sparse(answers, 1e-3)


def launches(rank: int, path: str) -> dict[str, Any]:
    """With a given plan: the order of parts and launches, the timeline, and a trace of the last steps."""
    log = Log()
    _, net = pair()
    plan = pairs_of([name for name, _ in net.named_parameters()])
    made, called = compiled(net, "compile(DP)", log, plan=plan, profile_steps=2)
    launch = BucketLauncher.launch

    def noted(self: BucketLauncher, index: int, *rest: Any) -> Any:
        log.events.append(f"launch {index}")
        return launch(self, index, *rest)

    BucketLauncher.launch = noted  # type: ignore[method-assign,assignment]
    made.trace_steps(8, 10, path)
    for step in range(10):
        log.step = step
        log.events.clear()
        called(inputs(rank, step)).square().mean().backward()
    return {
        "events": [event for event in log.events if event.startswith(("backward", "launch"))],
        "compiled": log.compiled,
    }


@pytest.mark.slow
def test_a_given_plan_is_compiled_once_and_each_bucket_leaves_when_its_part_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for answer in on_ranks(launches, 2, str(path)):
        assert answer["compiled"] == [0] * (LAYERS // 2)
        assert answer["events"] == [f"{what}" for i in range(LAYERS // 2) for what in ("backward", f"launch {i}")]
    document = json.loads(path.read_text())
    check_format(document)
    for rank in range(2):
        backwards = {event["args"]["step"]: event for event in of_rank(document, rank, name="backward")}
        assert list(backwards) == [8, 9, 10]
        for step, backward in backwards.items():
            end = backward["ts"] + backward["dur"]
            ready = {event["ts"] for event in of_rank(document, rank, cat="gradient") if event["args"]["step"] == step}
            sent = [e["args"] for e in of_rank(document, rank, cat="communication") if e["args"]["step"] == step]
            assert len(ready) >= LAYERS // 2, "gradients are ready part by part"
            assert sum(bucket["launched_us"] < end for bucket in sent) >= LAYERS // 2 - 1, "all but the last overlap"


def doubtful(rank: int) -> dict[str, Any]:
    """A plan has won by luck: the steps in which it was tried once more, and those in which graphs were compiled."""
    decided: list[str] = []  # by verdict, the stage
    give_times(lambda plan: 4e-3 if plan is None else 1e-3)  # which nobody had predicted
    log, (_, net) = Log(), pair()
    options = {"planner": in_pairs, "lanes": 1, "profile_steps": 2, "network": ring()}
    made, called = compiled(net, "compile(DP)", log, policy=SCENARIOS["keeps the plan"], **options)

    def note(pairs: Pairs, policy: TuningPolicy, found: Comparison) -> Comparison:
        decided.append(f"{made.explain().splitlines()[0]} after {len(set(log.compiled))} compilations")
        return found._replace(verdict="faster")

    note_comparisons(note)
    for log.step in range(24):
        called(inputs(rank, log.step)).square().mean().backward()
    return {"decided": decided, "explained": made.explain()}


@pytest.mark.slow
def test_a_doubtful_plan_wins_again_before_graphs_are_compiled_for_it() -> None:
    for answer in on_ranks(doubtful, 2):
        tried, again, cut = answer["decided"]
        assert "trying in_pairs." in tried and tried.endswith("after 1 compilations")
        assert "trying in_pairs once more" in again and again.endswith("after 1 compilations")
        assert "compiling for in_pairs" in cut and cut.endswith("after 2 compilations")
        assert "running in_pairs, graphs cut for it" in answer["explained"]


def ended_early(rank: int, planner: str, held: bool) -> dict[str, Any]:
    """The search ends while it tries its first plan: it is told to hold, or may take no more steps."""
    log, (_, net) = Log(), pair()
    chosen: Any = in_pairs if planner == "in_pairs" else planner
    options = {"planner": chosen, "lanes": 1, "profile_steps": 2, "network": ring()}
    policy = SCENARIOS["keeps the plan"]
    policy = policy if held else replace(policy, max_search_steps=6)
    made, called = compiled(net, "compile(DP)", log, policy=policy, **options)
    for log.step in steps(made):
        called(inputs(rank, log.step)).square().mean().backward()
        if held and "trying" in made.explain().splitlines()[0]:
            made.hold()
    return {"compiled": log.compiled, "explained": made.explain()}


@pytest.mark.slow
@pytest.mark.campaign_but_first
@pytest.mark.parametrize("planner", ["in_pairs", "per_tensor"])
def test_a_search_that_is_ended_early_keeps_fine_cuts_and_says_so(planner: str) -> None:
    for answer in on_ranks(ended_early, 2, planner, True):
        assert f"running {planner}" in answer["explained"]
        assert answer["compiled"] == [0] * LAYERS, "nothing is compiled again"
        needs_fewer = planner == "in_pairs"
        assert (HELD_EARLY in answer["explained"]) == needs_fewer
        assert ("parts, cut finely." in answer["explained"]) == needs_fewer, "per_tensor needs every cut"


@pytest.mark.slow
def test_a_search_that_may_take_no_more_steps_still_compiles_for_its_plan() -> None:
    for answer in on_ranks(ended_early, 2, "in_pairs", False):
        assert "running in_pairs, graphs cut for it" in answer["explained"]
        assert answer["compiled"] != [0] * LAYERS and HELD_EARLY not in answer["explained"]


def compressed(rank: int, kind: str, lean: bool) -> dict[str, Any]:
    """Train with a plan of one kind of exchange, compiled and eager; how far they are apart."""
    forget_compiled()
    _, net = pair()
    plan = planners.using(pairs_of([name for name, _ in net.named_parameters()]), kind)
    compress = OkTopk(density=0.25, warmup_steps=0) if kind.startswith("oktopk") else None if kind == "dense" else kind
    log, trained = Log(), []
    for order in ("compile(DP)", "eager"):
        _, net = pair()
        memory = {"memory": Lean(lambda parameters: torch.optim.SGD(parameters, lr=0.05))} if lean else {}
        made, called = compiled(net, order, log, plan=plan, compress=compress, profile_steps=0, **memory)
        optimizer = None if lean else torch.optim.SGD(made.parameters(), lr=0.05)  # Lean has one
        for log.step in range(8):
            called(inputs(rank, log.step)).square().mean().backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        trained.append(made)
    return {"apart": furthest(*trained), "compiled": log.compiled}


@pytest.mark.slow
@pytest.mark.campaign_but_first
@pytest.mark.parametrize("lean", [False, True])
def test_every_kind_of_exchange(lean: bool) -> None:
    kinds = ["dense", "bf16", "int8", "int4", kind_of(0.25)]
    found = cases_on_ranks({kind: (compressed, kind, lean) for kind in kinds}, 2, timeout_s=120)
    for kind, answer in ((kind, answer) for kind, answers in found.items() for answer in answers):
        assert answer["apart"] < 1e-6, kind
        assert answer["compiled"] == [0] * (LAYERS // 2), kind


@pytest.mark.slow
def test_auto() -> None:
    shares = {"dense": 1.0, "bf16": 0.5, "int8": 0.25, "int4": 0.14}
    network = Network(2, {kind: Curve.linear(1e-5, share * 1e-6) for kind, share in shares.items()})
    for answer in on_ranks(with_equal_times, 2, {"compress": "auto", "network": network}):
        assert answer["apart"] < 0.02  # kinds round
        assert len(set(answer["compiled"])) <= 2


def lean(rank: int, order: str) -> dict[str, Any]:
    """Train under Lean, beside an eager DDP."""
    forget_compiled()
    log = Log()
    theirs, net = pair()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05)
    prefix = "_orig_mod." if order == "DP(compile(net))" else ""  # torch's name for what it compiles
    plan = pairs_of([f"{prefix}{name}" for name, _ in net.named_parameters()])
    memory = Lean(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    made, called = compiled(net, order, log, plan=plan, memory=memory, profile_steps=2)
    for log.step in range(10):
        log.events.clear()
        optimizer.zero_grad()
        theirs(inputs(rank, log.step)).square().mean().backward()
        optimizer.step()
        called(inputs(rank, log.step)).square().mean().backward()
    return {"apart": furthest(theirs, made), "compiled": log.compiled, "parts": log.parts()}


@pytest.mark.slow
def test_lean() -> None:
    found = cases_on_ranks({order: (lean, order) for order in ORDERS}, 2, timeout_s=120)
    for order, answer in ((order, answer) for order, answers in found.items() for answer in answers):
        assert answer["apart"] < 1e-6, order
        assert answer["compiled"] == [0] * (LAYERS // 2), order
        assert len(answer["parts"]) == LAYERS // 2, order


def compiled_before(rank: int) -> dict[str, Any]:
    """The model was compiled, and trained a step, before it was wrapped; another one of its class was, too.

    Then the wrapper is closed, and the model is wrapped again, with another plan.
    """
    log = Log()
    _, net = pair()
    for module in (net, pair()[1]):
        module.compile(backend=log)
        module(inputs(rank, 0)).square().mean().backward()
    before = len(log.compiled)
    names = [name for name, _ in net.named_parameters()]
    parts = []
    for plan in (pairs_of(names), Plan((Bucket(tuple(reversed(names))),))):
        made, called = compiled(net, "wrapped", log, plan=plan)
        for log.step in range(1, 4):
            log.events.clear()
            called(inputs(rank, log.step)).square().mean().backward()
        parts.append(len([event for event in log.events if event == "backward"]))
        made.close()
    return {"before": before, "parts": parts}


@pytest.mark.slow
def test_a_model_that_was_compiled_before_it_was_wrapped_is_cut() -> None:
    for answer in on_ranks(compiled_before, 2):
        assert answer["before"] == 1, "torch keeps one graph for both models"
        assert answer["parts"] == [LAYERS // 2, 1]


def with_cache(rank: int, folder: str, count: int, rows: int) -> dict[str, Any]:
    """Train with a plan cache, in a process of its own."""
    log = Log()
    _, net = pair()
    options = {"planner": "single", "lanes": 1, "network": ring(), "policy": SCENARIOS["keeps the plan"]}
    made, called = compiled(net, "compile(DP)", log, cache=folder, profile_steps=2, **options)
    for log.step in range(count):
        called(inputs(rank, log.step, rows)).square().mean().backward()
    return {"compiled": log.compiled, "explained": made.explain()}


@pytest.mark.slow
def test_a_cached_plan_is_compiled_once_with_its_cuts(tmp_path: Path) -> None:
    on_ranks(with_cache, 2, str(tmp_path), 45, 8)  # a choice is kept once a doubtful win was repeated
    for answer in on_ranks(with_cache, 2, str(tmp_path), 6, 8):
        assert "as cached on" in answer["explained"]
        assert answer["compiled"] == [0], "all gradients are one bucket, so graphs are not cut"
        assert "cut where buckets end" in answer["explained"]
    for answer in on_ranks(with_cache, 2, str(tmp_path), 45, 6):
        assert answer["compiled"].count(0) == LAYERS, "of another batch: cut finely at once"
        assert len(set(answer["compiled"])) <= 2, "and once after planning"
        assert "as cached on" not in answer["explained"]
