"""Two-level plans under DataParallel: DDP's weights, with every feature; and what it says where there are no nodes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from anabranch import Bucket, DataParallel, Network, Plan
from anabranch.values.network import InsideNodes
from parallel.given_gradients import COLUMNS, ROWS, GivenGradients, computed, matrices_by, one_step
from parallel.models import Branches, WithBfloat16, WithDouble
from parallel.test_join import epoch
from parallel.test_process_groups import PythonGroup
from parallel.twins import (
    SHORT,
    Feature,
    Model,
    batch,
    bits,
    different,
    dtypes_of,
    mlp,
    plain_train,
    run,
    scatter,
    sgd,
    state,
    steps,
    twins,
)
from ranks import cases_on_ranks, on_ranks
from tuning.given_times import give_times

pytestmark = pytest.mark.slow

RANKS = 4
ONE_NODE = "Exchanges are flat: all 4 ranks are on one node."


def on_nodes(plan: Plan, kinds: tuple[str, ...] = ("dense@nodes",)) -> Plan:
    """The same buckets, by these kinds in turn."""
    return Plan(tuple(Bucket(b.names, b.lane, kinds[i % len(kinds)]) for i, b in enumerate(plan.buckets)))


def given(module: nn.Module, kinds: tuple[str, ...] = ("dense@nodes", "dense@nodes", "dense")) -> dict[str, Any]:
    """Options for a plan of exact kinds on two lanes, most of them on two levels."""
    return {"plan": on_nodes(scatter(dtypes_of(module)), kinds), "nodes": 2, "profile_steps": 2}


def branches_train(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Ranks take different branches, and none takes the last."""
    optimizer.zero_grad()
    model(batch(step), ((step + dist.get_rank()) % 3,)).square().mean().backward()
    optimizer.step()


