"""Process groups of any kind: DataParallel trains wherever DDP does, and ends with the same weights."""

import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

from anabranch import DataParallel, Lean, Network, OkTopk
from anabranch.values.errors import DisagreementError
from parallel.twins import (
    SCENARIOS,
    batch,
    different,
    dtypes_of,
    mlp,
    plain_train,
    scatter,
    scattered,
    sgd,
    stage_of,
)
from ranks import cases_on_ranks, group_timeout, on_ranks

GIVEN_STEPS = 5  # enough for the plan to be in force, and to be profiled


def members(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group that only its own ranks make."""
    group = dist.new_group(list(ranks), use_local_synchronization=True, timeout=group_timeout())
    assert isinstance(group, dist.ProcessGroup)
    return group


class Twins:
    """DDP and DataParallel with these options of DDP, around equal modules; ``apart``: what differed after any step."""

    def __init__(self, build: Callable[[], nn.Module] = mlp, ddp: Mapping[str, Any] | None = None, **ours: Any) -> None:
        modules = [build(), build()]
        modules[1].load_state_dict(modules[0].state_dict())
        self.theirs = DistributedDataParallel(modules[0], **(ddp or {}))
        self.ours = DataParallel(modules[1], **(ddp or {}), **ours)
        self.optimizers = [sgd(model) for model in (self.theirs, self.ours)]
        self.apart: list[str] = []
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for model, optimizer in zip((self.theirs, self.ours), self.optimizers, strict=True):
                plain_train(model, optimizer, self.steps)
            self.apart += different(self.theirs, self.ours, 0.0)
            self.steps += 1

    def decide(self) -> None:
        """Train until it is decided what runs."""
        while not any(word in stage_of(self.ours) for word in ("running", "not planning", "No plan")):
            assert self.steps < 60
            self.train(1)
        self.train(2)

    def close(self) -> dict[str, Any]:
        explained, planned = self.ours.explain(), self.ours.plan is not None
        self.ours.close()
        return {"apart": self.apart, "explained": explained, "planned": planned}


def given() -> dict[str, Any]:
    """A plan on two lanes, from the first step on."""
    return {"plan": scatter(dtypes_of(mlp())), "profile_steps": 2, "policy": SCENARIOS["is given the plan"]}


def searching() -> dict[str, Any]:
    """A plan for groups of two that is kept in any case, after a search."""
    network = Network.ring(2, 1e-5, 1e-9)  # so that nothing is measured
    return {"planner": scattered, "network": network, "profile_steps": 2, "policy": SCENARIOS["keeps the plan"]}


def overlapping(rank: int, planned: bool) -> list[dict[str, Any]]:
    """Rank 1 is in two groups of two, which their own ranks make; it makes and trains both models in turns."""
    if rank == 2:
        members([2])  # as many groups as rank 1 has: torch's own condition for the next group
    groups = [members(ranks) for ranks in ([0, 1], [1, 2]) if rank in ranks]
    twins = [Twins(ddp={"process_group": group}, **(given() if planned else {})) for group in reversed(groups)]
    for _ in range(GIVEN_STEPS):
        for pair in twins:
            pair.train(1)
    return [pair.close() for pair in twins]


@pytest.mark.parametrize("planned", [True, False])
def test_overlapping_groups_at_once(planned: bool) -> None:
    answers = on_ranks(overlapping, 3, planned)
    assert [len(answer) for answer in answers] == [1, 2, 1]
    for answer in itertools.chain(*answers):
        assert answer["apart"] == [] and answer["planned"] == planned


def some_ranks_only(rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 search for a plan; ranks 2 and 3 never wrap anything. Then ranks 1 and 2 make one more group."""
    own = members([0, 1] if rank < 2 else [2, 3])
    if rank < 2:
        pair = Twins(ddp={"process_group": own}, **searching())
        pair.decide()
    if rank in (1, 2):
        dist.barrier(group=members([1, 2]))
    return pair.close() if rank < 2 else {}


def test_ranks_that_take_no_part_are_not_waited_for() -> None:
    for answer in on_ranks(some_ranks_only, 4)[:2]:
        assert answer["apart"] == [] and answer["planned"]


def join_over_tcp(rank: int) -> None:
    """The same ranks, with the store that most programs use: its connection serves one thread at a time."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([store.port if store is not None else 0])
    dist.broadcast(port, 0)
    store = store or TCPStore("127.0.0.1", int(port), is_master=False)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=group_timeout())


def threaded(rank: int) -> dict[int, dict[str, Any]]:
    """A model per thread, each on a group of its own; each rank starts its threads in another order."""
    join_over_tcp(rank)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    options = [given(), {}, searching()]
    answers: dict[int, dict[str, Any]] = {}

    def run(number: int) -> None:
        pair = Twins(ddp={"process_group": groups[number]}, **options[number])
        pair.train(12)
        answers[number] = pair.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads if rank == 0 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_a_model_in_each_thread() -> None:
    for answers in on_ranks(threaded, 2):
        assert sorted(answers) == [0, 1, 2] and answers[0]["planned"]
        assert all(answer["apart"] == [] for answer in answers.values())


class PythonWork(dist.Work):
    """A work that is a Python object; without a real one, it is done."""

    def __init__(self, real: dist.Work | None, tensors: object) -> None:
        super().__init__()
        self._real = real
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._real is None or self._real.wait(timeout)

    def get_future(self) -> Any:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class PythonGroup(dist.ProcessGroup):
    """A group in Python, as torchft has them: torch.distributed does not know it, and a real group sends."""

    def __init__(self, real: dist.ProcessGroup, python_works: bool) -> None:
        super().__init__(real.rank(), real.size())  # type: ignore[call-arg]
        self._real: Any = real
        self._python_works = python_works

    def _work(self, work: dist.Work, tensors: object) -> dist.Work:
        return PythonWork(work, tensors) if self._python_works else work

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._work(self._real.allreduce(tensors, opts), tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._work(self._real.broadcast(tensors, opts), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._work(self._real.allgather(outputs, inputs, opts), outputs)


def in_python(rank: int, python_works: bool) -> dict[str, Any]:
    assert dist.group.WORLD is not None
    group = PythonGroup(dist.group.WORLD, python_works)
    pair = Twins(ddp={"process_group": group}, compress="bf16")
    pair.train(GIVEN_STEPS)
    refusals = {}
    for what, options in {"plan": given(), "OkTopk": {"compress": OkTopk(0.1)}}.items():
        with pytest.raises(ValueError) as caught:
            DataParallel(mlp(), process_group=group, **options)
        refusals[what] = str(caught.value)
    with pytest.raises(ValueError) as caught:
        DataParallel(mlp(), process_group=group, memory=Lean(lambda parameters: torch.optim.SGD(parameters, lr=0.1)))
    refusals["Lean"] = str(caught.value)
    return {**pair.close(), "refusals": refusals}


def test_groups_in_python(found: dict[str, list[Any]]) -> None:
    for answer in found["in Python"] + found["in Python, with works in Python"]:
        assert answer["apart"] == []
        assert answer["explained"].startswith("No plan: its process group is a PythonGroup, a Python class")
        for what, message in answer["refusals"].items():
            assert what in message and "PythonGroup" in message and "new_group" in message


class ManagedGroup(PythonGroup):
    """As torchft makes its managed group: one rank for torch, and a size that is 1 until other replicas have joined.

    It averages by the number of replicas itself, in works of its own, since torch divides by the size that it knows.
    """

    def __init__(self, real: dist.ProcessGroup) -> None:
        dist.ProcessGroup.__init__(self, 0, 1)  # type: ignore[call-arg]
        self._real = real
        self._python_works = True
        self.joined = 1

    def size(self) -> int:
        return self.joined

    def rank(self) -> int:
        return self._real.rank() if self.joined > 1 else 0

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "managed"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        for tensor in tensors:
            tensor.div_(self._real.size())
        return super().allreduce(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for parts, own in zip(outputs, inputs, strict=True):
            (part,) = parts  # one rank, as far as torch knows
            part.copy_(own)
        return PythonWork(None, outputs)


def managed(rank: int, loose: bool) -> dict[str, Any]:
    """Replicas start alone, with the same weights, and join after the model was wrapped."""
    assert dist.group.WORLD is not None
    group = ManagedGroup(dist.group.WORLD)
    pair = Twins(ddp={"process_group": group, "init_sync": not loose}, compress="int8")
    group.joined = 2
    pair.train(GIVEN_STEPS)
    mine = torch.cat([parameter.detach().flatten() for parameter in pair.ours.parameters()])
    everyones = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(everyones, mine)
    return {**pair.close(), "averaged": torch.equal(*everyones)}


def test_groups_whose_ranks_join_later(found: dict[str, list[Any]]) -> None:
    for answer in found["managed"] + found["managed, without init_sync"]:
        assert answer["apart"] == [] and answer["averaged"] and not answer["planned"]
        assert answer["explained"].startswith("No plan: its process group is a ManagedGroup, a Python class")


def errors_of(construct: Any) -> list[str]:
    """Type and text of the error that DDP and DataParallel raise."""
    errors = []
    for kind in (DistributedDataParallel, DataParallel):
        with pytest.raises(Exception) as caught:
            construct(kind)
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
    return errors


def test_without_a_process_group_there_is_torchs_own_error() -> None:
    theirs, ours = errors_of(lambda kind: kind(mlp()))
    assert ours == theirs and "init_process_group" in ours
    with pytest.raises(ValueError, match="init_process_group"):
        DataParallel(mlp(), memory=Lean(lambda parameters: torch.optim.SGD(parameters, lr=0.1)))


def no_member(rank: int) -> list[str]:
    group = dist.new_group([0])
    if rank == 0:
        return []
    return errors_of(lambda kind: kind(mlp(), process_group=group))


def test_outside_the_group_there_is_torchs_own_error(found: dict[str, list[Any]]) -> None:
    theirs, ours = found["no member"][1]
    assert ours[:200] == theirs[:200]  # the rest shows the module's parameters


def at_their_own_time(rank: int, how: str) -> dict[str, Any]:
    """Without init_sync, rank 1 wraps only after rank 0 has told it something, which rank 0 does after wrapping."""
    options = {"searching": searching, "given": given}[how]()
    if rank == 1:
        dist.recv(torch.zeros(1), src=0)
    pair = Twins(ddp={"init_sync": False}, **options)
    if rank == 0:
        dist.send(torch.zeros(1), dst=1)
    pair.decide()
    return pair.close()


def test_without_init_sync_ranks_wrap_at_their_own_time(found: dict[str, list[Any]]) -> None:
    for answer in found["searching"] + found["given"]:
        assert answer["apart"] == [] and answer["planned"]


def disagreeing(rank: int) -> str:
    """What the constructor compares with init_sync, the first averaged backward compares without it."""
    model = DataParallel(mlp(), init_sync=False, profile_steps=2 + rank)
    with pytest.raises(DisagreementError) as caught:
        model(batch(0)).sum().backward()
    model.close()
    return str(caught.value)


def test_without_init_sync_the_first_step_compares(found: dict[str, list[Any]]) -> None:
    for message in found["disagreeing"]:
        assert "the settings of DataParallel is not the same on all ranks" in message and "profile_steps 3" in message


class WithState(nn.Module):
    """A network with a buffer of any size, as a rank's own cache or counters would be."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("state", torch.zeros(size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def own_buffers(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 prefers another name
    pair = Twins(lambda: WithState(1 + rank), {"broadcast_buffers": False}, **searching())
    pair.decide()
    return pair.close()


def test_buffers_may_differ_where_they_are_not_broadcast(found: dict[str, list[Any]]) -> None:
    for answer in found["own buffers"]:
        assert answer["apart"] == [] and answer["planned"]


def own_names(rank: int, init_sync: bool) -> dict[str, Any]:
    pair = Twins(lambda: Named(rank), {"init_sync": init_sync}, **searching())
    pair.decide()
    return pair.close()


class Named(nn.Module):
    """A network whose parameters have this rank's number in their names."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.add_module(f"stage{rank}", mlp())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        (layers,) = self.children()
        outputs: torch.Tensor = layers(inputs)
        return outputs


def test_names_may_differ_between_ranks(found: dict[str, list[Any]]) -> None:
    for answer in found["own names"] + found["own names, without init_sync"]:
        assert answer["apart"] == [] and not answer["planned"]
        assert "parameters have other names on other ranks" in answer["explained"]


def plan_by_names(rank: int) -> str:
    with pytest.raises(DisagreementError) as caught:
        DataParallel(Named(rank), plan=scatter(dtypes_of(Named(0))))
    return str(caught.value)


def test_a_given_plan_needs_the_same_names(found: dict[str, list[Any]]) -> None:
    for message in found["a plan by names"]:
        assert "the model is not the same on all ranks" in message and "stage1" in message


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What two ranks saw in each case, all in one launch."""
    return cases_on_ranks(
        {
            "in Python": (in_python, False),
            "in Python, with works in Python": (in_python, True),
            "managed": (managed, False),
            "managed, without init_sync": (managed, True),
            "no member": (no_member,),
            "searching": (at_their_own_time, "searching"),
            "given": (at_their_own_time, "given"),
            "disagreeing": (disagreeing,),
            "own buffers": (own_buffers,),
            "own names": (own_names, True),
            "own names, without init_sync": (own_names, False),
            "a plan by names": (plan_by_names,),
        },
        2,
        timeout_s=120.0,
    )
