"""The exchange of fixed-size messages with Triton kernels: what ``fixed_exchange.py`` does, in a dozen launches.

    offer     reset rows; sample, threshold; offer                then the all-to-all
    reduce    add, collect; sample, threshold; select sums        then the all-gather
    finish    accumulate, apply, subtract applied; record step

All these work on rows of pairs, which are the messages if values travel in float32. Where values are rounded, rows are
packed into smaller messages before they are sent, and unpacked when they arrive: passes over the selected values alone.
Messages and results are those of the torch operations, except for the order of pairs, the order of float32 additions,
and which pairs find a slot where there are too few. Until ``finish`` neither gradient nor residual changes, so a step
that is poisoned, or breaks off, has nothing to undo.
"""

from typing import Any

import torch
import triton

from anabranch.exchange.communicator import Communicator
from anabranch.exchange.interface import Steps, record_stream
from anabranch.exchange.residuals.bucket_states import BucketState
from anabranch.exchange.sparse import kernels, packing, thresholds
from anabranch.exchange.sparse.select import SUM_LIMIT, rebalance_regions, region_buffer, regions_due
from anabranch.values.kinds.formats import Sizes
from anabranch.values.kinds.options import OkTopk

BLOCK, WARPS = 4096, 4  # in passes over all elements: 32 per thread, so that many loads are in flight
PAIRS = 512  # block of passes over pairs
TABLE = 1024  # block of the program that writes the tables of a message
CHUNK, CHUNK_WARPS = 16384, 32  # in the one program that finds a sample's threshold
MAX_SAMPLE_NUMEL = 2**18  # for larger samples torch.topk is faster than one program


def triton_exchange(
    gradient: torch.Tensor, state: BucketState, comm: Communicator, divisor: float, density: float, options: OkTopk
) -> Steps:
    """``oktopk.exchange`` at this density, with the messages of ``fixed_exchange``. Not for deterministic runs."""
    work = TritonStep(gradient, state, comm, Sizes.of(len(gradient), comm.size, density, options))
    work.local_threshold()
    if regions_due(state, work.sizes, options):
        yield from rebalance_regions(gradient, state, comm, work.sizes)
    work.offer()
    received = torch.empty_like(work.sent)
    yield comm.all_to_all(received, work.sent, "split")
    record_stream(*work.kept, received)
    work.reduce(received, SUM_LIMIT)
    everyone = torch.empty(comm.size, work.part.shape[1], dtype=torch.uint8, device=gradient.device)
    yield comm.all_gather(everyone, work.part, "gather")
    record_stream(*work.kept, everyone)
    work.finish(everyone, divisor)
    state.step += 1
    state.fresh = False


