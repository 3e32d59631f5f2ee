"""The virtual world: does what collectives do, counts what they send, and says when ranks disagree."""

from typing import Any

import pytest
import torch
from benchmarks.virtual import VirtualWorld

from anabranch.exchange.communicator import MAX, Communicator
from anabranch.exchange.interface import Steps
from anabranch.values.errors import DisagreementError
from exchange.sparse.worlds import EXCHANGES, gradients, states, step


def everything(comm: Communicator, found: dict[str, Any]) -> Steps:
    """Each operation once, with numbers that tell who sent them."""
    ranks, me = comm.size, comm.rank
    even = torch.empty(ranks, 2)
    yield comm.all_to_all(even, torch.arange(2.0 * ranks).view(ranks, 2) + 100 * me, "even")
    counts, coming = [(me + j) % 3 for j in range(ranks)], [(i + me) % 3 for i in range(ranks)]
    uneven = torch.empty(sum(coming), dtype=torch.int64)
    yield comm.all_to_all(uneven, torch.full((sum(counts),), me), "uneven", coming, counts)
    gathered = torch.empty(ranks, dtype=torch.int64)
    yield comm.all_gather(gathered, torch.tensor([me]), "gather")
    ragged = torch.empty(sum(range(ranks)), dtype=torch.int64)
    yield comm.all_gather_uneven(ragged, torch.full((me,), me), list(range(ranks)), "ragged")
    total, most = torch.tensor([me + 1]), torch.tensor([me * 7 % 5])
    yield comm.all_reduce(total, "sum")
    yield comm.all_reduce(most, "max", MAX)
    found.update(even=even, uneven=uneven, coming=coming, gathered=gathered, ragged=ragged, total=total, most=most)


def test_operations() -> None:
    for ranks in [1, 2, 5]:
        world = VirtualWorld(ranks)
        found: list[dict[str, Any]] = [{} for _ in range(ranks)]
        world.run([everything(comm, found[comm.rank]) for comm in world.comms])
        for me, got in enumerate(found):
            assert got["even"].tolist() == [[100 * i + 2 * me, 100 * i + 2 * me + 1] for i in range(ranks)]
            assert got["uneven"].tolist() == [i for i in range(ranks) for _ in range(got["coming"][i])]
            assert got["gathered"].tolist() == list(range(ranks))
            assert got["ragged"].tolist() == [i for i in range(ranks) for _ in range(i)]
            assert got["total"].item() == ranks * (ranks + 1) // 2
            assert got["most"].item() == max(i * 7 % 5 for i in range(ranks))


def test_bytes_and_messages() -> None:
    world = VirtualWorld(4)
    world.run([everything(comm, {}) for comm in world.comms])
    counts = world.byte_counts
    assert counts.sent(["even"]).tolist() == [24] * 4
    assert counts.messages(["even"]).tolist() == [3] * 4
    table = [[8 * ((i + j) % 3) * (i != j) for j in range(4)] for i in range(4)]  # int64
    assert counts.sent(["uneven"]).tolist() == [sum(row) for row in table]
    assert counts.received(["uneven"]).tolist() == [sum(row[j] for row in table) for j in range(4)]
    assert counts.received(["ragged"]).tolist() == [48 - 8 * i for i in range(4)]
    assert counts.sent(["sum"]).tolist() == [12] * 4
    assert counts.received(["even"]).tolist() == [24] * 4
    assert counts.volume() >= counts.volume(["even", "uneven"])
    counts.clear()
    assert counts.phases == []


def disagreeing(comm: Communicator, way: str) -> Steps:
    """Rank 1 does something else."""
    odd = comm.rank == 1
    one, many = torch.zeros(1), torch.zeros(comm.size)
    if way == "operation" and odd:
        yield comm.all_gather(many, one, "x")
    elif way == "phase" and odd:
        yield comm.all_reduce(one, "y")
    elif way == "size" and odd:
        yield comm.all_reduce(torch.zeros(2), "x")
    elif way == "counts":
        yield comm.all_to_all(torch.zeros(1 + odd), one, "x", [1 + odd, 0], [1, 0])
    elif not (way == "end" and odd):
        yield comm.all_reduce(one, "x")
        if way == "twice" and odd:
            comm.all_reduce(one, "x")
            yield comm.all_reduce(one, "x")


def test_disagreement_is_told() -> None:
    for way in ["operation", "phase", "size", "counts", "end", "twice"]:
        world = VirtualWorld(2)
        with pytest.raises(DisagreementError, match="rank"):
            world.run([disagreeing(comm, way) for comm in world.comms])


def test_a_virtual_rank_cannot_wait() -> None:
    work = VirtualWorld(2).comms[0].all_reduce(torch.zeros(1), "x")
    with pytest.raises(RuntimeError, match="yield"):
        work.wait()


def test_bad_worlds() -> None:
    with pytest.raises(ValueError, match="at least one"):
        VirtualWorld(0)
    with pytest.raises(ValueError, match="one per rank"):
        VirtualWorld(2).run([iter(())])


@pytest.mark.campaign
def test_2048_ranks_on_a_small_vector() -> None:
    held, world = states(2048, 4096), VirtualWorld(2048)
    made = gradients(2048, 4096, 0)
    step(EXCHANGES["fixed"], made, held, world, 0.25)
    assert torch.equal(made[0], made[2047])
    assert bool(made[0].any())
