"""The exchange of fixed-size messages with Triton kernels: what ``fixed.py`` does, in a dozen launches.

    offer     reset messages; sample, threshold; offer            then the all-to-all
    reduce    add, collect; sample, threshold; select sums        then the all-gather
    finish    accumulate, apply, subtract applied; record step

Messages and results are those of the torch operations, except for the order of pairs, the order of float32 additions,
and which pairs find a slot where there are too few. Until ``finish`` neither gradient nor residual changes, so a step
that is poisoned, or breaks off, has nothing to undo.
"""

import torch
import triton

from anabranch.comm.communicator import Communicator
from anabranch.comm.exchange import Steps, record_stream
from anabranch.sparse import thresholds
from anabranch.sparse.kernels import message, step, threshold
from anabranch.sparse.options import OkTopk
from anabranch.sparse.phases import rebalance_regions, region_buffer
from anabranch.sparse.sizes import Sizes
from anabranch.sparse.state import BucketState

BLOCK, WARPS = 4096, 4  # of passes over all elements: 32 per thread, so that many loads are in flight
PAIRS = 512  # block of passes over pairs
CHUNK, CHUNK_WARPS = 16384, 32  # of the one program that finds a sample's threshold
MAX_SAMPLE_NUMEL = 2**18  # for larger samples torch.topk is faster than one program


def triton_exchange(
    gradient: torch.Tensor,
    state: BucketState,
    comm: Communicator,
    divisor: float,
    density: float,
    options: OkTopk,
) -> Steps:
    """``oktopk.exchange`` at this density, with the messages of ``fixed_exchange``. Not for deterministic runs."""
    work = TritonStep(gradient, state, comm, Sizes.of(len(gradient), comm.size, density, options))
    work.local_threshold()
    yield from rebalance_regions(gradient, state, comm, work.sizes, options)
    work.offer()
    received = torch.empty_like(work.sent)
    yield comm.all_to_all(received, work.sent, "split")
    record_stream(work.message_words, work.rounding_error, received)
    work.reduce(received)
    everyone = torch.empty(comm.size, work.part.shape[1], dtype=torch.uint8, device=gradient.device)
    yield comm.all_gather(everyone, work.part, "gather")
    record_stream(work.message_words, work.rounding_error, everyone)
    work.finish(everyone, divisor)
    state.step += 1
    state.fresh = False


