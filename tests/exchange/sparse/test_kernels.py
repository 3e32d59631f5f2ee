"""The Triton kernels against their twins."""

import mmap
import struct
import sys
from typing import Any

import pytest
import torch

from anabranch.exchange.communicator import ZeroBuffer
from anabranch.exchange.dense import SUMMABLE_BELOW
from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse import select, thresholds
from anabranch.exchange.sparse.encoding import frame_messages, unframe_messages
from anabranch.values.kinds.formats import FP32, HEAD_NBYTES, Sizes, encoding_for
from anabranch.values.kinds.names import Wire
from exchange.sparse.triton_device import DEVICE, triton_exchange, use_small_blocks
from exchange.sparse.worlds import gradients

SUMMABLE_BITS = sys.modules["anabranch.exchange.sparse.kernels"].SUMMABLE_BELOW  # imported where triton is installed


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


class Ranks(ZeroBuffer):
    """A group that nobody asks to send."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def step_for(
    gradient: torch.Tensor, state: BucketState, sizes: Sizes, threshold: float, bounds: list[int], rank: int = 0
) -> "triton_exchange.TritonStep":
    state.local_threshold.fill_(threshold)
    state.boundaries.copy_(torch.tensor(bounds))
    comm: Any = Ranks(rank, len(bounds) - 1)
    return triton_exchange.TritonStep(gradient, state, comm, sizes)


def whole_words(sizes: Sizes) -> Sizes:
    """With so many slots more that a message is whole words."""
    while sizes.message_nbytes % 4:
        sizes = sizes._replace(capacity=sizes.capacity + 1)
    return sizes


def pairs_of(message: torch.Tensor) -> set[tuple[int, int]]:
    """Of int32 pairs [m, 2], those used."""
    return {(bits, position) for bits, position in message.tolist() if position >= 0}


def twin_of(
    gradient: torch.Tensor, residual: torch.Tensor, threshold: float, bounds: list[int], sizes: Sizes
) -> select.Selected:
    return select.offer(
        gradient.cpu().clone(), residual.cpu().clone(), torch.tensor(threshold), torch.tensor(bounds),
        sizes.capacity,
    )  # fmt: skip


CASES = {
    "one region": (3000, [0, 3000]),
    "blocks across boundaries": (3001, [0, 700, 1030, 3001]),
    "empty regions": (2500, [0, 0, 1100, 1100, 1100, 2500, 2500]),
    "less than a block": (5, [0, 2, 5]),
    "whole blocks": (2048, [0, 1024, 2048]),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_offer_packs_what_the_twin_packs(case: str, precision: Any) -> None:
    numel, bounds = CASES[case]
    sizes = whole_words(Sizes(1, numel, encoding_for(precision, numel, 0.3), False))
    gradient, held = (made.to(DEVICE) for made in gradients(2, numel, 1))
    gradient[::7] = -held[::7]  # zeros
    state = BucketState.of(held.clone(), len(bounds) - 1)
    before = gradient.clone()
    work = step_for(gradient, state, sizes, 1.5, bounds)
    work.offer()
    heads, packed = unframe_messages(work.sent.cpu(), sizes.encoding)
    twin = twin_of(gradient, held, 1.5, bounds, sizes)
    assert heads[:, 0].tolist() == twin.passed.tolist()
    messages = frame_messages(heads, twin.packed, sizes.encoding)
    table_end = HEAD_NBYTES + sizes.encoding.table_nbytes
    assert torch.equal(work.sent[:, :table_end].cpu(), messages[:, :table_end])
    rows = unframe_messages(work.sent_rows.cpu().view(len(heads), -1).view(torch.uint8), FP32)[1]
    for mine, kept, theirs in zip(packed, rows, unframe_messages(messages, sizes.encoding)[1], strict=True):
        assert pairs_of(mine) == pairs_of(theirs) == pairs_of(kept)
    assert torch.equal(gradient, before)
    assert torch.equal(state.residual, held)


def test_offer_at_threshold_zero_leaves_zeros_out() -> None:
    gradient = torch.tensor([0.0, 1e-45, -0.0, -2.0], device=DEVICE)
    sizes = Sizes(4, 4, FP32, False)
    work = step_for(gradient, BucketState.of(torch.zeros(4, device=DEVICE), 1), sizes, 0.0, [0, 4])
    work.offer()
    heads, packed = unframe_messages(work.sent.cpu(), sizes.encoding)
    assert heads[0].tolist() == [2, 0]
    assert {position for _, position in pairs_of(packed[0])} == {1, 3}


def test_offer_beyond_the_capacity_counts_all_and_stores_some() -> None:
    bounds = [0, 1500, 3000]
    gradient, held = (made.to(DEVICE) for made in gradients(2, 3000, 2))
    sizes = Sizes(1, 10, FP32, False)
    work = step_for(gradient, BucketState.of(held, 2), sizes, 1.0, bounds)
    work.offer()
    heads, packed = unframe_messages(work.sent.cpu(), sizes.encoding)
    everything = twin_of(gradient, held, 1.0, bounds, sizes._replace(capacity=1500))
    assert heads[:, 0].tolist() == everything.passed.tolist()
    for mine, theirs in zip(packed, everything.packed, strict=True):
        assert len(pairs_of(mine)) == 10
        assert pairs_of(mine) < pairs_of(theirs)


def test_the_limit_of_gradients_is_that_of_the_torch_operations() -> None:
    assert struct.pack("<i", SUMMABLE_BITS.value) == struct.pack("<f", SUMMABLE_BELOW)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -SUMMABLE_BELOW])
@pytest.mark.parametrize("threshold", [1.0, float("inf"), float("nan")])
def test_offer_marks_every_message_if_anything_cannot_be_sent(bad: float, threshold: float) -> None:
    gradient = torch.zeros(1500, device=DEVICE)
    gradient[1300] = bad
    sizes = Sizes(1, 2, FP32, False)
    work = step_for(gradient, BucketState.of(torch.zeros(1500, device=DEVICE), 3), sizes, threshold, [0, 9, 900, 1500])
    work.offer()
    assert bool((unframe_messages(work.sent.cpu(), sizes.encoding)[0][:, 0] < 0).all())


def messages(pairs: list[list[tuple[float, int]]], sizes: Sizes) -> torch.Tensor:
    """As they would arrive: one row per rank."""
    packed = torch.tensor([[0, -1]], dtype=torch.int32).repeat(len(pairs), sizes.capacity, 1)
    for row, own in enumerate(pairs):
        for slot, (value, position) in enumerate(own):
            packed[row, slot] = torch.tensor([struct.unpack("<i", struct.pack("<f", value))[0], position])
    heads = torch.tensor([[len(own), 0] for own in pairs], dtype=torch.int32)
    return frame_messages(heads, packed, sizes.encoding).to(DEVICE)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_owner_adds_takes_once_and_leaves_a_clean_buffer(precision: Any) -> None:
    chance = torch.Generator().manual_seed(5)
    ranks, numel = 3, 2000
    sizes = whole_words(Sizes(600, 400, encoding_for(precision, numel, 0.3), False))
    pairs = []
    for _ in range(ranks):
        positions = torch.randperm(500, generator=chance)[:390].tolist()
        pairs.append(
            [(float(v), p) for v, p in zip(torch.randint(-255, 256, (390,), generator=chance), positions, strict=True)]
        )
    received = messages(pairs, sizes)
    state = BucketState.of(torch.zeros(numel, device=DEVICE), ranks)
    work = step_for(torch.zeros(numel, device=DEVICE), state, sizes, 0.0, [0, 700, 1400, 2000])
    work.reduce(received, 1e38)
    assert not work.region_buffer.any()
    heads, packed = unframe_messages(work.part.cpu(), sizes.encoding)
    sums = select.sums_at_owner(unframe_messages(received.cpu(), sizes.encoding)[1], torch.zeros(numel))
    values = sums[:, 0].contiguous().view(torch.float32)
    assert thresholds.sample_positions(len(sums), 200, 0, torch.device("cpu")) is None  # so both look at all sums
    found = heads[0, 1:].view(torch.float32)[0]
    assert found == thresholds.sampled_magnitude((values,), 200, 0)
    taken = select.select_sums(sums, found, sizes.capacity)
    assert int(heads[0, 0]) == int(taken.passed) > 0
    sent = unframe_messages(frame_messages(heads, taken.packed[None], sizes.encoding), sizes.encoding)[1][0]
    assert pairs_of(packed[0]) == pairs_of(sent)
    if sizes.encoding.rounds:
        mine = work.rounding_error[: int(taken.passed)].cpu()
        before, after = (pairs[: len(mine), 0].contiguous().view(torch.float32) for pairs in (taken.packed, sent))
        assert mine.any()
        assert sorted(mine.tolist()) == sorted(torch.where(after != 0, before - after, 0.0).tolist())


@pytest.mark.parametrize("cause", ["sum", "head"])
def test_owner_passes_poison_on(cause: str) -> None:
    sizes = Sizes(4, 4, FP32, False)
    received = messages([[(1.0, 3)], [(3e38, 5)], [(3e38 if cause == "sum" else 1.0, 5)]], sizes)
    if cause == "head":
        received.view(-1).view(torch.int32)[0] = -1
    state = BucketState.of(torch.zeros(100, device=DEVICE), 3)
    work = step_for(torch.zeros(100, device=DEVICE), state, sizes, 0.0, [0, 30, 60, 100])
    work.reduce(received, 1e38)
    assert int(unframe_messages(work.part.cpu(), sizes.encoding)[0][0, 0]) < 0
    assert not work.region_buffer.any()


@pytest.mark.parametrize(("numel", "k"), [(9000, 5000), (3000, 20), (40_000, 30_000)])
def test_the_sampled_threshold_is_the_twins_bit_by_bit(numel: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, held = (made.to(DEVICE) for made in gradients(2, numel, 3))
    state = BucketState.of(held, 2)
    state.step = 11
    work = step_for(gradient, state, Sizes(k, 8, FP32, False), 0.0, [0, 5, numel])
    work.local_threshold()
    wanted = thresholds.sampled_magnitude((gradient.cpu(), held.cpu()), k, 11)
    assert state.local_threshold.item() == wanted.item() > 0
    monkeypatch.setattr(triton_exchange, "MAX_SAMPLE_NUMEL", 0)
    state.local_threshold.zero_()
    work.local_threshold()
    assert state.local_threshold.item() == wanted.item()


def test_places_of_samples_beyond_two_to_the_31() -> None:
    numel = 2**35 + 12345
    positions = thresholds.sample_positions(numel, numel // 8, 3, torch.device("cpu"))
    assert positions is not None
    for at, position in enumerate(positions.tolist()):
        turn = (at * thresholds.GOLDEN + 3 * thresholds.ROOT) % thresholds.TURN
        assert 0 <= turn * numel // thresholds.TURN - position <= 1
        assert 0 <= position < numel


class Far:
    """More than 2³¹ float32 zeros, of which only those touched take memory: the ``first``, and the ``last`` two."""

    def __init__(self, numel: int) -> None:
        unreserved = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
        self._map = mmap.mmap(-1, 4 * numel, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
        self.first = torch.frombuffer(self._map, dtype=torch.float32, count=1)
        self.last = torch.frombuffer(self._map, dtype=torch.float32, count=2, offset=4 * (numel - 2))


@pytest.mark.skipif(DEVICE.type != "cpu" or sys.platform != "linux", reason="on GPUs test_gpu.py makes such a bucket")
def test_pairs_beyond_two_to_the_31_are_applied_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the passes over all elements, which would take hours here; the interpreter copies whole arguments, so
    they are given by their first element."""
    numel, ranks = 2**31 + 5000, 8
    bounds = [rank * 2**28 for rank in range(ranks)] + [numel]
    gradient, residual = Far(numel), Far(numel)
    sizes = Sizes(8, 2, FP32, False)
    work = step_for(gradient.first, BucketState.of(residual.first, ranks), sizes, 0.0, bounds)
    end = numel - 1 - bounds[-2]
    work.sent.copy_(messages([[]] * (ranks - 1) + [[(6.0, end), (2.0, end - 1)]], sizes))
    residual.last.copy_(torch.tensor([2.0, 6.0]))
    monkeypatch.setattr("anabranch.exchange.sparse.kernels.accumulate", Nothing())
    work.finish(messages([[]] * (ranks - 1) + [[(12.0, end)]], sizes), 4.0)
    assert gradient.last.tolist() == [0.0, 3.0]
    assert residual.last.tolist() == [2.0, 0.0]


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: None