def accumulate(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Two micro-batches, the first without averaging."""
    optimizer.zero_grad()
    with model.no_sync():
        model(batch(step)).square().mean().backward()
    model(batch(100 + step)).square().mean().backward()
    optimizer.step()


FEATURES = {
    "plain": Feature(),
    "views": Feature(options={"gradient_as_bucket_view": True}),
    "static graph": Feature(options={"static_graph": True}),
    "unused": Feature(Branches, branches_train, {"find_unused_parameters": True}),
    "no_sync": Feature(train=accumulate),
    "later": Feature(options={"init_sync": False}),
    "doubles": Feature(WithDouble),
    "bfloat16": Feature(WithBfloat16, rounding=0.03),
}


def as_ddp(rank: int, name: str) -> dict[str, Any]:
    feature = FEATURES[name]
    ours = given(feature.build())
    return run(
        rank, Feature(feature.build, feature.train, feature.options, ours, feature.rounding), "is given the plan"
    )


def mixed_kinds(rank: int) -> dict[str, Any]:
    """Every kind in one plan, beside DDP, whose weights each step begins with: errors of each kind's gradients."""
    module = mlp(5)
    names = list(dtypes_of(module))
    kinds = ("dense@nodes", "int8@nodes", "dense", "int8", "bf16@nodes")
    plan = Plan(tuple(Bucket(tuple(names[i : i + 2]), 0, kinds[i // 2]) for i in reversed(range(0, len(names), 2))))
    line = ab.Curve.linear(1e-5, 1e-9)
    network = Network(RANKS, dict.fromkeys(kinds, line), inside=InsideNodes(2, line, line))
    options = {"plan": plan, "nodes": 2, "network": network}
    theirs, ours = twins(Feature(lambda: mlp(5), ours=options), "is given the plan")
    optimizers = [sgd(model) for model in (theirs, ours)]
    errors = dict.fromkeys(kinds, 0.0)
    for step in range(6):
        ours.module.load_state_dict(theirs.module.state_dict())
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, step)
        expected, found = state(theirs), state(ours)
        for bucket in plan.buckets:
            exact, sent = (
                torch.cat([tensors[f"gradient of {name}"].flatten() for name in bucket.names])
                for tensors in (expected, found)
            )
            error = float((sent - exact).norm() / exact.norm())
            errors[bucket.collective] = max(errors[bucket.collective], error)
    answer = {"errors": errors, "explained": ours.explain(), "bits": b"".join(map(bits, state(ours).values())).hex()}
    assert ours.timeline is not None
    tracks = [span.track for span in ours.timeline.communication]
    answer["tracks"] = {track: tracks.count(track) for track in tracks}
    ours.close()
    return answer


RESIDUAL_KINDS = ("int4", "oktopk:0.1")
GIVEN_STEPS = 8


def with_residuals(rank: int, kind: str, cut: int | None) -> dict[str, torch.Tensor]:
    """Given gradients on two levels, in a run that resumes after ``cut`` steps: all that was applied, and is kept."""

    def fresh() -> tuple[GivenGradients, DataParallel]:
        model = GivenGradients()
        compress = ab.OkTopk(0.1, deterministic=True) if kind.startswith("oktopk") else kind
        options = {"plan": matrices_by(f"{kind}@nodes"), "nodes": 2, "compress": compress}
        return model, DataParallel(model, profile_steps=0, **options)  # type: ignore[arg-type]

    model, parallel = fresh()
    applied = torch.zeros(2, ROWS, COLUMNS)
    for step in range(GIVEN_STEPS):
        if step == cut:
            state = parallel.comm_state_dict()
            parallel.close()
            model, parallel = fresh()
            parallel.load_comm_state_dict(state)
        applied += one_step(model, parallel, step, rank)
    state = parallel.comm_state_dict()
    kept = torch.zeros(2, ROWS * COLUMNS)
    for index, name in enumerate(("first", "second")):
        if name in state["residuals"]:
            low, numel = state["slices"]["residuals"][name]
            piece = state["residuals"][name]
            assert numel == ROWS * COLUMNS and len(piece) <= -(-numel // 2), "residuals belong to a share"
            kept[index, low : low + len(piece)] = piece
    parallel.close()
    return {"applied": applied, "kept": kept.view_as(applied)}


def to_and_fro(rank: int) -> list[str]:
    """Flat and two-level plans, and DDP's own buckets, in turns."""
    theirs, ours = twins(Feature(ours={"nodes": 2, "profile_steps": 0, "plan": scatter(dtypes_of(mlp()))}))
    optimizers = [sgd(model) for model in (theirs, ours)]
    flat = scatter(dtypes_of(mlp()), seed=5)
    plans = [on_nodes(flat), flat, on_nodes(flat, ("dense", "dense@nodes")), None, on_nodes(scatter(dtypes_of(mlp())))]
    apart = []
    for number in range(15):
        if number % 3 == 2:
            assert ours._tuner is not None
            ours._tuner.runner.use_plan(plans[number // 3])
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, number)
        apart += [f"step {number}: {what}" for what in different(theirs, ours, 1e-5)]
    assert ours.plan == plans[-1]
    ours.close()
    return apart


def joined(rank: int) -> list[str]:
    """Ranks that have run out of data take part in all three stages, with either divisor."""
    theirs, ours = twins(Feature(ours=given(mlp())), "is given the plan")
    optimizers = [sgd(model) for model in (theirs, ours)]
    apart = []
    for number in range(4):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            plain_train(model, optimizer, 100 * number)
            epoch(model, optimizer, 100 * number + 50, divide=number % 2 == 0)
        apart += [f"epoch {number}: {what}" for what in different(theirs, ours, 1e-5)]
    ours.close()
    return apart


def refused(rank: int, folder: str) -> dict[str, str]:
    """What is wrong with nodes= or with a plan that needs nodes, on every rank."""
    said = {}
    path = Path(folder, "plan.json")
    if rank == 0:
        ab.save(on_nodes(scatter(dtypes_of(mlp()))), path)
    cases: dict[str, dict[str, Any]] = {
        "three": {"nodes": 3},
        "a word": {"nodes": "two"},
        "one node": {"plan": path},
        "flat": {"plan": path, "nodes": False},
        "other nodes": {"nodes": 2 + 2 * (rank == 3)},
    }
    for name, options in cases.items():
        with pytest.raises((ValueError, ab.PlanError, ab.DisagreementError)) as caught:
            DataParallel(mlp(), **options)
        said[name] = f"{type(caught.value).__name__}: {caught.value}"
    model = DataParallel(mlp(), init_sync=False, plan=path)
    with pytest.raises(ab.PlanError) as late:
        model(batch(0)).sum().backward()
    said["later"] = f"{type(late.value).__name__}: {late.value}"
    model.close()
    return said


def flat(rank: int) -> dict[str, str]:
    """The line about nodes, where there are none."""
    said = {}
    for name, options in {"auto": {}, "four": {"nodes": 4}, "one": {"nodes": 1}, "off": {"nodes": False}}.items():
        model = DataParallel(mlp(), **options)  # type: ignore[arg-type]
        plain_train(model, sgd(model), 0)
        (said[name],) = [line for line in model.explain().splitlines() if "flat" in line]
        model.close()
    return said


def in_python(rank: int) -> dict[str, Any]:
    assert dist.group.WORLD is not None
    options = {"process_group": PythonGroup(dist.group.WORLD, python_works=False)}
    return run(rank, Feature(options=options, ours={"nodes": 2}), "keeps the plan")


def believed(rank: int) -> dict[str, Any]:
    """A search on a given network where exchanges on two levels pay, and do: what it chooses for complex numbers."""
    give_times(lambda plan: 1.0 if plan is not None and any(b.collective != "dense" for b in plan.buckets) else 2.0)
    line = ab.Curve.linear
    curves = {"dense": line(1e-4, 1e-6), "dense@nodes": line(1e-6, 1e-9)}
    network = Network(RANKS, curves)
    ours = {"planner": "optimal", "network": network, "nodes": 2, "policy": SHORT}
    theirs, model = twins(Feature(Phases, ours=ours), "keeps the plan")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (theirs, model)]
    apart = []
    for step in steps(model):
        for one, optimizer in zip((theirs, model), optimizers, strict=True):
            plain_train(one, optimizer, step)
        apart += [f"step {step}: {what}" for what in different(theirs, model, 1e-5)]
    kinds = {} if model.plan is None else {name: b.collective for b in model.plan.buckets for name in b.names}
    answer = {"apart": apart[:5], "kinds": kinds, "explained": model.explain()}
    model.close()
    return answer


class Phases(nn.Module):
    """Real layers, and a complex vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(2)
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.layers(x) * self.turn).abs()
        return out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases: dict[str, tuple[Any, ...]] = {name: (as_ddp, name) for name in FEATURES}
    cases |= {"mixed": (mixed_kinds,), "to and fro": (to_and_fro,), "joined": (joined,), "flat": (flat,)}
    cases |= {f"{kind} {cut}": (with_residuals, kind, cut) for kind in RESIDUAL_KINDS for cut in (None, 5)}
    cases |= {"refused": (refused, str(tmp_path_factory.mktemp("plans")))}
    return cases_on_ranks(cases, RANKS, timeout_s=120.0)


@pytest.mark.parametrize("feature", FEATURES)
def test_exact_plans_are_ddp_to_rounding(found: dict[str, list[Any]], feature: str) -> None:
    first = found[feature][0]
    for answer in found[feature]:
        assert answer["apart"] == [] and answer["planned"]
        assert answer["digest"] == first["digest"], "the same bits on all ranks"
        assert "Nodes: 2 nodes of 2 ranks (nodes=2)." in answer["explained"].splitlines()
        assert "dense@nodes" in answer["explained"]


def test_kinds_may_be_mixed(found: dict[str, list[Any]]) -> None:
    for answer in found["mixed"]:
        assert answer["bits"] == found["mixed"][0]["bits"]
        errors = answer["errors"]
        assert errors["dense@nodes"] < 1e-6 and errors["dense"] < 1e-6
        assert 0 < errors["bf16@nodes"] < 0.01 and 0 < errors["int8@nodes"] < 0.03 and 0 < errors["int8"] < 0.03
        assert answer["tracks"] == {"lane 0": 5, "inside 0": 2 * 3}
        assert "4 of 5 buckets are compressed or sum inside nodes" in answer["explained"]
        assert "Summed inside nodes first, they take 0.02 ms there, and 0.01 ms between nodes." in answer["explained"]


@pytest.mark.parametrize("kind", RESIDUAL_KINDS)
def test_nothing_is_lost_and_training_resumes_bit_by_bit(found: dict[str, list[Any]], kind: str) -> None:
    whole, resumed = found[f"{kind} None"], found[f"{kind} 5"]
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one["applied"], whole[0]["applied"])
        assert torch.equal(one["kept"], other["kept"])
        assert torch.equal(one["applied"], other["applied"])
    kept = sum(answer["kept"].double() for answer in whole)
    expected = computed(RANKS, 0, GIVEN_STEPS)
    torch.testing.assert_close(RANKS * whole[0]["applied"].double() + kept, expected, rtol=1e-4, atol=1e-3)
    assert float(kept.abs().max()) > 0


def test_plans_may_change_between_flat_and_two_levels(found: dict[str, list[Any]]) -> None:
    assert found["to and fro"] == [[]] * RANKS


def test_uneven_inputs(found: dict[str, list[Any]]) -> None:
    assert found["joined"] == [[]] * RANKS


def test_where_there_are_no_nodes_it_says_why(found: dict[str, list[Any]]) -> None:
    for said in found["flat"]:
        assert said == {
            "auto": ONE_NODE,
            "four": ONE_NODE,
            "one": "Exchanges are flat: every node has one rank.",
            "off": "Exchanges are flat: nodes=False.",
        }


def test_what_does_not_fit_is_refused_on_all_ranks(found: dict[str, list[Any]]) -> None:
    for said in found["refused"]:
        assert said["three"] == "ValueError: nodes is 3, and these are 4 ranks: expected a number that divides them"
        assert said["a word"].startswith("ValueError: nodes is 'two': expected 'auto'")
        sums_inside = "'dense@nodes', which sums inside nodes, and exchanges are flat here: "
        assert said["one node"].startswith("PlanError: the plan sends ")
        assert said["one node"].endswith(f"{sums_inside}all 4 ranks are on one node")
        assert said["later"] == said["one node"]
        assert said["flat"].endswith(f"{sums_inside}nodes=False")
        assert said["other nodes"].startswith("DisagreementError: ") and "nodes 4" in said["other nodes"]


def test_a_search_finds_two_levels_and_leaves_out_what_they_cannot_add() -> None:
    for answer in on_ranks(believed, RANKS):
        assert answer["apart"] == []
        assert answer["kinds"].pop("turn") == "dense"
        assert set(answer["kinds"].values()) == {"dense@nodes"}, answer["explained"]
        assert answer["explained"].startswith("anabranch: running optimal, dense@nodes.")


def test_groups_in_python_stay_ddps() -> None:
    for answer in on_ranks(in_python, 2):
        assert answer["apart"] == [] and not answer["planned"]
        assert answer["explained"].startswith("No plan: its process group is a PythonGroup")


def alone(rank: int) -> str:
    """One rank, with what is meant for more."""
    model = DataParallel(mlp(), **given(mlp()))
    plain_train(model, sgd(model), 0)
    said = model.explain()
    model.close()
    return said


def test_one_rank_may_be_given_nodes() -> None:
    """As in a try on one GPU."""
    assert on_ranks(alone, 1)[0].startswith("No plan: there is one rank, so nothing to send")
