"""Emulated groups beside real ones on the same ranks: the same values, and no sooner than the model says."""

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from anabranch.exchange.groups import timeout_of
from anabranch.tools.lab.emulation import link
from anabranch.tools.lab.emulation.settings import EmulatedNetwork
from ranks import group_timeout, on_ranks
from tools.lab.emulation.emulated_groups import Group, emulated, real

Operation = Callable[[Group, int], list[torch.Tensor]]

NUMEL = 1 << 10
SLOW = EmulatedNetwork(3, 1e6, 1e-3)  # 4 KiB take 33 ms on a link, a hop 1 ms


def numbers(rank: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 1000 * rank


# ------------------------------------------------------------------------------------------------ every operation


def all_reduce(group: Group, rank: int) -> list[torch.Tensor]:
    mine = numbers(rank)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
    return [mine]


def all_reduce_later(group: Group, rank: int) -> list[torch.Tensor]:
    mine, other = numbers(rank), numbers(rank + 1)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in (mine, other)]
    (first,) = works[0].get_future().wait()
    assert works[0].get_future().done() and works[1].wait() and works[1].is_completed()
    return [mine, other, first, *works[1].result()]


def all_reduce_together(group: Group, rank: int) -> list[torch.Tensor]:
    mine, other = numbers(rank), numbers(rank + 1)
    with distributed_c10d._coalescing_manager(group):
        dist.all_reduce(mine, group=group)
        dist.all_reduce(other, group=group)
    return [mine, other]


def all_reduce_sparse(group: Group, rank: int) -> list[torch.Tensor]:
    torch.sparse.check_sparse_tensor_invariants.enable()  # torch warns whoever has not said
    mine = torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), torch.ones(2, 5), (8, 5))
    dist.all_reduce(mine, group=group)
    return [mine.to_dense()]


def functional(group: Group, rank: int) -> list[torch.Tensor]:
    name = group.group_name
    summed = torch.ops._c10d_functional.all_reduce(numbers(rank), "sum", name)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(numbers(rank), 3, name)
    return [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in (summed, gathered)]


def gathers(group: Group, rank: int) -> list[torch.Tensor]:
    parts = [torch.zeros(NUMEL) for _ in range(3)]
    dist.all_gather(parts, numbers(rank), group=group)
    whole = torch.zeros(3 * NUMEL)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, numbers(rank), group=group)
    return [*parts, whole]


def reduce_scatters(group: Group, rank: int) -> list[torch.Tensor]:
    mine, other = torch.zeros(NUMEL), torch.zeros(NUMEL)
    dist.reduce_scatter(mine, [numbers(rank + i) for i in range(3)], group=group)
    single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    single(other, numbers(rank, 3 * NUMEL), group=group)
    return [mine, other]


def all_to_all(group: Group, rank: int) -> list[torch.Tensor]:
    received = torch.zeros(3 * NUMEL)
    dist.all_to_all_single(received, numbers(rank, 3 * NUMEL), group=group)
    uneven = torch.zeros(3 * (rank + 1))
    dist.all_to_all_single(uneven, numbers(rank, 6), [rank + 1] * 3, [1, 2, 3], group=group)
    return [received, uneven]


def rooted(group: Group, rank: int) -> list[torch.Tensor]:
    sent, reduced, scattered_, gathered = numbers(rank), numbers(rank), torch.zeros(NUMEL), []
    dist.broadcast(sent, group_src=2, group=group)
    dist.reduce(reduced, group_dst=1, group=group)
    dist.scatter(scattered_, [numbers(i) for i in range(3)] if rank == 1 else None, group_src=1, group=group)
    if rank == 0:
        gathered = [torch.zeros(NUMEL) for _ in range(3)]
    dist.gather(numbers(rank), gathered or None, group_dst=0, group=group)
    return [sent, *[reduced] * (rank == 1), scattered_, *gathered]


def messages(group: Group, rank: int) -> list[torch.Tensor]:
    there, back, either = torch.zeros(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)
    after, before = (rank + 1) % 3, (rank - 1) % 3
    works = [dist.isend(numbers(rank), group=group, group_dst=after), dist.irecv(there, group=group, group_src=before)]
    assert all(work is not None and work.wait() for work in works)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, numbers(rank), group=group, group_peer=before),
            dist.P2POp(dist.irecv, back, group=group, group_peer=after),
        ]
    ):
        work.wait()
    if rank == 0:
        assert dist.recv(either, group=group) == 1
    if rank == 1:
        dist.send(numbers(rank), group=group, group_dst=0)
    return [there, back, either]


