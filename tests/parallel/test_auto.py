"""compress="auto" under DataParallel: the mix that the network calls for, the same bits everywhere, nothing lost."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from anabranch import Network
from anabranch.exchange import error_samples
from anabranch.values.kinds.fidelity import LADDER, error_of
from parallel.twins import SCENARIOS, batch, bits, plain_train, steps
from ranks import cases_on_ranks, on_ranks
from tuning.given_times import give_times

# Seconds per byte of each kind, on a link where rounding pays and on one where nothing does.
SHARES = {"dense": 1.0, "bf16": 0.5, "int8": 0.25, "int4": 0.14, "oktopk:0.1": 0.1, "oktopk:0.05": 0.06} | {
    "oktopk:0.02": 0.04,
    "oktopk:0.01": 0.03,
}
WIDE = 64
# Tries what is predicted to gain, and keeps it whatever is measured.
BELIEVES = replace(SCENARIOS["keeps the plan"], min_predicted_gain=0.0)


class Wide(nn.Module):
    """Matrices that are worth compressing, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x.to(next(self.parameters()).dtype))
        return out


def told(s_per_byte: float, ranks: int) -> Network:
    return Network(ranks, {kind: ab.Curve.linear(1e-5, share * s_per_byte) for kind, share in SHARES.items()})


