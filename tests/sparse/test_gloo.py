"""Real ranks on Gloo end with the very bits of the virtual ones, driven by the lanes that training uses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch.bench.virtual import VirtualWorld
from anabranch.comm.communicator import GroupCommunicator
from anabranch.comm.lanes import Lanes, Message
from anabranch.sparse.oktopk import OkTopk, exchange
from ranks import on_ranks
from sparse.worlds import EXCHANGES, gradients, states, step

NUMEL, DENSITY, STEPS = 900, 0.02, 4
SETTINGS = OkTopk(warmup_steps=2, start_density=0.2, decay_steps=2, region_period=2, threshold_period=2)


def one_after_another(rank: int) -> dict[str, Any]:
    """Every exchange, on a host lane."""
    world_size = dist.get_world_size()
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, torch.device("cpu"))
    lanes.grow(1)
    comm = GroupCommunicator(lanes[0].group)
    found = {}
    for name, way in EXCHANGES.items():
        state = states(world_size, NUMEL)[rank]
        for number in range(STEPS):
            gradient = gradients(world_size, NUMEL, number)[rank]
            steps = way(gradient, state, comm, float(world_size), DENSITY)
            lanes[0].submit(Message(steps, gradient, name)).wait()
        found[name] = [gradient, state.residual, state.boundaries]
    lanes.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_real_ranks_do_what_virtual_ones_do(world_size: int) -> None:
    answers = on_ranks(one_after_another, world_size)
    for name, way in EXCHANGES.items():
        held, world = states(world_size, NUMEL), VirtualWorld(world_size)
        for number in range(STEPS):
            made = gradients(world_size, NUMEL, number)
            step(way, made, held, world, DENSITY)
        for rank, answer in enumerate(answers):
            gradient, residual, boundaries = answer[name]
            assert torch.equal(boundaries, held[rank].boundaries)
            if name == "dense":  # Gloo adds in an order of its own
                assert torch.allclose(gradient, made[rank], rtol=1e-5)
            else:
                assert torch.equal(gradient, made[rank]), name
                assert torch.equal(residual, held[rank].residual), name


def schedule(rank: int) -> dict[str, Any]:
    """Warm-up, falling density, NaN on one rank, half precision."""
    assert dist.group.WORLD is not None
    comm, size = GroupCommunicator(dist.group.WORLD), dist.get_world_size()
    state, shares, conserved = states(size, NUMEL)[rank], [], []
    for number in range(6):
        gradient = gradients(size, NUMEL, number)[rank]
        before = (gradient + state.residual).double()
        for work in exchange(gradient, state, comm, float(size), DENSITY, SETTINGS):
            work.wait()
        balance = before - state.residual.double()
        dist.all_reduce(balance)
        conserved.append(torch.allclose(balance, gradient.double() * size, rtol=1e-5, atol=1e-5))
        shares.append(float((gradient != 0).double().mean()))
    poisoned = gradients(size, NUMEL, 7)[rank].to(torch.bfloat16)
    if rank == 0:
        poisoned[3] = float("nan")
    before = state.residual.clone()
    for work in exchange(poisoned, state, comm, float(size), DENSITY, SETTINGS):
        work.wait()
    same = torch.equal(before, state.residual)
    return {"shares": shares, "conserved": conserved, "nan": bool(poisoned.isnan().all()), "same": same}


def test_the_whole_course_on_real_ranks() -> None:
    for answer in on_ranks(schedule, 2):
        assert answer["shares"][:2] == [1.0, 1.0]
        assert 0.1 < answer["shares"][2] < 0.3
        assert answer["shares"][-1] == pytest.approx(DENSITY, rel=0.25)
        assert all(answer["conserved"])
        assert answer["nan"]
        assert answer["same"]


def test_float64_is_refused() -> None:
    world, state = VirtualWorld(1), states(1, 4)[0]
    with pytest.raises(ValueError, match="float64"):
        world.run([exchange(torch.ones(4, dtype=torch.float64), state, world.comms[0], 1.0, 0.5, OkTopk())])
