"""Published exchanges raced on real ranks: the same average everywhere, nothing lost; what each sends."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.rival_exchanges import gaussian_magnitude
from benchmarks.rivals import NAMES, Rival, sparse_rivals
from benchmarks.virtual import VirtualWorld
from torch import nn

import anabranch as ab
from anabranch.tools.bench.benchmark import Settings, run_benchmark
from anabranch.tools.bench.workload import replay_workload
from anabranch.tools.bench.zoo import Step
from anabranch.tools.report.documents import BASELINE, COMPUTE, OURS
from exchange.sparse.worlds import DENSITY, EXCHANGES, NUMEL, gradients, settled, states, step
from ranks import on_ranks

NETWORK = ab.Network.linear(3, 1e-4, 1e-9)
K = round(DENSITY * NUMEL)


def test_what_is_unknown_is_named_with_what_is_allowed() -> None:
    assert Rival.named("gtopk:0.01") == Rival("gtopk", 0.01) and NAMES == ["topk", "gtopk", "dsa", "gaussian"]
    for text in ("dense:0.1", "zip", ""):
        with pytest.raises(ValueError, match=f"--rival is '{text}': expected topk:0.01, gtopk:0.01"):
            Rival.named(text)
    for text in ("gtopk", "gtopk:", "dsa:x", "topk:nan", "dsa:-1", "dsa:0.01:bf16"):
        with pytest.raises(ValueError, match=r"expected a density in \(0, 1\]"):
            Rival.named(text)


def model_and_step(rank: int) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 4, dtype=torch.float32))

    def step(called: nn.Module) -> None:
        called.zero_grad(set_to_none=True)
        torch.manual_seed(rank + 1)
        called(torch.randn(5, 6)).square().sum().backward()

    return model, step


def trace_of(model: nn.Module) -> ab.Trace:
    named = reversed(list(model.named_parameters()))
    return ab.Trace(tuple(ab.TensorSpec(n, p.numel(), 4, 1e-3 * i) for i, (n, p) in enumerate(named, 1)), 1e-3)


def raced(rank: int, density: float) -> dict[str, list[float]]:
    """Gradients of every rival's first sparse steps, added up; and what each rank computes by itself."""
    model, step = model_and_step(rank)
    step(model)
    found = {"own": _flat(model)}
    asked = {f"{name}:{density:g}": Rival(name, density) for name in NAMES}
    for contestant in sparse_rivals(model, step, trace_of(model), NETWORK, [], asked=asked):
        assert contestant.plan is not None
        assert {bucket.collective for bucket in contestant.plan.buckets} == {contestant.name}
        with contestant.enter() as go:
            for _ in range(contestant.warmup):
                go()
            found[contestant.name] = _flat(model)
    step(model)
    assert _flat(model) == found["own"], "nobody's hooks are left on the model"
    return found


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist()


def remembered() -> list[float]:
    """The residual of a constant gradient after two turns, of three steps each once the layout is in force."""
    model = nn.Linear(8, 1, bias=False)

    def step(called: nn.Module) -> None:
        called.zero_grad(set_to_none=True)
        called(torch.arange(1.0, 9.0)).sum().backward()

    asked = {"topk:0.125": Rival("topk", 0.125)}
    (contestant,) = sparse_rivals(model, step, trace_of(model), NETWORK, [], asked=asked)
    state = contestant.enter.args[-1]._families[0]._state  # type: ignore[attr-defined]
    for _ in range(2):
        with contestant.enter() as go:
            for _ in range(contestant.warmup + 3):
                go()
    (bucket,) = state.buckets()
    return [float(bucket.step), *bucket.residual.tolist()]


def in_the_buckets_of(rank: int) -> list[str]:
    model, step = model_and_step(rank)
    theirs = ab.Plan((
        ab.Bucket(("2.bias", "0.bias")), ab.Bucket(("2.weight", "0.weight"), collective="oktopk:0.01"),
    ))  # fmt: skip
    plans = [ab.planners.using(theirs, "bf16"), theirs]
    (chosen,) = sparse_rivals(model, step, trace_of(model), NETWORK, plans, asked={"dsa:0.1": Rival("dsa", 0.1)})
    with chosen.enter() as go:
        for _ in range(chosen.warmup):
            go()
    assert chosen.plan is not None
    return [f"{bucket.names} {bucket.collective}" for bucket in chosen.plan.buckets]


def in_a_benchmark() -> list[str]:
    tensors = [ab.TensorSpec(f"layer{i}.weight", 3000 + 10 * i, 4, 0.001 * (i + 1)) for i in range(3)]
    workload = replay_workload("tiny", ab.Trace(tuple(tensors), 0.001))
    settings = Settings(iters=1, batches=1, warmup=0, profile_steps=2, only=["none"])
    asked = {f"{name}:0.1": Rival(name, 0.1) for name in NAMES}
    found = run_benchmark(workload, settings, lambda _: None, partial(sparse_rivals, asked=asked))
    assert all(row.step_s > 0 and row.card_nbytes is None for row in found.rows)
    return [row.name for row in found.rows]