class TritonStep:
    """One step of one bucket on one rank: its messages, and the launches between them.

    ``row_words`` is the memory of all rows of pairs: one to each owner, one to everyone, and a counter. ``sent`` and
    ``part`` are the messages: the rows themselves, or packed. ``region_buffer`` is where this owner adds: zeros of its
    own, or the gradient's memory where gradients were accumulated in place and left it zero.
    """

    def __init__(self, gradient: torch.Tensor, state: BucketState, comm: Communicator, sizes: Sizes) -> None:
        self.gradient = gradient
        self.state = state
        self.sizes = sizes
        self.rank = comm.rank
        self.ranks = comm.size
        self.region_buffer = (
            gradient if state.accumulates_in_place else region_buffer(len(gradient), comm, gradient.device)
        )
        device, rows, rounds = gradient.device, self.ranks + 1, sizes.encoding.rounds
        self.words_per_row = 2 * (sizes.capacity + 1)
        self.row_words = torch.empty(rows * self.words_per_row + 1, dtype=torch.int32, device=device)
        self.sent_rows, self.part_row, self.counter = self.row_words.split(
            [self.ranks * self.words_per_row, self.words_per_row, 1]
        )
        self.messages = (
            torch.empty(rows, sizes.message_nbytes, dtype=torch.uint8, device=device) if rounds
            else self.row_words[:-1].view(torch.uint8).view(rows, -1)
        )  # fmt: skip
        self.sent, self.part = self.messages[:-1], self.messages[-1:]
        self.rounding_error = torch.empty(sizes.capacity if rounds else 0, dtype=torch.float32, device=device)
        self.rows = triton.next_power_of_2(self.ranks)
        grid = triton.cdiv(self.words_per_row, 1024), rows
        kernels.reset[grid](self.row_words, self.counter, self.words_per_row, block=1024)

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What is needed from one part of the step to the next."""
        return self.row_words, self.messages, self.rounding_error

    def local_threshold(self) -> None:
        """``state.local_threshold`` ← about the k-th largest magnitude of residual + gradient, from a sample."""
        if self.sizes.selects_all:
            self.state.local_threshold.zero_()
            return
        given, found = (self.gradient, self.state.residual), self.state.local_threshold
        self._sampled_magnitude(kernels.sample, given, len(self.gradient), self.sizes.k, found)

    def offer(self) -> None:
        """Pack what passes the local threshold into ``sent``."""
        kernels.offer[(triton.cdiv(len(self.gradient), BLOCK),)](
            self.gradient, self.state.residual, self.state.local_threshold, self.state.boundaries,
            *_views(self.sent_rows), len(self.gradient), self.ranks, self.sizes.capacity, self.words_per_row,
            rows=self.rows, block=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        if self.sizes.encoding.rounds:
            self._pack(self.sent_rows, self.sent)

    def reduce(self, received: torch.Tensor, limit: float) -> None:
        """Add what arrived, and pack the sums that pass this owner's threshold into ``part``.

        A sum that is not below ``limit`` poisons the step.
        """
        capacity, most = self.sizes.capacity, self.ranks * self.sizes.capacity
        sums, positions = torch.empty(2, most, dtype=torch.int32, device=received.device)
        heads, pairs = self._unpack(received)
        buffer = self.region_buffer
        kernels.add[self._grid](pairs, buffer, capacity, block=PAIRS)
        kernels.collect[self._grid](
            pairs, buffer.view(torch.int32), self.counter, sums, positions, capacity, block=PAIRS
        )  # fmt: skip
        self._owner_threshold(sums)
        head, pairs = _views(self.part_row)
        kernels.select_sums[(triton.cdiv(most, PAIRS),)](
            sums, positions, self.counter, heads, self.state.threshold_bias, head, pairs, limit,
            self.ranks, capacity, self.words_per_row, rows=self.rows, block=PAIRS,
        )  # fmt: skip
        if self.sizes.encoding.rounds:
            self._pack(self.part_row, self.part, keeps_error=True)

    def _owner_threshold(self, sums: torch.Tensor) -> None:
        """The second word of ``part_row`` ← the threshold of this owner's share of k among its sums."""
        numel, share = len(sums), -(-self.sizes.k // self.ranks)
        if self.sizes.selects_all or share >= numel:
            return  # a reset row has 0 there
        found = self.part_row[1].view(torch.float32)
        self._sampled_magnitude(kernels.sample_sums, (sums, self.counter), numel, share, found)

    def _sampled_magnitude(
        self, kernel: Any, given: tuple[torch.Tensor, torch.Tensor], numel: int, k: int, found: torch.Tensor
    ) -> None:
        """``found`` ← about the k-th largest of ``numel`` magnitudes, from a sample that ``kernel`` takes of them."""
        wanted = thresholds.sample_numel(numel, k)
        seen = torch.empty(triton.cdiv(wanted, CHUNK) * CHUNK, dtype=torch.int32, device=found.device)
        shift = thresholds.sample_shift(self.state.step)
        kernel[(len(seen) // PAIRS,)](*given, seen, shift, numel, wanted, every=wanted == numel, block=PAIRS)
        kth_magnitude(seen, thresholds.sample_rank(numel, k), found)

    def finish(self, everyone: torch.Tensor, divisor: float) -> None:
        """Write gradient and residual after the step, and record the step in the state."""
        state, numel, capacity = self.state, len(self.gradient), self.sizes.capacity
        heads, pairs = self._unpack(everyone)
        common = {"ranks": self.ranks, "row_words": self.words_per_row, "rows": self.rows}
        on_pairs = {"capacity": capacity, "block": PAIRS, **common}
        kernels.accumulate[(triton.cdiv(numel, BLOCK),)](
            heads, self.gradient, state.residual, numel, **common, block=BLOCK, num_warps=WARPS
        )
        applied = self.gradient.view(torch.int32)
        kernels.apply[self._grid](heads, pairs, state.boundaries, applied, divisor, **on_pairs)
        sent_heads, sent_pairs = _views(self.sent_rows)
        kernels.subtract_applied[self._grid](heads, sent_pairs, state.boundaries, applied, state.residual, **on_pairs)
        if self.sizes.encoding.rounds:
            _, own = _views(self.part_row)
            start = state.boundaries[self.rank :]
            kernels.keep_rounding_error[self._grid[:1]](
                heads, own, self.rounding_error, start, state.residual, **on_pairs
            )
        kernels.record_step[(1,)](
            heads, sent_heads, state.threshold_bias, state.offered, state.applied,
            self.rank, thresholds.BIAS_MEMORY, **common, num_warps=1,
        )  # fmt: skip

    @property
    def _grid(self) -> tuple[int, int]:
        return triton.cdiv(self.sizes.capacity, PAIRS), self.ranks

    def _pack(self, rows: torch.Tensor, messages: torch.Tensor, keeps_error: bool = False) -> None:
        """``messages`` ← rows of pairs, encoded; in the rows, values ← as they will be decoded."""
        encoding, capacity, number = self.sizes.encoding, self.sizes.capacity, len(messages)
        sizes = [number * encoding.chunks, number * encoding.groups]
        counts, largest = torch.zeros(sum(sizes), dtype=torch.int32, device=rows.device).split(sizes)
        orders = torch.empty(number * capacity, dtype=torch.int32, device=rows.device)
        heads, pairs = _views(rows)
        words, halves, raw = (messages.view(-1).view(dtype) for dtype in (torch.int32, torch.int16, torch.uint8))
        table = {"capacity": capacity, "chunks": encoding.chunks, "groups": encoding.groups}
        grouped = {**table, "group_bits": encoding.group_bits, "block": PAIRS}
        scaled = {"scaled": encoding.groups > 0, "enable_fp_fusion": False}
        grid, row_words = (self._grid[0], number), len(words) // number
        packing.count[grid](pairs, orders, counts, largest, **grouped, **scaled)
        packing.tables[(number,)](
            heads, counts, largest, words, halves, row_words=row_words, **table, **scaled, block=TABLE
        )  # fmt: skip
        packing.entries[grid](
            pairs, orders, counts, largest, words, raw, self.rounding_error, row_words=row_words,
            keeps_error=keeps_error, **grouped, **scaled,
        )  # fmt: skip

    def _unpack(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The views of rows of pairs from such messages, one from each rank."""
        encoding, capacity = self.sizes.encoding, self.sizes.capacity
        if not encoding.rounds:
            return _views(messages.view(-1).view(torch.int32))
        rows = torch.empty(self.ranks * self.words_per_row, dtype=torch.int32, device=messages.device)
        words, halves, raw = (messages.view(-1).view(dtype) for dtype in (torch.int32, torch.int16, torch.uint8))
        packing.unpack[self._grid](
            words, halves, raw, *_views(rows), capacity, encoding.chunks, encoding.groups, encoding.group_bits,
            len(words) // self.ranks, (encoding.chunks - 1).bit_length(), scaled=encoding.groups > 0, block=PAIRS,
            enable_fp_fusion=False,
        )  # fmt: skip
        return _views(rows)


def _views(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory of rows (int32) as the kernels need it: for heads, and as int64 for pairs."""
    return rows, rows.view(torch.int64)


def kth_magnitude(seen: torch.Tensor, rank: int, found: torch.Tensor) -> None:
    """``found`` (a float32 scalar) ← the ``rank``-th largest of magnitudes given as bits, rounded down."""
    if len(seen) > MAX_SAMPLE_NUMEL:
        found.copy_(thresholds.round_down(torch.topk(seen, rank, sorted=False).values.amin().view(torch.float32)))
    else:
        kernels.kth_magnitude[(1,)](seen, found, len(seen), rank, chunk=CHUNK, num_warps=CHUNK_WARPS)