def test_an_average_too_small_for_float32_still_clears() -> None:
    gradient = torch.tensor([1e-45, 0.0], device=DEVICE)
    state, sizes = BucketState.of(torch.zeros(2, device=DEVICE), 1), Sizes(2, 2, FP32, False)
    work = step_for(gradient, state, sizes, 0.0, [0, 2])
    work.offer()
    work.finish(work.sent, 8.0)
    assert gradient.tolist() == [0, 0]
    assert state.residual.tolist() == [0, 0]


@pytest.mark.parametrize("widest", [60, 65_536, 200_000, 2_000_000])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_messages_of_many_chunks_are_the_twins(precision: Wire, widest: int) -> None:
    """Tables and values bit by bit, and entries in any order within their chunk; empty and full rows, unused slots."""
    encoding = encoding_for(precision, widest, 0.01)
    sizes = whole_words(Sizes(1, 300, encoding, False))
    pairs = torch.tensor([0, -1], dtype=torch.int32).repeat(3, sizes.capacity, 1)
    counts = [min(widest, sizes.capacity), 0, min(widest, 170)]
    chance = torch.Generator().manual_seed(widest)
    for row, length in zip(pairs, counts, strict=True):
        values = torch.randn(length, generator=chance) * (4 * torch.randn(length, generator=chance)).exp()
        row[:length, 0] = values.view(torch.int32)
        row[:length, 1] = torch.randperm(widest, generator=chance)[:length].sort().values
    heads = torch.tensor(
        [[counts[0] + 9 * (counts[0] == sizes.capacity), 3], [0, 4], [counts[2], 5]], dtype=torch.int32
    )
    twin = frame_messages(heads, pairs, encoding)
    work = step_for(torch.zeros(widest, device=DEVICE), BucketState.of(torch.zeros(widest, device=DEVICE), 3), sizes,
                    0.0, [0, 0, 0, widest])  # fmt: skip
    shuffled = torch.stack([row[torch.randperm(sizes.capacity, generator=chance)] for row in pairs])
    work.sent_rows.copy_(torch.cat([heads, shuffled.flatten(1).view(3, -1, 2).flatten(1)], dim=1).flatten())
    work._pack(work.sent_rows, work.sent)
    table_end = HEAD_NBYTES + encoding.table_nbytes
    assert torch.equal(work.sent[:, :table_end].cpu(), twin[:, :table_end])
    expected = unframe_messages(twin, encoding)[1]
    rows, again = work.sent_rows.cpu(), work._unpack(work.sent)[0].cpu()
    for flat in (rows, again):
        found_heads, found = unframe_messages(flat.view(3, -1).view(torch.uint8), FP32)
        assert torch.equal(found_heads, heads)
        for mine, theirs in zip(found, expected, strict=True):
            assert pairs_of(mine) == pairs_of(theirs)
    assert torch.equal(again.view(3, -1, 2)[:, 1:, 1].sort(dim=1).values, expected[..., 1].sort(dim=1).values)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_poisoned_message_has_no_pairs(precision: Wire) -> None:
    sizes = whole_words(Sizes(4, 4, encoding_for(precision, 100, 0.1), False))
    state = BucketState.of(torch.zeros(100, device=DEVICE), 1)
    work = step_for(torch.full((100,), float("nan"), device=DEVICE), state, sizes, 0.0, [0, 100])
    work.offer()
    rows, _ = work._unpack(work.sent)
    assert int(rows[0]) < 0
    assert bool((rows.view(-1, 2)[1:, 1] == -1).all())


