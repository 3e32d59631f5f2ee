"""Lanes: one message after another, errors that say what was waited for, threads that end."""

import gc
import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch.exchange import lanes as lanes_module
from anabranch.exchange.dense import dense
from anabranch.exchange.groups import timeout_of
from anabranch.exchange.lanes import HostLane, Lanes, Message
from anabranch.values.errors import CollectiveError
from ranks import group_timeout, on_ranks, patience

CPU = torch.device("cpu")


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def alive() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("anabranch-lane"))


def _note(ended: list[int], number: int, works: list[dist.Work], is_last: bool) -> None:
    assert works and is_last
    ended.append(number)


def many_messages(rank: int, lanes: int) -> dict[str, Any]:
    """Messages of all sizes on several lanes, beside the program's own collectives; ranks submit at their own pace."""
    made = Lanes(world(), CPU)
    made.grow(lanes)
    ended: list[list[int]] = [[] for _ in range(lanes)]
    futures, own = [], []
    for number in range(60):
        lane = number % lanes
        buffer = torch.full((1 + 997 * (number % 7),), float(number + rank))
        on_end = partial(_note, ended[lane], number)
        message = Message([dense(buffer, made[lane].group, 2)], buffer, f"message {number}", on_end)
        futures.append(made[lane].submit(message))
        if number % 10 == rank:
            time.sleep(0.01)
        if number % 5 == 0:
            value = torch.tensor([float(number)])
            dist.all_reduce(value)
            own.append(value.item())
    values = [future.wait()[0].item() for future in futures]
    names = alive()
    made.check()
    made.close()
    return {"values": values, "ended": ended, "own": own, "names": names, "left": alive(), "lanes": len(made)}


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_messages_arrive_in_order_and_apart_from_the_programs_own(lanes: int) -> None:
    for answer in on_ranks(many_messages, 2, lanes):
        assert answer["values"] == [number + 0.5 for number in range(60)]
        assert answer["own"] == [2.0 * number for number in range(0, 60, 5)]
        assert answer["ended"] == [list(range(lane, 60, lanes)) for lane in range(lanes)]
        assert answer["names"] == [f"anabranch-lane-{lane}" for lane in range(lanes)]
        assert answer["left"] == [] and answer["lanes"] == 0


def breaking(buffer: torch.Tensor, group: dist.ProcessGroup) -> Iterator[dist.Work]:
    yield next(dense(buffer, group, 1))
    raise ZeroDivisionError("in the second step")


def failure(rank: int) -> dict[str, Any]:
    made = Lanes(world(), CPU)
    made.grow(1)
    lane, buffer = made[0], torch.ones(3)
    first = lane.submit(Message([breaking(buffer, lane.group)], buffer, "the first message"))
    messages = []
    with pytest.raises(RuntimeError) as caught:
        first.wait()
    messages.append(str(caught.value))
    for attempt in (lambda: lane.submit(Message([dense(buffer, lane.group, 1)], buffer, "another")), made.check):
        with pytest.raises(CollectiveError) as refused:
            attempt()
        messages.append(str(refused.value))
    made.close()
    return {"messages": messages, "left": alive()}


def test_after_a_failure_nothing_more_is_sent() -> None:
    for answer in on_ranks(failure, 2):
        assert answer["left"] == []
        for message in answer["messages"]:
            assert re.search(r"the first message did not get through after \d+\.\d s: in the second step", message)
            assert "look for the first error among all ranks" in message


def stalled(rank: int) -> dict[str, Any]:
    """Rank 1 never sends: rank 0 hears of it by the deadline of the group that the lanes were made from."""
    limit = timedelta(seconds=round(5 * patience()))  # ranks connect within it, too
    parent = dist.new_group(timeout=limit)
    assert isinstance(parent, dist.ProcessGroup)
    made = Lanes(parent, CPU)
    made.grow(2)
    assert all(timeout_of(group) == limit for group in made.groups)
    if rank == 1:
        dist.barrier()
        made.close()
        return {}
    buffer = torch.ones(3)
    future = made[1].submit(Message([dense(buffer, made[1].group, 1)], buffer, "bucket 7"))
    with pytest.raises(RuntimeError, match="bucket 7 did not get through"):
        future.wait()
    made.close()
    dist.barrier()
    return {"left": alive()}