class TritonStep:
    """One step of one bucket on one rank: its messages, and the launches between them.

    ``message_words`` is the memory of all messages: a row to each owner (``sent``), one to everyone (``part``), and a
    counter. ``region_buffer`` is where this owner adds: zeros of its own, or the gradient's memory where gradients
    were accumulated in place and left it zero.
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
        self.row_words = sizes.message_nbytes // 4
        rows = self.ranks + 1
        self.message_words = torch.empty(rows * self.row_words + 1, dtype=torch.int32, device=gradient.device)
        messages = self.message_words[:-1].view(torch.uint8).view(rows, -1)
        self.sent, self.part = messages[:-1], messages[-1:]
        self.counter = self.message_words[-1:]
        self.rounding_error = torch.empty(
            sizes.capacity if sizes.encoding.rounds else 0, dtype=torch.float32, device=gradient.device
        )
        self.encoding = {"first": sizes.encoding.first, "last": sizes.encoding.last}
        self.rows = triton.next_power_of_2(self.ranks)
        grid = triton.cdiv(self.row_words, 1024), rows
        message.reset[grid](self.message_words, self.counter, self.row_words, block=1024)

    def local_threshold(self) -> None:
        """``state.local_threshold`` ← about the k-th largest magnitude of residual + gradient, from a sample."""
        if self.sizes.selects_all:
            self.state.local_threshold.zero_()
            return
        numel, k = len(self.gradient), self.sizes.k
        wanted = thresholds.sample_numel(numel, k)
        seen = self._empty_sample(wanted)
        shift = thresholds.sample_shift(self.state.step)
        threshold.sample[(len(seen) // PAIRS,)](
            self.gradient, self.state.residual, seen, shift, numel, wanted, every=wanted == numel, block=PAIRS
        )
        kth_magnitude(seen, thresholds.sample_rank(numel, k), self.state.local_threshold)

    def offer(self) -> None:
        """Pack what passes the local threshold into ``sent``."""
        step.offer[(triton.cdiv(len(self.gradient), BLOCK),)](
            self.gradient, self.state.residual, self.state.local_threshold, self.state.boundaries,
            *self._views(self.sent), len(self.gradient), self.ranks, self.sizes.capacity, self.row_words,
            **self.encoding, rows=self.rows, block=BLOCK, num_warps=WARPS,
        )  # fmt: skip

    def reduce(self, received: torch.Tensor) -> None:
        """Add what arrived, and pack the sums that pass this owner's threshold into ``part``."""
        capacity, most = self.sizes.capacity, self.ranks * self.sizes.capacity
        sums, positions = torch.empty(2, most, dtype=torch.int32, device=received.device)
        heads, pairs = self._views(received)
        buffer = self.region_buffer
        step.add[self._grid](pairs, buffer, capacity, **self.encoding, block=PAIRS)
        step.collect[self._grid](
            pairs, buffer.view(torch.int32), self.counter, sums, positions, capacity, **self.encoding, block=PAIRS
        )
        self._owner_threshold(sums)
        head, pairs = self._views(self.part)
        step.select_sums[(triton.cdiv(most, PAIRS),)](
            sums, positions, self.counter, heads, self.state.threshold_bias, head, pairs, self.rounding_error,
            self.ranks, capacity, self.row_words, **self.encoding, rows=self.rows, block=PAIRS,
        )  # fmt: skip

    def _owner_threshold(self, sums: torch.Tensor) -> None:
        """The second word of ``part`` ← the threshold of this owner's share of k among its sums."""
        if self.sizes.selects_all:
            return  # a reset message has 0 there
        numel, share = len(sums), -(-self.sizes.k // self.ranks)
        if share >= numel:
            return
        wanted = thresholds.sample_numel(numel, share)
        seen = self._empty_sample(wanted)
        shift = thresholds.sample_shift(self.state.step)
        threshold.sample_sums[(len(seen) // PAIRS,)](
            sums, self.counter, seen, shift, numel, wanted, every=wanted == numel, block=PAIRS
        )
        kth_magnitude(seen, thresholds.sample_rank(numel, share), self._views(self.part)[0][1].view(torch.float32))

    def finish(self, everyone: torch.Tensor, divisor: float) -> None:
        """Write gradient and residual after the step, and record the step in the state."""
        state, numel, capacity = self.state, len(self.gradient), self.sizes.capacity
        heads, pairs = self._views(everyone)
        common = {"ranks": self.ranks, "row_words": self.row_words, "rows": self.rows}
        on_pairs = {"capacity": capacity, "block": PAIRS, **common, **self.encoding}
        step.accumulate[(triton.cdiv(numel, BLOCK),)](
            heads, self.gradient, state.residual, numel, **common, block=BLOCK, num_warps=WARPS
        )
        applied = self.gradient.view(torch.int32)
        step.apply[self._grid](heads, pairs, state.boundaries, applied, divisor, **on_pairs)
        sent_heads, sent_pairs = self._views(self.sent)
        step.subtract_applied[self._grid](heads, sent_pairs, state.boundaries, applied, state.residual, **on_pairs)
        if self.sizes.encoding.rounds:
            _, own = self._views(self.part)
            start = state.boundaries[self.rank :]
            step.keep_rounding_error[self._grid[:1]](heads, own, self.rounding_error, start, state.residual, **on_pairs)
        step.record_step[(1,)](
            heads, sent_heads, state.threshold_bias, state.global_threshold, state.offered, state.applied,
            self.rank, thresholds.BIAS_MEMORY, **common, num_warps=1,
        )  # fmt: skip

    def _empty_sample(self, wanted: int) -> torch.Tensor:
        """Memory for a sample of ``wanted`` values, rounded up to whole chunks."""
        return torch.empty(triton.cdiv(wanted, CHUNK) * CHUNK, dtype=torch.int32, device=self.gradient.device)

    @property
    def _grid(self) -> tuple[int, int]:
        return triton.cdiv(self.sizes.capacity, PAIRS), self.ranks

    def _views(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of messages as the kernels need it: as int32 for heads, and as int64 or int16 for pairs."""
        flat = messages.view(-1)
        return flat.view(torch.int32), flat.view(torch.int16 if self.sizes.encoding.rounds else torch.int64)


def kth_magnitude(seen: torch.Tensor, rank: int, found: torch.Tensor) -> None:
    """``found`` (a float32 scalar) ← the ``rank``-th largest of magnitudes given as bits, rounded down."""
    if len(seen) > MAX_SAMPLE_NUMEL:
        found.copy_(thresholds.round_down(torch.topk(seen, rank, sorted=False).values.amin().view(torch.float32)))
    else:
        threshold.kth_magnitude[(1,)](seen, found, len(seen), rank, chunk=CHUNK, num_warps=CHUNK_WARPS)