def scenarios(rank: int) -> dict[str, Any]:
    return {
        "whole": raced(rank, 1.0),
        "part": raced(rank, 0.1),
        "remembered": remembered(),
        "buckets": in_the_buckets_of(rank),
        "benchmark": in_a_benchmark(),
    }


@pytest.fixture(scope="module")
def found() -> Iterator[list[dict[str, Any]]]:
    yield on_ranks(scenarios, 3, timeout_s=100)


@pytest.mark.slow
def test_at_density_one_they_average_as_ddp_does(found: list[dict[str, Any]]) -> None:
    ranks = [one["whole"] for one in found]
    expected = torch.tensor([one["own"] for one in ranks]).mean(dim=0)
    for name in ("topk:1", "gtopk:1", "dsa:1"):
        for one in ranks:
            torch.testing.assert_close(torch.tensor(one[name]), expected, msg=name)


@pytest.mark.slow
def test_they_send_a_part_and_the_same_to_everyone(found: list[dict[str, Any]]) -> None:
    first, *others = (one["part"] for one in found)
    numel = len(first["own"])
    for name, most in {"topk:0.1": 3, "gtopk:0.1": 1, "dsa:0.1": 3}.items():
        assert all(one[name] == first[name] for one in others)
        sent = sum(value != 0 for value in first[name])
        assert 0 < sent <= most * round(0.1 * numel), name
    assert all(one["gaussian:0.1"] == first["gaussian:0.1"] for one in others)


@pytest.mark.slow
def test_residuals_are_kept_between_turns(found: list[dict[str, Any]]) -> None:
    steps, *residual = found[0]["remembered"]
    assert steps > 6 and sum(value != 0 for value in residual) == 7  # all but the one that was sent last


@pytest.mark.slow
def test_they_run_in_the_buckets_that_ok_topk_sends_and_whatever_only_says(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["buckets"] == ["('2.bias', '0.bias') dense", "('2.weight', '0.weight') dsa:0.1"]
        assert set(one["benchmark"]) == {COMPUTE, BASELINE, OURS, *(f"{name}:0.1" for name in NAMES)}


# ------------------------------------------------------------------------------------------ the exchanges themselves


def test_they_send_as_many_bytes_as_they_should() -> None:
    for ranks in (2, 3, 4, 8, 13):
        n, k, part = 4 * NUMEL, 4 * K, (ranks - 1) / ranks  # in bytes: values and positions have four each
        assert settled("dense", ranks).byte_counts.volume() == pytest.approx(2 * n * part)
        assert settled("topk", ranks).byte_counts.volume(["gather"]) == 2 * k * (ranks - 1)
        tree = settled("gtopk", ranks).byte_counts
        assert tree.volume(["up"]) + tree.volume(["down"]) == 4 * k * math.ceil(math.log2(ranks))
        dsa = settled("dsa", ranks).byte_counts
        assert 4 * k * part * 0.8 <= dsa.volume(["split", "gather"]) <= (2 * k + n) * part * 1.3
        gathered = settled("gaussian", ranks).byte_counts
        assert gathered.volume(["gather"]) > 2 * k * (ranks - 1), "heavy tails pass a Gaussian's threshold too often"


@pytest.mark.parametrize(("density", "dense"), [(0.5, True), (0.001, False)])
def test_dsa_sends_plain_values_where_pairs_would_be_longer(density: float, dense: bool) -> None:
    """The owners' sums are those of the top-k all-gather, however they are sent."""
    ranks, numel = 8, 4000
    made, expected, world = gradients(ranks, numel, 0), gradients(ranks, numel, 0), VirtualWorld(ranks)
    step(EXCHANGES["topk"], expected, states(ranks, numel), VirtualWorld(ranks), density)
    step(EXCHANGES["dsa"], made, states(ranks, numel), world, density)
    assert torch.equal(made[0], expected[0])
    pair_words = 2 * int(made[0].count_nonzero())
    assert (pair_words > numel) == dense
    if dense:
        assert world.byte_counts.received(["gather"]).tolist() == [4 * numel * (ranks - 1) / ranks] * ranks
    else:
        assert world.byte_counts.received(["gather"]).sum() == 4 * pair_words * (ranks - 1)


def test_a_gaussian_threshold_is_right_for_gaussians_only() -> None:
    chance = torch.Generator().manual_seed(3)
    values = torch.randn(200_000, generator=chance)
    assert int((values.abs() >= gaussian_magnitude(values, 0.01)).sum()) == pytest.approx(2000, rel=0.1)
    assert float(gaussian_magnitude(values, 1.0)) == 0.0
