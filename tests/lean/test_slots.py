"""Slots under Lean: no two live objects share memory, and nothing is lost in any bucket."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from anabranch.lean.bucket_update import BucketUpdater
from anabranch.lean.buckets import Slot, Slots
from ranks import on_ranks

WIDTH = 16
STEPS = 6


class Chain(nn.Module):
    """Square layers one after another."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def planned(model: nn.Module, kind: str, each: int = 1) -> ab.Plan:
    """Matrices by ``kind``, ``each`` in a bucket, and all vectors behind the first."""
    named = list(reversed(list(model.named_parameters())))
    matrices = [name for name, p in named if p.dim() > 1]
    buckets = [ab.Bucket(tuple(matrices[i : i + each]), collective=kind) for i in range(0, len(matrices), each)]
    vectors = ab.Bucket(tuple(name for name, p in named if p.dim() < 2))
    return ab.Plan((buckets[0], vectors, *buckets[1:]))


def options() -> ab.OkTopk:
    return ab.OkTopk(density=0.2, warmup_steps=0, deterministic=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass
class Live:
    """Bytes that belong to someone: from when to when, counted in events."""

    whose: str
    begin: int
    end: int
    born: int
    died: int | None = None

    def meets(self, other: "Live") -> bool:
        together = (other.died is None or self.born < other.died) and (self.died is None or other.born < self.died)
        return together and self.begin < other.end and other.begin < self.end


class Log:
    """All memory that Lean hands out, as it happens."""

    def __init__(self) -> None:
        self.entries: list[Live] = []
        self._events = 0

    def born(self, whose: str, tensor: torch.Tensor) -> Live:
        self._events += 1
        begin = tensor.data_ptr()
        self.entries.append(Live(whose, begin, begin + tensor.numel() * tensor.element_size(), self._events))
        return self.entries[-1]

    def died(self, entry: Live) -> None:
        self._events += 1
        entry.died = self._events

    def clashes(self) -> list[str]:
        pairs = ((a, b) for i, a in enumerate(self.entries) for b in self.entries[:i])
        return [f"{a.whose} and {b.whose}" for a, b in pairs if a.meets(b)]


def recorded(log: Log) -> None:
    """Have every slot, and every step with what is in one, tell the log; exchanges take their time."""
    in_slots: dict[int, Live] = {}
    step, acquire, free = BucketUpdater.update, Slots.acquire, Slot.free

    def telling_step(self: BucketUpdater, bucket: Any, average: torch.Tensor, *rest: Any) -> Iterator[Any]:
        entry = in_slots[average.data_ptr()]
        time.sleep(0.003)
        yield from step(self, bucket, average, *rest)
        log.died(entry)

    def telling_acquire(self: Slots, *args: Any) -> Slot:
        slot = acquire(self, *args)
        for tensor in filled(slot):
            in_slots[tensor.data_ptr()] = log.born(f"slot of {id(self)}", tensor)
        return slot

    def telling_free(self: Slot) -> None:
        for tensor in filled(self):
            entry = in_slots[tensor.data_ptr()]
            if entry.died is None:
                log.died(entry)
        free(self)

    def filled(slot: Slot) -> list[torch.Tensor]:
        return [slot.tensor] if slot.unpacked is None else [slot.tensor, slot.unpacked]

    patches: list[tuple[type, str, Any]] = [
        (BucketUpdater, "update", telling_step), (Slots, "acquire", telling_acquire),
        (Slot, "free", telling_free),
    ]  # fmt: skip
    for owner, name, telling in patches:
        setattr(owner, name, telling)


def aliasing(rank: int, residuals: Any, kind: str) -> int:
    log = Log()
    recorded(log)
    model = Chain()
    memory = ab.Lean(sgd, residuals=residuals)
    compress = options() if kind != "dense" else None
    plan = planned(model, kind)
    lean: Any = ab.DataParallel(model, plan=plan, compress=compress, profile_steps=0, memory=memory)
    for step in range(STEPS):
        lean(batch(step, rank)).pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        log.born(name, parameter.detach())
        log.born(f"momentum of {name}", lean.optimizer.state[parameter]["momentum_buffer"])
    for state in lean._collectives.residuals.buckets() if kind != "dense" else []:
        stored = state.residual if state.packed is None else state.packed.message
        log.born(f"the residual of {state.names}", stored)
    assert log.clashes() == []
    assert all(entry.died is not None for entry in log.entries if entry.whose.startswith("slot"))
    handed_out = len([entry for entry in log.entries if entry.whose.startswith("slot")])
    lean.close()
    return handed_out


@pytest.mark.parametrize(
    ("residuals", "kind", "a_step"),
    [("in place", "dense", 6), ("in place", "oktopk:0.2", 6), ("int8", "oktopk:0.2", 11)],
)
def test_two_live_objects_never_share_memory(residuals: str, kind: str, a_step: int) -> None:
    """A slot is in use from when it is taken until its bucket is updated, or its residual is rounded again."""
    assert on_ranks(aliasing, 2, residuals, kind) == [STEPS * a_step] * 2


def test_the_log_sees_what_overlaps() -> None:
    log, memory = Log(), torch.zeros(8)
    first, second = log.born("first", memory[:4]), log.born("second", memory[4:])
    log.died(first)
    log.born("third", memory[:4])
    assert log.clashes() == []
    log.born("fourth", memory[3:5])
    assert log.clashes() == ["fourth and second", "fourth and third"]
    log.died(second)


def add_to(total: torch.Tensor, gradient: torch.Tensor) -> None:
    total.add_(gradient)


def conserved(rank: int) -> None:
    """Plain SGD with lr = 1: what has left the weights is what was applied; the rest waits, in each bucket."""
    model = Chain()
    plan = planned(model, "oktopk:0.2")
    memory = ab.Lean(lambda params: torch.optim.SGD(params, lr=1.0))
    lean: Any = ab.DataParallel(model, plan=plan, compress=options(), profile_steps=0, memory=memory)
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    computed = {name: torch.zeros_like(p).double() for name, p in before.items()}
    for name, parameter in model.named_parameters():
        parameter.register_hook(partial(add_to, computed[name]))
    for step in range(STEPS):
        (0.01 * lean(batch(step, rank)).pow(2).sum()).backward()
    waits = lean.comm_state_dict()["residuals"]
    assert any(piece.any() for piece in waits.values())
    for bucket in plan.buckets:
        for name in bucket.names:
            here = computed[name].flatten() - waits.get(name, torch.zeros(1)).double()
            dist.all_reduce(here)
            applied = 2 * (before[name] - model.get_parameter(name).detach().double()).flatten()
            torch.testing.assert_close(here, applied, rtol=1e-5, atol=1e-6)
    lean.close()


def test_nothing_is_lost_in_any_bucket() -> None:
    on_ranks(conserved, 2)


def test_two_slots_at_a_time_each_as_large_as_its_bucket() -> None:
    slots = Slots(torch.device("cpu"))
    given = []
    for numel in (3, 50, 2, 7):
        slot = slots.acquire(numel, torch.float32)
        slot.last_use = torch.futures.Future()
        slot.last_use.set_result(slot.tensor)
        given.append(slot.tensor)
    assert [tensor.untyped_storage().nbytes() for tensor in given] == [0, 0, 8, 28], "the first two were freed"
    slots.wait()
    slots.free()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in given)


def test_what_is_kept_has_no_turn() -> None:
    slots = Slots(torch.device("cpu"))
    kept = [slots.acquire(3, torch.float32, kept=True).tensor for _ in range(3)]
    first, second = (slots.acquire(4, torch.bfloat16, unpacks=True) for _ in range(2))
    slots.acquire(5, torch.float32)
    sizes = [tensor.untyped_storage().nbytes() for tensor in (*kept, first.tensor, second.tensor)]
    assert sizes == [12, 12, 12, 0, 8]
    assert first.unpacked is not None and first.unpacked.untyped_storage().nbytes() == 0
    assert second.unpacked is not None and second.unpacked.untyped_storage().nbytes() == 16


def test_a_slot_is_not_freed_before_its_user_is_done() -> None:
    slots = Slots(torch.device("cpu"))
    first = slots.acquire(3, torch.float32)
    at_its_end: list[int] = []

    class Use:
        def wait(self) -> None:
            at_its_end.append(first.tensor.untyped_storage().nbytes())

    first.last_use = Use()  # type: ignore[assignment]
    slots.acquire(3, torch.float32)
    assert at_its_end == []
    slots.acquire(3, torch.float32)
    assert at_its_end == [12] and first.tensor.untyped_storage().nbytes() == 0