def barriers(group: Group, rank: int) -> list[torch.Tensor]:
    dist.barrier(group=group)
    dist.monitored_barrier(group=group)
    return [torch.ones(1)]


OPERATIONS: Mapping[str, Operation] = {
    operation.__name__: operation
    for operation in (
        all_reduce, all_reduce_later, all_reduce_together, all_reduce_sparse, functional, gathers, reduce_scatters,
        all_to_all, rooted, messages, barriers,
    )
}  # fmt: skip
# Milliseconds under SLOW: 33 per 4 KiB on the link (32.768, in full), 1 per hop.
KIB4_MS = NUMEL * 4 * 8 / 1e6 * 1e3
LEAST_MS = {
    "all_reduce": 4 + 4 / 3 * KIB4_MS,
    "all_reduce_later": 4 + 8 / 3 * KIB4_MS,
    "all_reduce_together": 4 + 8 / 3 * KIB4_MS,
    "all_reduce_sparse": 2,
    "functional": 2 + (4 / 3 + 2) * KIB4_MS,
    "gathers": 2 * (2 + 2 * KIB4_MS),
    "reduce_scatters": 2 * (2 + 2 * KIB4_MS),
    "all_to_all": 2 * 2 + 2 * KIB4_MS,
    "rooted": 2 * (2 + KIB4_MS) + 2 * (1 + 2 * KIB4_MS),
    "messages": 2 * (1 + KIB4_MS),
    "barriers": 2 * 2,
}


def both(rank: int) -> dict[str, Any]:
    """Every operation on the real group and on an emulated one."""
    slow = emulated(SLOW)
    found: dict[str, Any] = {}
    for name, operation in OPERATIONS.items():
        expected = operation(real(), rank)
        begun = time.monotonic()
        results = operation(slow, rank)
        found[name] = ([expected, results], (time.monotonic() - begun) * 1e3)
    return found


@pytest.fixture(scope="module")
def of_both() -> list[dict[str, Any]]:
    return on_ranks(both, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_are_the_real_ones_and_come_no_sooner_than_the_model_says(
    name: str, of_both: list[dict[str, Any]]
) -> None:
    for answers in of_both:
        (expected, found), took_ms = answers[name]
        assert len(expected) == len(found)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert LEAST_MS[name] <= took_ms, "a machine may be busy; it cannot be too fast"


def habits(rank: int) -> dict[str, Any]:
    """What programs and this package ask of a group apart from collectives."""
    slow = emulated(SLOW)
    tiny = torch.zeros(1)
    dist.all_reduce(tiny, group=slow)
    naps: list[float] = []

    def counted(seconds: float) -> None:
        naps.append(seconds)
        time.sleep(seconds)

    with mock.patch.object(link, "sleep", counted):
        dist.all_reduce(numbers(rank, 20 * NUMEL), group=slow)  # most of a second
    refused = ""
    try:
        slow.split_group([0, 1])
    except NotImplementedError as error:
        refused = str(error)
    answer = {
        "backend": dist.get_backend(slow),
        "name": slow.name(),
        "timeout": timeout_of(slow) == group_timeout(),
        "emulated": type(slow).__name__ != type(real()).__name__,
        "store": slow.get_group_store() is not None,
        "naps": naps,
        "refused": refused,
        "class": distributed_c10d.ProcessGroup is dist.ProcessGroup,
    }
    gone = weakref.ref(slow)
    dist.destroy_process_group(slow)
    del slow
    return {**answer, "gone": gone() is None}


def test_a_group_is_what_programs_expect_and_sleeps_while_it_waits() -> None:
    for answer in on_ranks(habits, 2):
        assert answer["backend"] == answer["name"] == "gloo" and answer["timeout"] and answer["store"]
        assert answer["emulated"] and answer["class"] and answer["gone"]
        assert 1 <= len(answer["naps"]) < 10, "it sleeps until the end, and does not ask again and again"
        assert "use new_group" in answer["refused"]


def two_groups(rank: int) -> list[float]:
    groups = [emulated(SLOW)]
    groups.append(emulated(SLOW, "another"))
    begun = time.monotonic()
    works = [dist.all_reduce(numbers(rank, 4 * NUMEL), group=group, async_op=True) for group in groups]
    for work in works:
        assert work is not None
        work.wait()
    return [time.monotonic() - begun]


def test_groups_share_the_network_interface() -> None:
    for (took_s,) in on_ranks(two_groups, 2):
        assert took_s >= 2e-3 + 2 * 4 * KIB4_MS * 1e-3