@pytest.mark.slow
def test_a_stalled_rank_is_an_error_by_the_groups_deadline() -> None:
    """The deadline of the default group is much later, and ranks would not end in time."""
    answer, _ = on_ranks(stalled, 2, timeout_s=30.0)
    assert answer["left"] == []


def memory(rank: int) -> bool:
    """While a lane waits for its next message, it does not keep the last one's tensor alive."""
    import weakref

    made = Lanes(world(), CPU)
    made.grow(1)
    buffer = torch.ones(1000)
    gone = weakref.ref(buffer)
    made[0].submit(Message([dense(buffer, made[0].group, 2)], buffer, "one")).wait()
    for _ in range(70):  # works are held for a while, and a work holds its tensor
        small = torch.ones(1)
        made[0].submit(Message([dense(small, made[0].group, 2)], small, "small")).wait()
    del buffer, small
    gc.collect()
    made.close()
    return gone() is None


def test_a_lane_releases_what_it_sent() -> None:
    assert on_ranks(memory, 2) == [True, True]


def stuck(rank: int) -> list[float]:
    """Lanes whose messages do not end; how long each was waited for, of a second."""
    release, waited = threading.Event(), []
    close = HostLane.close

    def noted(self: HostLane, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return close(self, timeout_s)

    HostLane.close = noted  # type: ignore[method-assign]

    def waits() -> Iterator[dist.Work]:
        release.wait()
        return
        yield

    made = Lanes(world(), CPU)
    made.grow(4)
    for number in range(4):
        made[number].submit(Message([waits()], torch.ones(1), "a message that does not end"))
    made.close(timeout_s=1.0)
    release.set()
    return waited


def test_lanes_that_do_not_end_are_given_up_together() -> None:
    for first, *others in on_ranks(stuck, 2):
        assert first <= 1.0 and len(others) == 3 and max(others) < 0.1, "the first one takes all the time there is"


def test_closing_from_its_own_thread_does_not_wait_for_itself() -> None:
    def closing() -> Iterator[dist.Work]:
        answers.append(lane.close(60.0))
        return
        yield

    answers: list[bool] = []
    lane = HostLane(None, "anabranch-lane-test", [])  # type: ignore[arg-type]
    lane.submit(Message([closing()], torch.ones(1), "closes its lane")).wait()
    assert answers == [False]
    assert lane.close(60.0)


class StreamWithoutGpu:
    """Stands for a stream lane."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, own_stream: bool) -> None:
        self.group = group

    def close(self, timeout_s: float) -> bool:
        return True


def lines_between_nodes(rank: int, together: bool) -> dict[str, Any]:
    """Lanes of the ranks with the same shard, in two nodes of two ranks, as on NCCL."""
    lines = [[0, 2], [1, 3]]
    new_group, made = dist.new_group, list[list[Any]]()
    groups = [new_group(ranks, timeout=group_timeout()) for ranks in lines]
    own = next(group for group in groups if isinstance(group, dist.ProcessGroup))

    def recorded(ranks: list[int], **options: Any) -> Any:
        most = options["pg_options"].config.max_ctas
        made.append([ranks, options["backend"], most, options["timeout"].total_seconds()])
        return new_group(ranks)

    lanes_module.StreamLane = StreamWithoutGpu  # type: ignore[assignment, misc]
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    dist.ProcessGroupNCCL = nccl  # type: ignore[assignment, misc]
    dist.get_backend = lambda group: "nccl"  # type: ignore[assignment, misc]
    dist.new_group = recorded  # type: ignore[assignment]
    lanes = Lanes(own, torch.device("cuda"), 2, lines if together else ())
    lanes.grow(1)
    group = lanes[0].group
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=group)
    lanes.close()
    timeout_s = group_timeout().total_seconds()
    return {"made": made, "timeout_s": timeout_s, "shared": group is own, "sum": value.item(), "lanes": lanes.max_lanes}


def test_lanes_of_some_ranks_get_few_multiprocessors_where_all_ranks_make_them_together() -> None:
    for rank, found in enumerate(on_ranks(lines_between_nodes, 4, True)):
        assert found["made"] == [[ranks, "nccl", 2, found["timeout_s"]] for ranks in ([0, 2], [1, 3])]
        assert not found["shared"] and found["sum"] == (2.0, 4.0)[rank % 2] and found["lanes"] > 1


def test_lanes_of_some_ranks_alone_share_their_group() -> None:
    for found in on_ranks(lines_between_nodes, 4, False):
        assert found["shared"] and not found["made"] and found["lanes"] == 1