def test_a_sum_rounded_to_zero_is_neither_applied_nor_cleared() -> None:
    """Beside 1000 a value of 1 is rounded to 0: it stays in the residual, and the owner keeps no error of it."""
    gradient = torch.tensor([1000.0, 1.0, 0.0, 0.0], device=DEVICE)
    state, sizes = BucketState.of(torch.zeros(4, device=DEVICE), 1), whole_words(
        Sizes(4, 4, encoding_for("int8", 4, 1.0), True))  # fmt: skip
    work = step_for(gradient, state, sizes, 0.0, [0, 4])
    work.offer()
    work.reduce(work.sent.clone(), 1e38)
    work.finish(work.part.clone(), 1.0)
    assert gradient.tolist()[1:] == [0, 0, 0]
    assert float(gradient[0] + state.residual[0]) == 1000
    assert state.residual.tolist()[1:] == [1, 0, 0]


def test_a_sum_at_the_limit_poisons_the_step() -> None:
    sizes = Sizes(4, 4, FP32, False)
    state = BucketState.of(torch.zeros(100, device=DEVICE), 3)
    received = messages([[(30000.0, 3)], [(30000.0, 3)], [(5504.0, 3)]], sizes)
    for limit, poisoned in ((65504.0, True), (65505.0, False)):
        work = step_for(torch.zeros(100, device=DEVICE), state, sizes, 0.0, [0, 30, 60, 100])
        work.reduce(received, limit)
        assert (int(unframe_messages(work.part.cpu(), FP32)[0][0, 0]) < 0) == poisoned
