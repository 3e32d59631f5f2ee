"""Real ranks on Gloo end with the same bits as virtual ranks, driven by the lanes that training uses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.communicator import Communicator
from anabranch.exchange.lanes import Lanes, Message
from exchange.sparse.worlds import EXCHANGES, gradients, states, step
from ranks import on_ranks

NUMEL, DENSITY, STEPS = 900, 0.02, 4


def one_after_another(rank: int) -> dict[str, Any]:
    """Every exchange, on a host lane."""
    world_size = dist.get_world_size()
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, torch.device("cpu"))
    lanes.grow(1)
    comm = Communicator(lanes[0].group)
    found = {}
    for name, exchange in EXCHANGES.items():
        state = states(world_size, NUMEL)[rank]
        for number in range(STEPS):
            gradient = gradients(world_size, NUMEL, number)[rank]
            steps = exchange(gradient, state, comm, float(world_size), DENSITY)
            lanes[0].submit(Message([steps], gradient, name)).wait()
        found[name] = [gradient, state.residual, state.boundaries]
    lanes.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_real_ranks_do_what_virtual_ones_do(world_size: int) -> None:
    answers = on_ranks(one_after_another, world_size)
    for name, exchange in EXCHANGES.items():
        held, world = states(world_size, NUMEL), VirtualWorld(world_size)
        for number in range(STEPS):
            made = gradients(world_size, NUMEL, number)
            step(exchange, made, held, world, DENSITY)
        for rank, answer in enumerate(answers):
            gradient, residual, boundaries = answer[name]
            assert torch.equal(boundaries, held[rank].boundaries)
            if name == "dense":  # Gloo adds in an order of its own
                assert torch.allclose(gradient, made[rank], rtol=1e-5)
            else:
                assert torch.equal(gradient, made[rank]), name
                assert torch.equal(residual, held[rank].residual), name
