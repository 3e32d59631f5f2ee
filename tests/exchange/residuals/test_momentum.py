"""Momentum before sending: what is sent is conserved, velocities of sent values restart, and belong to parameters."""

from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.virtual import VirtualWorld

import anabranch as ab
from anabranch.exchange import error_samples
from anabranch.exchange.residuals.bucket_states import BucketStates
from anabranch.exchange.residuals.momentum import Velocity
from anabranch.exchange.sparse.oktopk import exchange
from anabranch.values.kinds.options import OkTopk
from exchange.sparse.worlds import gradients, states
from ranks import on_ranks

RANKS, NUMEL, SHARE = 3, 600, 0.9


def test_naive_twin() -> None:
    """Velocities, one rank after another, by hand; then their sum is what was applied plus the residuals."""
    world, held = VirtualWorld(RANKS), states(RANKS, NUMEL)
    velocities = [torch.zeros(NUMEL) for _ in range(RANKS)]
    options = OkTopk(warmup_steps=0, deterministic=True)
    sent, applied = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(12):
        made = gradients(RANKS, NUMEL, step)
        velocities = [SHARE * v + (1 - SHARE) * g for v, g in zip(velocities, made, strict=True)]
        sent += sum(v.double() for v in velocities)
        world.run([
            exchange(g, state, comm, 1.0, 0.05, options, Velocity(state.sent_velocity(), SHARE))
            for g, state, comm in zip(made, held, world.comms, strict=True)
        ])  # fmt: skip
        applied += made[0].double()
        velocities = [torch.where(s.residual == 0, 0.0, v) for s, v in zip(held, velocities, strict=True)]
        for state, velocity in zip(held, velocities, strict=True):
            torch.testing.assert_close(state.velocity, velocity)
        assert any(bool((state.residual == 0).any()) for state in held)
    residual = sum(state.residual.double() for state in held)
    torch.testing.assert_close(applied + residual, sent, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), 3e38])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_what_cannot_be_sent_leaves_no_trace(wire: Any, bad: float) -> None:
    world, held, options = VirtualWorld(2), states(2, NUMEL), OkTopk(warmup_steps=0, wire=wire)
    for step in range(3):
        made = gradients(2, NUMEL, step)
        if step == 1:
            made[1][7] = bad
        world.run([
            exchange(g, state, comm, 2.0, 0.05, options, Velocity(state.sent_velocity(), SHARE))
            for g, state, comm in zip(made, held, world.comms, strict=True)
        ])  # fmt: skip
        assert bool(made[0].isnan().all()) == (step == 1)
        assert all(bool(state.sent_velocity().isfinite().all()) for state in held)


def test_it_belongs_to_parameters() -> None:
    """Buckets part and join, checkpoints come and go: each parameter keeps its own."""
    kept, numels = BucketStates(0, 1), {"a": 30, "b": 20, "c": 10}

    def velocity(states: BucketStates, *names: str) -> torch.Tensor:
        return states.bucket(names, [numels[name] for name in names]).sent_velocity()

    for names in (("a", "b"), ("c",)):
        velocity(kept, *names).normal_()
    before = {name: piece.values.clone() for name, piece in kept.all_velocities().items()}
    assert torch.equal(velocity(kept, "c", "a"), torch.cat([before["c"], before["a"]]))
    other = BucketStates(0, 1)
    other.load_state_dict(kept.state_dict())
    assert other.all_velocities().keys() == before.keys()
    assert all(torch.equal(other.all_velocities()[name].values, piece) for name, piece in before.items())
    other.rescale(1.0)
    other.rescale(2.0)
    assert torch.equal(velocity(other, "b"), 2 * before["b"])


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(30, 30, bias=False), torch.nn.Linear(30, 30, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.first(x).tanh())
        return hidden.square().mean()


def resumed(rank: int) -> None:
    plan = ab.Plan((ab.Bucket(("second.weight", "first.weight"), collective="oktopk:0.1"),))
    options = ab.OkTopk(density=0.1, warmup_steps=0, momentum=SHARE, deterministic=True)
    wrapped = partial(ab.DataParallel, plan=plan, compress=options, profile_steps=0)

    def trained(model: Two, parallel: ab.DataParallel, first: int, last: int) -> None:
        for step in range(first, last):
            model.zero_grad()
            parallel(torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.5)

    whole, part, rest = Two(), Two(), Two()
    through, stopped = wrapped(whole), wrapped(part)
    trained(whole, through, 0, 8)
    trained(part, stopped, 0, 4)
    kept = stopped.comm_state_dict()
    assert any(piece.any() for piece in kept["velocities"].values())
    going_on = wrapped(rest)
    rest.load_state_dict(part.state_dict())
    going_on.load_comm_state_dict(kept)
    trained(rest, going_on, 4, 8)
    for a, b in zip(whole.parameters(), rest.parameters(), strict=True):
        assert torch.equal(a, b)
    for parallel in (through, stopped, going_on):
        parallel.close()


def test_resuming_is_exact() -> None:
    on_ranks(resumed, 2)


def sampled_error(rank: int, density: float) -> float:
    """The measured error of one bucket's averages; every step is sampled."""
    error_samples.FIRST, error_samples.PERIOD = 1, 1
    kind = f"oktopk:{density:g}"
    plan = ab.Plan((ab.Bucket(("second.weight", "first.weight"), collective=kind),))
    options = ab.OkTopk(density=density, warmup_steps=0, momentum=SHARE, deterministic=True)
    model = Two()
    parallel = ab.DataParallel(model, plan=plan, compress=options, profile_steps=0)
    for step in range(6):
        model.zero_grad()
        parallel(torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
    (line,) = (line for line in parallel.explain().splitlines() if line.split()[2:3] == [kind])
    parallel.close()
    return float(line.split()[-2].rstrip("%")) / 100


def test_its_error_is_that_of_velocities() -> None:
    """What gradients differ from velocities is no error: where all of them are sent, there is none."""
    assert max(on_ranks(sampled_error, 2, 1.0)) < 1e-4
    some = on_ranks(sampled_error, 2, 0.1)
    assert some[0] == some[1] and 0.3 < some[0] < 1.0
