"""DataParallel with Ok-Topk: nothing is lost, ranks agree, states survive, and it is kept only where it is faster."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from anabranch.tuning.decisions import Verdict
from anabranch.values.kinds.names import DENSITIES, kind_of
from parallel.given_gradients import COLUMNS, ROWS, GivenGradients, gradients, two_buckets
from parallel.twins import SCENARIOS
from ranks import cases_on_ranks, on_ranks
from tuning.given_times import note_comparisons

pytestmark = pytest.mark.slow


def sparse_steps(rank: int, wire: str, steps: int) -> dict[str, Any]:
    """Sums over all steps of the gradients computed here and of those applied, and the residual at the end."""
    model = GivenGradients()
    options = ab.OkTopk(density=0.1, wire=wire)  # type: ignore[arg-type]
    parallel = ab.DataParallel(model, plan=two_buckets(0.1), compress=options, profile_steps=0)
    computed, applied = torch.zeros(2, ROWS, COLUMNS), torch.zeros(2, ROWS, COLUMNS)
    shares = []
    for step in range(steps):
        model.zero_grad()
        inputs = gradients(step, rank)
        parallel(*inputs).backward()
        grads = [model.first.grad, model.second.grad]
        assert grads[0] is not None and grads[1] is not None and model.bias.grad is not None
        computed += torch.stack(inputs)
        applied += torch.stack([g for g in grads if g is not None]).detach()
        shares.append(float((torch.stack([g for g in grads if g is not None]) != 0).float().mean()))
        torch.testing.assert_close(model.bias.grad, torch.ones(COLUMNS))
    residual = parallel.comm_state_dict()["residuals"]
    found = {
        "computed": computed,
        "applied": applied,
        "residuals": torch.stack([residual["first"].view(ROWS, COLUMNS), residual["second"].view(ROWS, COLUMNS)]),
        "shares": shares,
        "explained": parallel.explain(),
    }
    parallel.close()
    return found


@pytest.mark.parametrize(("ranks", "wire"), [(2, "fp32"), (3, "bf16"), (2, "int8")])
def test_gradients_are_either_applied_or_in_a_residual(ranks: int, wire: str) -> None:
    answers = on_ranks(sparse_steps, ranks, wire, 12)
    assert all(torch.equal(one["applied"], answers[0]["applied"]) for one in answers)
    computed = sum(one["computed"].double() for one in answers)
    accounted = ranks * answers[0]["applied"].double() + sum(one["residuals"].double() for one in answers)
    torch.testing.assert_close(accounted, computed, rtol=1e-4, atol=1e-4)
    assert all(share < 0.2 for share in answers[0]["shares"][5:])  # while the first steps ran DDP's own buckets
    assert "oktopk:0.1" in answers[0]["explained"] and "sparse bucket to first" in answers[0]["explained"]


def narrow_steps(rank: int, name: str, wire: str, momentum: float) -> dict[str, Any]:
    """As ``sparse_steps``, with a model of 16 bits."""
    dtype = getattr(torch, name)
    model = GivenGradients().to(dtype)
    options = ab.OkTopk(density=0.1, wire=wire, momentum=momentum)  # type: ignore[arg-type]
    parallel = ab.DataParallel(model, plan=two_buckets(0.1), compress=options, profile_steps=0)
    computed, applied, allowed = (torch.zeros(2, ROWS, COLUMNS, dtype=torch.float64) for _ in range(3))
    for step in range(12):
        model.zero_grad()
        inputs = [part.to(dtype) for part in gradients(step, rank)]
        parallel(*inputs).backward()
        grads = [model.first.grad, model.second.grad]
        averages = torch.stack([g for g in grads if g is not None]).detach()
        assert averages.dtype == dtype
        computed += torch.stack(inputs).double()
        applied += averages.double()
        allowed += torch.finfo(dtype).eps * averages.double().abs() + torch.finfo(dtype).tiny
    kept = parallel.comm_state_dict()["residuals"]
    residuals = torch.stack([kept[name].view(ROWS, COLUMNS) for name in ("first", "second")])
    parallel.close()
    return {"computed": computed, "applied": applied, "allowed": allowed, "residuals": residuals}


def test_gradients_of_16_bits_are_applied_or_in_a_float32_residual(found: dict[str, list[Any]]) -> None:
    for answers in (found["bfloat16"], found["float16"]):
        assert all(torch.equal(one["applied"], answers[0]["applied"]) for one in answers)
        assert all(one["residuals"].dtype == torch.float32 and one["residuals"].any() for one in answers)
        computed = sum(one["computed"] for one in answers)
        accounted = 2 * answers[0]["applied"] + sum(one["residuals"].double() for one in answers)
        assert bool(((accounted - computed).abs() <= 2 * answers[0]["allowed"] + 1e-4).all())


def test_momentum_of_16_bit_gradients_is_float32(found: dict[str, list[Any]]) -> None:
    answers = found["bfloat16 with momentum"]
    assert torch.equal(answers[0]["applied"], answers[1]["applied"]) and answers[0]["applied"].any()


def tuned_run(rank: int, density: float | str, scenario: str) -> dict[str, Any]:
    """From profiling to the choice, with nothing lost on the way."""
    model = GivenGradients()
    computed, applied = torch.zeros(2, ROWS, COLUMNS), torch.zeros(2, ROWS, COLUMNS)
    options = ab.OkTopk(density=density, warmup_steps=6)  # type: ignore[arg-type]
    kinds, decided = set(), 0
    # Where bytes cost so much, sparse is worth trying even on buckets of some kilobytes.
    sparse = [density] if isinstance(density, float) else DENSITIES
    curves = {kind_of(d): ab.Curve.linear(1e-3, 1e-6 * d) for d in sparse}
    network = ab.Network(2, {"dense": ab.Curve.linear(1e-3, 1e-6), **curves})
    parallel = ab.DataParallel(model, compress=options, network=network, profile_steps=2, policy=SCENARIOS[scenario])
    for step in range(200):
        model.zero_grad()
        inputs = gradients(step, rank)
        parallel(*inputs).backward()
        assert model.first.grad is not None and model.second.grad is not None
        computed += torch.stack(inputs)
        applied += torch.stack([model.first.grad, model.second.grad])
        if parallel.plan is not None:
            kinds |= {bucket.collective for bucket in parallel.plan.buckets}
        if parallel.timeline is not None and (decided := decided + 1) == 2:
            break  # after one step of the chosen layout, which sends the residuals that are left
    residuals = parallel.comm_state_dict()["residuals"]
    residual = torch.zeros(2, ROWS, COLUMNS)
    for index, name in enumerate(("first", "second")):
        if name in residuals:
            residual[index] = residuals[name].view(ROWS, COLUMNS)
    explained, steps = parallel.explain(), step
    parallel.close()
    return {"computed": computed, "applied": applied, "residuals": residual, "explained": explained,
            "kinds": sorted(kinds), "steps": steps}  # fmt: skip


def waited_for(rank: int, warmup_steps: int, most: int) -> str:
    """What is said of a search that may take ``most`` steps, where sparse messages wait for longer than that."""
    model = GivenGradients()
    network = ab.Network(2, {"dense": ab.Curve.linear(1e-3, 1e-6), "oktopk:0.05": ab.Curve.linear(1e-3, 5e-8)})
    policy = replace(SCENARIOS["keeps the plan"], max_search_steps=most)
    options = ab.OkTopk(density=0.05, warmup_steps=warmup_steps)
    parallel = ab.DataParallel(model, compress=options, network=network, profile_steps=2, policy=policy)
    for step in range(warmup_steps + 60):
        model.zero_grad()
        parallel(*gradients(step, rank)).backward()
    said = parallel.explain()
    parallel.close()
    return said


def test_steps_in_which_sparse_messages_wait_are_not_those_of_the_search(found: dict[str, list[Any]]) -> None:
    for said in found["a long warm-up"]:
        assert "oktopk:0.05" in said.split("layout", 1)[1].split("Plan", 1)[0], said


def test_a_search_that_may_take_no_steps_says_so(found: dict[str, list[Any]]) -> None:
    for said in found["no steps"]:
        assert "had taken its 1 steps (max_search_steps)" in said and "waits for communication" not in said, said


def test_tuning_loses_no_gradient() -> None:
    ends: list[tuple[float | str, str]] = [(0.05, "goes back"), ("auto", "goes back"), (0.05, "keeps the plan")]
    for name, answers in cases_on_ranks({f"{end}": (tuned_run, *end) for end in ends}, 2, timeout_s=150.0).items():
        computed = sum(one["computed"].double() for one in answers)
        accounted = 2 * answers[0]["applied"].double() + sum(one["residuals"].double() for one in answers)
        torch.testing.assert_close(accounted, computed, rtol=1e-4, atol=1e-4)
        assert answers[0]["kinds"] == answers[1]["kinds"], name
        assert any(kind.startswith("oktopk") for kind in answers[0]["kinds"]), name
        if "goes back" in name:  # and sends all residuals before
            assert "running DDP's own buckets" in answers[0]["explained"]
            assert all(not one["residuals"].any() for one in answers)


def lost_when_confirmed(rank: int) -> dict[str, Any]:
    """The sparse plan is not decided about in its first pair of blocks and loses in the second."""
    verdicts: Iterator[Verdict] = iter(["undecided", "not faster"])
    note_comparisons(lambda pairs, policy, found: found._replace(verdict=next(verdicts, "not faster")))
    return tuned_run(rank, 0.05, "goes back")


def test_a_plan_that_loses_at_last_leaves_no_residual() -> None:
    answers = on_ranks(lost_when_confirmed, 2, timeout_s=100.0)
    computed = sum(one["computed"].double() for one in answers)
    torch.testing.assert_close(2 * answers[0]["applied"].double(), computed, rtol=1e-4, atol=1e-4)
    assert "no plan was clearly faster" in answers[0]["explained"]


def wrong_settings(rank: int) -> str:
    try:
        ab.DataParallel(GivenGradients(), compress=ab.OkTopk(density=0.1 if rank == 0 else 0.2))
    except ab.DisagreementError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_densities_get_an_error(found: dict[str, list[Any]]) -> None:
    for message in found["wrong settings"]:
        assert "density=0.1" in message and "density=0.2" in message


def poisoned(rank: int) -> dict[str, Any]:
    model = GivenGradients()
    parallel = ab.DataParallel(model, plan=two_buckets(0.1), compress=ab.OkTopk(density=0.1), profile_steps=0)
    before: dict[str, torch.Tensor] = {}
    for step in range(10):
        model.zero_grad()
        one, other = gradients(step, rank)
        if step == 9:
            before = parallel.comm_state_dict()["residuals"]
            if rank == 1:
                one[3, 4] = float("inf")
        parallel(one, other).backward()
    after = parallel.comm_state_dict()["residuals"]
    assert model.first.grad is not None
    parallel.close()
    return {"grad": model.first.grad, "same": all(torch.equal(before[name], after[name]) for name in before)}


def test_a_gradient_that_is_not_finite_reaches_every_rank_and_no_residual(found: dict[str, list[Any]]) -> None:
    for answers in found["poisoned"]:
        assert not torch.isfinite(answers["grad"]).any() and answers["same"]


def refusals(rank: int) -> list[str]:
    """What DataParallel says to compressions that it cannot run."""

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))

    said = []
    wide = ab.Plan((ab.Bucket(("weight",), collective="oktopk:0.1"),))
    refused: list[tuple[nn.Module, dict[str, Any]]] = [
        (GivenGradients(), {"find_unused_parameters": True}),
        (Double(), {"plan": wide}),
    ]
    for module, options in refused:
        try:
            ab.DataParallel(module, compress=ab.OkTopk(), **options)
        except (ValueError, ab.PlanError) as error:
            said.append(str(error))
    closed = ab.DataParallel(GivenGradients(), compress=ab.OkTopk())
    closed.load_comm_state_dict({})  # what a run of one rank keeps
    closed.close()
    for use in (closed.comm_state_dict, lambda: closed.load_comm_state_dict({"residuals": {"first": torch.ones(1)}})):
        try:
            use()
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What two ranks saw in each case, all in one launch."""
    return cases_on_ranks(
        {
            "bfloat16": (narrow_steps, "bfloat16", "fp32", 0.0),
            "float16": (narrow_steps, "float16", "int8", 0.0),
            "bfloat16 with momentum": (narrow_steps, "bfloat16", "bf16", 0.5),
            "a long warm-up": (waited_for, 90, 40),
            "no steps": (waited_for, 0, 1),
            "wrong settings": (wrong_settings,),
            "poisoned": (poisoned,),
            "refusals": (refusals,),
        },
        2,
        timeout_s=90.0,
    )


def test_what_would_lose_gradients_is_refused(found: dict[str, list[Any]]) -> None:
    for said in found["refusals"]:
        assert len(said) == 4
        for words, message in zip(
            ("find_unused_parameters", "float32, bfloat16 and float16", "was closed", "closed"), said, strict=True
        ):
            assert words in message


@pytest.mark.parametrize("options", [{"density": 0.0}, {"density": "high"}, {"density": True}, {"warmup_steps": 3.0},
                                     {"start_density": "auto"}, {"density": None}])  # fmt: skip
def test_settings_that_mean_nothing_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ab.OkTopk(**options)


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(
        ValueError, match="compress is 'zip': expected one of bf16, int8, int4, auto, a list of kinds, Quantised"
    ):
        ab.DataParallel(GivenGradients(), compress="zip")
    assert not dist.is_initialized()
