"""Selection against loops over elements, slot by slot."""

import struct
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.exchange.sparse import select


def bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def value(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", word))[0])


def naive_offer(
    acc: list[float], threshold: float, bounds: list[int], capacity: int
) -> tuple[list[list[list[int]]], list[int]]:
    """Region by region, element by element."""
    packed, counts = [], []
    for low, high in pairwise(bounds):
        passed = [[bits(acc[j]), j - low] for j in range(low, high) if abs(acc[j]) >= threshold and acc[j] != 0]
        counts.append(len(passed))
        packed.append((passed + [[0, -1]] * capacity)[:capacity])
    return packed, counts


floats = st.floats(-4, 4, width=32)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), numel=st.integers(1, 30), ranks=st.integers(1, 5), capacity=st.integers(1, 8))
def test_offer_is_the_loop(data: st.DataObject, numel: int, ranks: int, capacity: int) -> None:
    gradient = torch.tensor(data.draw(st.lists(floats, min_size=numel, max_size=numel)))
    residual = torch.tensor(data.draw(st.lists(floats, min_size=numel, max_size=numel)))
    inner = sorted(data.draw(st.lists(st.integers(0, numel), min_size=ranks - 1, max_size=ranks - 1)))
    threshold = data.draw(st.floats(0, 4, width=32))
    old, total = residual.clone(), residual + gradient
    found = select.offer(gradient, residual, torch.tensor(threshold), torch.tensor([0, *inner, numel]), capacity)
    packed, counts = naive_offer(total.tolist(), threshold, [0, *inner, numel], capacity)
    assert found.packed.tolist() == packed
    assert found.passed.tolist() == counts
    assert not bool(found.poison)
    assert torch.equal(gradient, old)
    assert torch.equal(residual, total)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), slots=st.integers(1, 6), capacity=st.integers(1, 6))
def test_owner_adds_and_takes_like_the_loop(data: st.DataObject, ranks: int, slots: int, capacity: int) -> None:
    width = 8
    received, sums = [], [0.0] * width
    for _ in range(ranks):
        positions = data.draw(st.lists(st.integers(0, width - 1), unique=True, max_size=slots))
        values = data.draw(st.lists(st.integers(-8, 8), min_size=len(positions), max_size=len(positions)))
        for position, number in zip(positions, values, strict=True):
            sums[position] += number
        pairs = [[bits(float(v)), p] for v, p in zip(values, positions, strict=True)]
        received.append((pairs + [[0, -1]] * slots)[:slots])
    threshold = data.draw(st.integers(0, 8))
    buffer = torch.zeros(width)
    packed = select.sums_at_owner(torch.tensor(received, dtype=torch.int32), buffer)
    there = [[bits(s), position] for position, s in enumerate(sums) if s != 0]
    assert packed.tolist() == there + [[0, -1]] * (ranks * slots - len(there))
    assert not buffer.any()
    taken = select.select_sums(packed, torch.tensor(float(threshold)), capacity)
    passed = [pair for pair in there if abs(value(pair[0])) >= threshold]
    assert int(taken.passed) == len(passed)
    assert taken.packed.tolist() == (passed + [[0, -1]] * capacity)[:capacity]


def test_a_rounded_sum_leaves_what_it_lost_and_one_rounded_to_zero_nothing() -> None:
    packed = torch.tensor([[bits(1.001), 3], [bits(-2.5), 9], [bits(0.01), 10], [0, -1]], dtype=torch.int32)
    sent = torch.tensor([[bits(1.0), 3], [bits(-2.5), 9], [bits(0.0), 10], [0, -1]], dtype=torch.int32)
    residual = torch.zeros(20)
    select.keep_rounding_error(packed, sent, residual, torch.tensor(4), torch.tensor(True))
    assert not residual.any()
    select.keep_rounding_error(packed, sent, residual, torch.tensor(4), torch.tensor(False))
    expected = torch.zeros(20)
    expected[7] = torch.tensor(1.001) - 1.0
    assert torch.equal(residual, expected)


def finished(poisoned: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two regions of three; this rank offered positions 0 and 4, and 4 and 5 are applied."""
    gradient, residual = torch.tensor([0.5, 0, 0, 0, 0, 0]), torch.tensor([0.5, 1, 1, 0, 6, 1])
    old = residual.clone()
    bounds = torch.tensor([0, 3, 6])
    offered = select.offer(gradient, residual, torch.tensor(2.0), bounds, 2)
    gathered = torch.tensor([[[0, -1], [0, -1]], [[bits(12.0), 1], [bits(8.0), 2]]], dtype=torch.int32)
    select.finish(gathered, offered.packed, gradient, residual, bounds, 2.0, torch.tensor(poisoned))
    return gradient, residual, old


def test_finish_applies_and_clears() -> None:
    gradient, residual, _ = finished(False)
    assert gradient.tolist() == [0, 0, 0, 0, 6, 4]
    assert residual.tolist() == [1, 1, 1, 0, 0, 1]


def test_finish_of_a_poisoned_step_undoes_it() -> None:
    gradient, residual, old = finished(True)
    assert bool(gradient.isnan().all())
    assert torch.equal(residual, old)


def test_an_average_too_small_for_float32_still_clears() -> None:
    """Clearing samples at what was applied, not at what is left of it after the division."""
    gradient, residual, bounds = torch.tensor([1e-45]), torch.zeros(1), torch.tensor([0, 1])
    offered = select.offer(gradient, residual, torch.tensor(0.0), bounds, 1)
    select.finish(offered.packed, offered.packed, gradient, residual, bounds, 8.0, torch.tensor(False))
    assert gradient.item() == 0
    assert residual.item() == 0


def test_nothing_in_the_fixed_path_asks_for_a_size() -> None:
    """On the meta device a size that depends on data, or a look at a value, is an error."""
    numel, ranks, capacity = 100, 4, 8
    meta = torch.device("meta")
    gradient, residual = torch.zeros(numel, device=meta), torch.zeros(numel, device=meta)
    bounds, threshold = torch.zeros(ranks + 1, dtype=torch.int64, device=meta), torch.zeros((), device=meta)
    offered = select.offer(gradient, residual, threshold, bounds, capacity)
    sums = select.sums_at_owner(offered.packed, torch.zeros(50, device=meta))
    taken = select.select_sums(sums, threshold, capacity)
    gathered = taken.packed.expand(ranks, capacity, 2)
    select.finish(gathered, offered.packed, gradient, residual, bounds, 4.0, offered.poison)
    select.keep_rounding_error(taken.packed, taken.packed, residual, bounds[1], offered.poison)
