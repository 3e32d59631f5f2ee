"""What --compress asks for, and the rivals among it, raced on real ranks: the same average everywhere, nothing lost."""

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.tools.bench.compress import OTHERS, Rival, compression
from anabranch.tools.bench.race import Turn
from anabranch.tools.bench.run import Settings, nic_counts_all, run
from anabranch.tools.bench.sparse import sparse_rivals
from anabranch.tools.bench.workload import replay_workload
from anabranch.tools.bench.zoo import Step
from anabranch.tools.report.documents import BASELINE, COMPUTE, OURS
from ranks import on_ranks

NETWORK = ab.Network.linear(3, 1e-4, 1e-9)


def test_what_it_means() -> None:
    assert compression("bf16") == "bf16"
    assert compression("oktopk") == ab.OkTopk(warmup_steps=0)
    assert compression("oktopk:0.05") == ab.OkTopk(density=0.05, warmup_steps=0)
    assert compression("oktopk:0.05:bf16") == ab.OkTopk(density=0.05, warmup_steps=0, wire="bf16")
    assert compression("oktopk:0.05:int8") == ab.OkTopk(density=0.05, warmup_steps=0, wire="int8")
    assert compression("oktopk:bf16") == ab.OkTopk(warmup_steps=0, wire="bf16")
    assert [compression(f"{name}:0.01") for name in OTHERS] == [Rival(name, 0.01) for name in OTHERS]
    assert OTHERS == ["topk", "gtopk", "dsa", "gaussian"]


@pytest.mark.parametrize("text", ["zip", "", "dense", "fp16", "bf16:0.1", "topK:0.1", "oktop:0.01"])
def test_what_is_unknown_is_named_with_what_is_allowed(text: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"expected bf16, int8, int4, auto, auto:int8, auto:oktopk:0.01, oktopk, .*, or a rival: topk:.*, gtopk:",
    ) as error:
        compression(text)
    assert f"--compress is {text!r}" in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "oktopk:",
        "oktopk:0",
        "oktopk:1.5",
        "gtopk",
        "gtopk:",
        "dsa:x",
        "topk:nan",
        "dsa:-1",
        "dsa:0.01:bf16",
        "oktopk:0.01:fp16",
    ],
)
def test_a_density_is_a_share(text: str) -> None:
    name = text.partition(":")[0]
    with pytest.raises(ValueError, match=rf"--compress is '{text}': expected a density in \(0, 1\], such as {name}:0"):
        compression(text)


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
    asked = {f"{name}:{density:g}": Rival(name, density) for name in OTHERS}
    for contestant in sparse_rivals(model, step, trace_of(model), NETWORK, asked, []):
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


@pytest.mark.slow
def test_rivals_at_density_one_average_as_ddp_does() -> None:
    ranks = on_ranks(raced, 3, 1.0)
    expected = torch.tensor([found["own"] for found in ranks]).mean(dim=0)
    for name in ("topk:1", "gtopk:1", "dsa:1"):
        for found in ranks:
            torch.testing.assert_close(torch.tensor(found[name]), expected, msg=name)


def test_rivals_send_a_part_and_the_same_to_everyone() -> None:
    first, *others = on_ranks(raced, 3, 0.1)
    numel = len(first["own"])
    for name, most in {"topk:0.1": 3, "gtopk:0.1": 1, "dsa:0.1": 3}.items():
        assert all(found[name] == first[name] for found in others)
        sent = sum(value != 0 for value in first[name])
        assert 0 < sent <= most * round(0.1 * numel), name
    assert all(found["gaussian:0.1"] == first["gaussian:0.1"] for found in others)


def remembered(rank: int) -> list[float]:
    """The residual of a constant gradient after two turns, of three steps each once the layout is in force."""
    model = nn.Linear(8, 1, bias=False)

    def step(called: nn.Module) -> None:
        called.zero_grad(set_to_none=True)
        called(torch.arange(1.0, 9.0)).sum().backward()

    (contestant,) = sparse_rivals(model, step, trace_of(model), NETWORK, {"topk:0.125": Rival("topk", 0.125)}, [])
    state = contestant.enter.args[-1]._families[0]._state  # type: ignore[attr-defined]
    for _ in range(2):
        with contestant.enter() as go:
            for _ in range(contestant.warmup + 3):
                go()
    (bucket,) = state.buckets()
    return [float(bucket.step), *bucket.residual.tolist()]


def test_residuals_are_kept_between_turns() -> None:
    steps, *residual = on_ranks(remembered, 2)[0]
    assert steps > 6 and sum(value != 0 for value in residual) == 7  # all but the one that was sent last


def in_the_buckets_of(rank: int) -> list[str]:
    model, step = model_and_step(rank)
    theirs = ab.Plan((
        ab.Bucket(("2.bias", "0.bias")), ab.Bucket(("2.weight", "0.weight"), collective="oktopk:0.01"),
    ))  # fmt: skip
    dense = ab.planners.using(theirs, "bf16")
    asked = {"dsa:0.1": Rival("dsa", 0.1)}
    (chosen,) = sparse_rivals(model, step, trace_of(model), NETWORK, asked, [None, dense, theirs])
    with chosen.enter() as go:
        for _ in range(chosen.warmup):
            go()
    assert chosen.plan is not None
    return [f"{bucket.names} {bucket.collective}" for bucket in chosen.plan.buckets]


def test_they_run_in_the_buckets_that_ok_topk_sends() -> None:
    for told in on_ranks(in_the_buckets_of, 2):
        assert told == ["('2.bias', '0.bias') dense", "('2.weight', '0.weight') dsa:0.1"]


def whole(rank: int) -> list[str]:
    tensors = [ab.TensorSpec(f"layer{i}.weight", 3000 + 10 * i, 4, 0.001 * (i + 1)) for i in range(3)]
    workload = replay_workload("tiny", ab.Trace(tuple(tensors), 0.001))
    wires = ["bf16", *(f"{name}:0.1" for name in OTHERS)]
    settings = Settings(
        iters=1, batches=1, warmup=0, profile_steps=2, sizes_mib=[1], lanes=[2], compress=wires, only=["none"]
    )
    found = run(workload, settings, lambda _: None)
    assert all(row.step_s > 0 and row.sent_nbytes is None for row in found.rows)
    return [row.name for row in found.rows]


@pytest.mark.campaign
def test_what_was_asked_for_by_name_runs_whatever_only_says() -> None:
    wanted = {COMPUTE, BASELINE, OURS, f"{OURS}, bf16", *(f"{name}:0.1" for name in OTHERS)}
    for names in on_ranks(whole, 2, timeout_s=100):
        assert set(names) == wanted


def test_cards_are_believed_if_they_saw_ddp_send_its_gradients() -> None:
    assert nic_counts_all([Turn(BASELINE, 0.1, 1e6), Turn(BASELINE, 0.1, 9e6), Turn(BASELINE, 0.1, 0.0)], 1_000_000)
    assert not nic_counts_all([Turn(BASELINE, 0.1, 900.0)], 1_000_000)