def tuned_run(rank: int, compress: Any, s_per_byte: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Train until the plan is chosen, and some steps more; sample errors soon and often."""
    error_samples.FIRST, error_samples.PERIOD = 1, 2
    give_times(lambda plan: 1e-2)  # so that the network alone decides
    torch.manual_seed(0)
    network = told(s_per_byte, dist.get_world_size())
    ours = ab.DataParallel(Wide().to(dtype), compress=compress, network=network, policy=BELIEVES)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    for step in steps(ours):
        plain_train(ours, optimizer, step)
    for step in range(12):
        plain_train(ours, optimizer, step)
    buckets = ours.plan.buckets if ours.plan is not None else ()
    kinds = {name: bucket.collective for bucket in buckets for name in bucket.names}
    state = torch.cat([p.detach().flatten() for p in ours.parameters()])
    answer = {"kinds": kinds, "bits": bits(state).hex(), "explained": ours.explain()}
    answer["residuals"] = ours.comm_state_dict().get("residuals", {})
    ours.close()
    return answer


def measured_error(explained: str, kind: str) -> float:
    """The error in the line of the first bucket of this kind that was sampled."""
    lines = [line for line in explained.splitlines() if line.split()[2:3] == [kind] and "%" in line]
    return float(lines[0].split()[-2].rstrip("%")) / 100


ALLOWED: dict[str, tuple[Any, float, set[str]]] = {
    "auto": ("auto", 1e-3, {"dense", "bf16", "int8", "int4"}),
    "all": (ab.Auto(at_least="oktopk:0.01", oktopk=ab.OkTopk(warmup_steps=0)), 1e-3, set(LADDER)),
    "at least int8": (ab.Auto(at_least="int8"), 1e-3, {"dense", "bf16", "int8"}),
    "a list": (["int4", "bf16"], 1e-3, {"dense", "bf16", "int4"}),
    "a fast network": ("auto", 1e-12, {"dense"}),
}


@pytest.mark.slow
def test_the_network_decides_how_faithful_gradients_travel() -> None:
    cases = {name: (tuned_run, compress, s_per_byte) for name, (compress, s_per_byte, _) in ALLOWED.items()}
    for name, answers in cases_on_ranks(cases, 2, timeout_s=120.0).items():
        check_chosen(answers, *ALLOWED[name][1:])


def check_chosen(answers: list[dict[str, Any]], s_per_byte: float, allowed: set[str]) -> None:
    """Kinds are among those allowed; on a slow network the least faithful of them carries the largest matrix."""
    assert answers[0]["bits"] == answers[1]["bits"] and answers[0]["kinds"] == answers[1]["kinds"]
    chosen = set(answers[0]["kinds"].values())
    assert chosen <= allowed
    if s_per_byte > 1e-6:  # a slow link: the largest matrix travels by the least faithful kind
        lossiest = max(allowed, key=error_of)
        assert answers[0]["kinds"]["layers.2.weight"] == lossiest
        assert "as faithful as is hidden" in answers[0]["explained"]
        biases = [kind for name, kind in answers[0]["kinds"].items() if name.endswith("bias")]
        assert not any(kind.startswith("oktopk") for kind in biases)
        error = measured_error(answers[0]["explained"], lossiest)
        assert {"int8": 1e-3, "int4": 0.02}.get(lossiest, 0.2) < error < {"int8": 0.03, "int4": 0.6}.get(lossiest, 3.0)


def test_gradients_of_16_bits_are_rounded_too() -> None:
    cases = {str(dtype): (tuned_run, "auto", 1e-3, dtype) for dtype in (torch.bfloat16, torch.float16)}
    for answers in cases_on_ranks(cases, 2).values():
        assert answers[0]["bits"] == answers[1]["bits"] and answers[0]["kinds"] == answers[1]["kinds"]
        assert answers[0]["kinds"]["layers.2.weight"] == "int4"
        assert set(answers[0]["kinds"].values()) <= {"dense", "int8", "int4"}, "bf16 would not save a byte"
        assert 0.02 < measured_error(answers[0]["explained"], "int4") < 0.3
        for answer in answers:
            assert answer["residuals"]["layers.2.weight"].dtype == torch.float32


def mixed_run(rank: int) -> dict[str, torch.Tensor]:
    """A plan of several kinds, given: gradients of given values, what was applied and what is kept."""
    torch.manual_seed(0)
    model = Wide()
    names = [name for name, _ in model.named_parameters()]
    plan = ab.Plan((
        ab.Bucket(("layers.4.weight",), collective="int4"),
        ab.Bucket(("layers.2.weight",), collective="oktopk:0.1"),
        ab.Bucket(("layers.0.weight",), collective="oktopk:0.02"),
        ab.Bucket(tuple(name for name in names if name.endswith("bias")), collective="dense"),
    ))  # fmt: skip
    parallel = ab.DataParallel(model, compress=ab.Auto(at_least="oktopk:0.02"), plan=plan, profile_steps=0)
    computed = applied = torch.zeros(0)
    for step in range(8):
        parallel.zero_grad()
        with torch.no_grad():
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        own = Wide()
        own.load_state_dict({name: weights[name] for name in weights})
        own(batch(step)).square().mean().backward()
        parallel(batch(step)).square().mean().backward()
        flat, averaged = (
            torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]) for module in (own, model)
        )
        computed = computed + flat if len(computed) else flat
        applied = applied + averaged if len(applied) else averaged.clone()
    kept = parallel.comm_state_dict()["residuals"]
    residual = torch.cat([
        kept.get(name, torch.zeros(p.numel())).flatten() for name, p in model.named_parameters()
    ])  # fmt: skip
    parallel.close()
    return {"computed": computed, "applied": applied, "residual": residual}


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mix_of_kinds_loses_nothing(world_size: int) -> None:
    answers = on_ranks(mixed_run, world_size)
    computed = sum(answer["computed"].double() for answer in answers)
    kept = torch.stack([answer["residual"].double() for answer in answers]).sum(0)
    torch.testing.assert_close(world_size * answers[0]["applied"].double() + kept, computed, rtol=1e-4, atol=1e-5)
    assert float(kept.abs().max()) > 0


def refused_run(rank: int) -> str:
    try:
        ab.DataParallel(Wide(), compress=ab.Auto(), find_unused_parameters=True).close()
    except ValueError as error:
        return str(error)
    return "was allowed"


def test_with_unused_parameters_it_is_refused_by_name() -> None:
    assert on_ranks(refused_run, 2)[0].startswith("compress=Auto(...) with find_unused_parameters=True")
