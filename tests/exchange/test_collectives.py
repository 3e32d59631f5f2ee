"""Collectives: a plan may mix families bucket by bucket, and what is kept between steps has one owner."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch import Bucket, Plan
from anabranch.exchange import error_samples
from anabranch.exchange.bucket_launcher import BucketLauncher
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.compression import collectives_for, probe_of
from anabranch.exchange.dense import DenseExchanges, dense, dense_traffic
from anabranch.exchange.error_samples import ErrorSamples
from anabranch.exchange.lanes import Lanes
from anabranch.exchange.quantised.exchange import QuantisedExchanges
from anabranch.observe.measure import drive
from anabranch.values.kinds.options import Auto, OkTopk, Quantised
from anabranch.values.nodes import Nodes
from exchange.fake_exchanges import EighthsExchanges, RecordingResiduals, eighths
from ranks import on_ranks

MIXED = Plan((Bucket(("a",)), Bucket(("b",), 1, "eighths"), Bucket(("c",), 0, "bf16"), Bucket(("d",), 0, "eighths")))
VALUE = 1.05  # no multiple of 1/8, and no bfloat16


def mixed_families(rank: int) -> dict[str, Any]:
    """Every bucket holds VALUE on rank 0 and twice that on rank 1."""
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, torch.device("cpu"))
    lanes.grow(MIXED.lanes)
    family = EighthsExchanges()
    collectives = Collectives(family, QuantisedExchanges(), DenseExchanges())
    launcher = BucketLauncher(MIXED, lanes, collectives, dict.fromkeys("abcd", 5), lambda _: None)
    buffers = [torch.full((5,), VALUE * (1 + rank)) for _ in MIXED.buckets]
    futures = [launcher.launch(index, buffer) for index, buffer in enumerate(buffers)]
    averages = [future.wait().tolist() for future in futures]
    lanes.close()
    return {"averages": averages, "exchanged": [name for (name,) in family.exchanged]}


def test_a_plan_mixes_families_bucket_by_bucket() -> None:
    first, second = on_ranks(mixed_families, 2)
    assert first == second, "the same bits on all ranks"
    assert first["exchanged"] == ["b", "d"], "each bucket is exchanged by the family of its kind"
    whole, rounded, half, rounded_too = (torch.tensor(values) for values in first["averages"])
    torch.testing.assert_close(whole, torch.full((5,), 1.5 * VALUE))
    assert rounded.tolist() == rounded_too.tolist() == [(1.0 + 2.125) / 2] * 5
    torch.testing.assert_close(half, torch.full((5,), 1.5 * VALUE), rtol=1e-2, atol=0)
    assert torch.equal(half, half.bfloat16().float()) and not torch.equal(half, whole)


def test_every_question_goes_to_the_family_of_the_kind() -> None:
    collectives = Collectives(EighthsExchanges(), QuantisedExchanges((Quantised("bf16"),)), DenseExchanges())
    assert collectives.kinds == ("eighths", "bf16")
    assert collectives.supports("eighths", torch.float32) and not collectives.supports("eighths", torch.float64)
    assert collectives.supports("dense", torch.float64) and not collectives.supports("zip", torch.float32)
    assert collectives.family("eighths").probe("eighths") is eighths
    assert collectives.family("dense").probe("dense") is dense
    assert collectives.traffic(Bucket(("a",), 0, "eighths"), 10, torch.float32, 4) == (40, 10, 0.5)
    assert collectives.traffic(Bucket(("a",), 0, "eighths"), 10, torch.float64, 4) is None
    assert collectives.traffic(Bucket(("a",)), 10, torch.float32, 4) == dense_traffic(10, torch.float32, 4)


BAD = Bucket(("a",), 0, "zip")
QUESTIONS: list[Callable[[Collectives], object]] = [
    lambda collectives: collectives.family("zip"),
    lambda collectives: collectives.traffic(BAD, 10, torch.float32, 2),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=["family", "traffic"])
def test_an_unknown_kind_is_named_with_those_that_exist(question: Callable[[Collectives], object]) -> None:
    with pytest.raises(ValueError, match=r"called 'zip': expected one of eighths, dense$"):
        question(Collectives(EighthsExchanges(), DenseExchanges()))
    with pytest.raises(ValueError, match=r"called 'zip': expected one of dense$"):
        question(Collectives(DenseExchanges()))


def test_without_residuals_nothing_is_kept_and_no_state_can_be_loaded() -> None:
    collectives = Collectives(DenseExchanges())
    residuals = collectives.residuals
    assert (collectives.excluded, residuals.warmup_steps, residuals.keeps_any) == ({}, 0, False)
    collectives.residuals.use_plan(MIXED)
    residuals.on_step_end()
    residuals.rescale(2.0)
    residuals.load_state_dict({}, {})
    assert (residuals.state_dict(), residuals.summary(), residuals.loaded()) == ({}, [], [])
    assert residuals.of(MIXED.buckets[0]) is None and residuals.velocity(MIXED.buckets[0]) is None
    with pytest.raises(ValueError, match="holds the state of a compression, and this model has none"):
        residuals.load_state_dict({}, {"residuals": {}})
    collectives.close()


def test_a_plan_and_the_end_reach_the_residuals() -> None:
    residuals = RecordingResiduals()
    collectives = Collectives(EighthsExchanges(), DenseExchanges(), residuals=residuals, excluded={"eighths": ["bias"]})
    assert collectives.excluded == {"eighths": frozenset({"bias"})} and collectives.residuals is residuals
    collectives.residuals.use_plan(MIXED)
    collectives.residuals.use_plan(None)
    collectives.close()
    assert residuals.calls == ["use_plan 4", "use_plan None", "close"]


NODES, SHARE = Nodes.of_size(4, 2), 500  # elements of each place, of 1000
KINDS = ("dense", "bf16", "int8", "int4", "oktopk:0.3")


def between_nodes(rank: int) -> dict[str, Any]:
    """The middle stage of two-level buckets: this rank's share, exchanged with its place on the other node."""
    error_samples.FIRST, error_samples.PERIOD = -9, 1  # every exchange is sampled
    groups = [dist.new_group(list(place)) for place in NODES.places]
    group, world = groups[NODES.place_of(rank)], dist.group.WORLD
    assert world is not None and isinstance(group, dist.ProcessGroup)
    parameters = {kind: torch.zeros(20, 50) for kind in KINDS}
    options = Auto(kinds=KINDS[1:], oktopk=OkTopk(warmup_steps=0))
    collectives = collectives_for(options, parameters, world, lambda: True)
    collectives.use_nodes(NODES, rank)
    plan = Plan(tuple(Bucket((kind,), 0, f"{kind}@nodes") for kind in KINDS))
    samples = ErrorSamples(plan, collectives.residuals)
    found: dict[str, Any] = {"keeps": [kind for kind in KINDS if collectives.residuals.keeps(f"{kind}@nodes")]}
    for index, bucket in enumerate(plan.buckets):
        given = torch.randn(SHARE, generator=torch.Generator().manual_seed(rank))
        average, family = given.clone(), collectives.family(bucket.collective)
        steps = family.steps(bucket, average, group, 4.0)
        if samples.due(index):
            steps = samples.sampled(steps, index, average, group, 4.0)
        drive(steps)
        state = collectives.residuals.of(bucket)
        offered = given.double() - (state.residual if state is not None else 0.0)
        dist.all_reduce(offered, group=group)
        traffic = family.traffic(bucket, SHARE, torch.float32, 2)
        whole = collectives.traffic(bucket, 2 * SHARE, torch.float32, 4)
        assert whole is not None and traffic is not None
        assert whole.sent_nbytes == traffic.sent_nbytes + 4 * 2 * SHARE, "a dense one inside the node, too"
        assert collectives.supports(bucket.collective, torch.float32)
        found[KINDS[index]] = {"average": average, "offered": offered / 4, "sent": traffic.sent_nbytes}
        drive(probe_of(bucket.collective)(torch.ones(64), group, 2.0))
    found["errors"] = {bucket.collective: error for bucket, error in samples.relative_errors().items()}
    found["excluded"] = {kind: sorted(names) for kind, names in collectives.excluded.items()}
    collectives.close()
    return found


def test_two_level_kinds_are_those_between_nodes_of_a_share() -> None:
    answers = on_ranks(between_nodes, 4)
    for (one, other), kind in product(zip(answers[:2], answers[2:], strict=True), KINDS):
        assert torch.equal(one[kind]["average"], other[kind]["average"]), "the same bits on all nodes"
        error = (one[kind]["average"] - one[kind]["offered"]).norm() / one[kind]["offered"].norm()
        assert error < (0.02 if kind in ("bf16", "int8") else 1e-5), "what was not sent is kept"
    assert not torch.equal(answers[0]["int4"]["average"], answers[1]["int4"]["average"])
    for answer in answers:
        assert answer["keeps"] == ["int4", "oktopk:0.3"]
        sent = [answer[kind]["sent"] for kind in KINDS]
        assert sent[0] == 4 * SHARE and sent[0] > sent[1] > sent[2] > sent[3] > 0
        assert answer["errors"].keys() == {f"{kind}@nodes" for kind in KINDS[1:]}
        assert answer["errors"]["int8@nodes"] < 0.02 < answer["errors"]["int4@nodes"]
        assert answer["excluded"]["int4@nodes"] == answer["excluded"]["int4"]
